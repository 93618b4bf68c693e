"""Snapshots of journals: to assert on, and to keep in a file for the code of later days."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, overload

from kombu.serialization import loads as deserialize
from kombu.serialization import prepare_accept_content
from kombu.utils.json import dumps as to_json
from kombu.utils.json import loads as from_json

from celery_durable.records import Execution, JournalEntry, Kind

#: The format of the files that are written.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One durable call.

    ``kind`` is ``"step"``, ``"sleep"`` or ``"error"`` (a step whose exception the body has handled);
    ``value`` what a step returned, or its exception; ``due`` when a sleep ends.
    """

    position: int
    kind: str
    name: str
    value: Any = None
    due: datetime | None = None
    #: As it is stored, which is what a replay reads.
    stored: JournalEntry | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        if self.kind == Kind.SLEEP:
            return f"{self.position} sleep{name} until {self.due}"
        return f"{self.position} {self.kind}{name}: {self.value!r}"


@dataclass(frozen=True)
class Journal(Sequence[Entry]):
    """The journal of one task as it stood, in order, with the arguments of the task."""

    task: str
    task_id: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entries: tuple[Entry, ...]

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Entry, ...]: ...

    def __getitem__(self, index: int | slice) -> Entry | tuple[Entry, ...]:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __str__(self) -> str:
        return "\n".join([f"{self.task}[{self.task_id}]", *map(str, self.entries)])

    @classmethod
    def of(cls, app: Any, task_id: str) -> Journal:
        """The journal of a task in the app's own database, in production say.

        Raises ExecutionNotFound.
        """
        durable = app.durable
        execution: Execution = durable.get(task_id)
        args, kwargs = _arguments_of(app, execution)
        codec = durable.runtime.codec
        return cls(
            task=execution.task_name,
            task_id=task_id,
            args=args,
            kwargs=kwargs,
            entries=tuple(_shown(entry, codec) for entry in execution.journal),
        )

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a JSON file."""
        content = {
            "format": FORMAT,
            "task": self.task,
            "task_id": self.task_id,
            "args": list(self.args),
            "kwargs": self.kwargs,
            "entries": [_to_file(entry) for entry in self.entries],
        }
        # kombu's JSON knows dates and the like; its text is laid out for people after that.
        text = json.dumps(json.loads(to_json(content)), indent=2, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str], app: Any) -> Journal:
        """Read what ``save`` has written. ``app`` says how its values are decoded.

        Raises ValueError for a file of another kind.
        """
        content = from_json(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is no journal of format {FORMAT}")
        codec = app.durable.runtime.codec
        return cls(
            task=content["task"],
            task_id=content["task_id"],
            args=tuple(content["args"]),
            kwargs=content["kwargs"],
            entries=tuple(_shown(_from_file(fields), codec) for fields in content["entries"]),
        )


def _arguments_of(app: Any, execution: Execution) -> tuple[tuple[Any, ...], dict[str, Any]]:
    message = execution.message
    if message is None:
        return (), {}
    args, kwargs, _ = deserialize(
        message.body,
        message.content_type or "",
        message.content_encoding or "",
        accept=prepare_accept_content(app.conf.accept_content),
    )
    return tuple(args), dict(kwargs)


def _shown(stored: JournalEntry, codec: Any) -> Entry:
    encoded = (stored.payload, stored.content_type, stored.content_encoding)
    value = None
    if stored.kind == Kind.STEP:
        value = codec.decode(*encoded)
    elif stored.kind == Kind.ERROR:
        value = codec.decode_exception(*encoded)
    return Entry(stored.position, stored.kind, stored.name, value, stored.due_at, stored)


def _to_file(entry: Entry) -> dict[str, Any]:
    stored = entry.stored
    assert stored is not None
    fields: dict[str, Any] = {"position": entry.position, "kind": entry.kind, "name": entry.name}
    if entry.due is not None:
        fields["due"] = entry.due.isoformat()
    if stored.payload is not None:
        fields["content_type"] = stored.content_type
        fields["content_encoding"] = stored.content_encoding
        try:
            fields["payload"] = stored.payload.decode("utf-8")
        except UnicodeDecodeError:
            fields["base64"] = base64.b64encode(stored.payload).decode("ascii")
    return fields


def _from_file(fields: dict[str, Any]) -> JournalEntry:
    payload = fields.get("payload")
    if payload is not None:
        payload = payload.encode("utf-8")
    elif "base64" in fields:
        payload = base64.b64decode(fields["base64"])
    due = fields.get("due")
    return JournalEntry(
        position=fields["position"],
        kind=fields["kind"],
        name=fields["name"],
        due_at=None if due is None else datetime.fromisoformat(due),
        payload=payload,
        content_type=fields.get("content_type"),
        content_encoding=fields.get("content_encoding"),
    )
