"""What every part of the store shares: the database, the tables, the namespace, rows as records."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Float, Table, Text, and_, any_, bindparam, func, literal

from celery_durable.records import Due, JournalEntry, LeaseKey, Message, Outcome, OutcomeKind, Row
from celery_durable.store.dialect import MOST_SECONDS, UtcDateTime, now_plus, shifted
from celery_durable.store.engine import Database
from celery_durable.store.notify import Notifier
from celery_durable.store.schema import Schema

MESSAGE_COLUMNS = (
    "headers",
    "properties",
    "body",
    "content_type",
    "content_encoding",
    "compression",
    "exchange",
    "routing_key",
)

_AT_ONCE = Due()


@dataclass(frozen=True)
class Context:
    """One namespace in one database.

    For tests that travel in time: ``time_offset`` (seconds) moves the database's clock, and an instant in
    ``stopped_at`` is where it stands still.
    """

    database: Database
    schema: Schema
    namespace: str
    time_offset: list[float]
    notifier: Notifier | None = None
    stopped_at: list[datetime] = field(default_factory=list)

    def now(self, seconds: float | ColumnElement[float] = 0.0) -> Any:
        """The database's time, plus some seconds."""
        if self.stopped_at:
            stopped = bindparam("stopped", unique=True, type_=UtcDateTime(), callable_=self._stopped)
            return shifted(stopped, seconds)
        if isinstance(seconds, (int, float)):
            return now_plus(literal(min(float(seconds) + self.time_offset[0], MOST_SECONDS)))
        return now_plus(seconds + self.time_offset[0])

    def _stopped(self) -> datetime:
        return self.stopped_at[0]

    @property
    def clock_name(self) -> str | None:
        """What ``now`` is made of: a statement with it can be kept. None: a time that is in its text."""
        if self.stopped_at:
            return "stopped"
        return None if self.time_offset[0] else "database"

    def nearer(self, due: Due = _AT_ONCE) -> None:
        """Hint that a row with this due time was committed. Called outside any transaction."""
        if self.notifier is not None:
            self.notifier.nearer(due)

    def instant(self, due: Due) -> Any:
        """A due time as an expression of the database."""
        return due.at if due.at is not None else self.now(due.seconds)

    def instant_given(self) -> Any:
        """A due time as an expression of the values that ``due_values`` makes."""
        return func.coalesce(bindparam("due_at", type_=UtcDateTime()), self.now(seconds_given("delay")))

    def mine(self, table: Any, task_id: Any) -> ColumnElement[bool]:
        """The rows of a task in this namespace."""
        return and_(table.c.namespace == self.namespace, table.c.task_id == task_id)

    def among(self, column: ColumnElement[str], values: Sequence[str]) -> ColumnElement[bool]:
        """The rows whose column is one of many values.

        One parameter where the database has arrays: a hundred of them cost more than the search.
        """
        if self.database.dialect_name == "postgresql":
            return column == any_(literal(list(values), ARRAY(Text)))
        return column.in_(values)

    def fenced(self, key: LeaseKey) -> ColumnElement[bool]:
        """The execution, if the holder of this lease still owns it."""
        return self._fenced(key.task_id, key.owner, key.token)

    def fenced_given(self) -> ColumnElement[bool]:
        """The same as an expression of the values that ``lease_values`` makes."""
        return self._fenced(*(given(self.schema.executions, name) for name in ("task_id", "owner", "token")))

    def _fenced(self, task_id: Any, owner: Any, token: Any) -> ColumnElement[bool]:
        executions = self.schema.executions
        return and_(self.mine(executions, task_id), executions.c.owner == owner, executions.c.token == token)


def lease_values(key: LeaseKey) -> dict[str, Any]:
    """The values of a statement that is fenced by ``Context.fenced_given``."""
    return {"the_task_id": key.task_id, "the_owner": key.owner, "the_token": key.token}


def due_values(due: Due) -> dict[str, Any]:
    """The values of a statement with ``Context.instant_given``."""
    return {"due_at": due.at, "delay": most_seconds(due.seconds)}


def seconds_given(name: str) -> Any:
    """Seconds to be added to the time, as a value of this name (at most MOST_SECONDS)."""
    return bindparam(name, type_=Float())


def most_seconds(seconds: float) -> float:
    """These seconds, or as many as the databases can add to a time."""
    return min(float(seconds), MOST_SECONDS)


def message_columns(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in MESSAGE_COLUMNS}


def message_values(message: Message) -> dict[str, Any]:
    """The values of a statement with the columns of ``message_given``."""
    return {f"the_{name}": getattr(message, name) for name in MESSAGE_COLUMNS}


def message_given(executions: Table) -> dict[str, Any]:
    """The columns of a message as expressions of the values that ``message_values`` makes."""
    return {name: given(executions, name) for name in MESSAGE_COLUMNS}


def given(table: Table, column: str) -> Any:
    """A value for a column, named after it. (A column's own name is SQLAlchemy's in a SET or VALUES.)"""
    return bindparam(f"the_{column}", type_=table.c[column].type)


def message_of(row: Mapping[Any, Any]) -> Message | None:
    """The stored message; None for a row that has been emptied or never had one."""
    if row["body"] is None:
        return None
    return Message(
        headers=row["headers"] or "{}",
        properties=row["properties"] or "{}",
        body=bytes(row["body"]),
        content_type=row["content_type"],
        content_encoding=row["content_encoding"],
        compression=row["compression"],
        exchange=row["exchange"] or "",
        routing_key=row["routing_key"] or "",
    )


def row_of(row: Mapping[Any, Any], now: datetime) -> Row:
    """What the rules have to know of a row. Raises ValueError where it is none that a run has left."""
    if any(row[name] >= _MOST for name in _COUNTS):
        # The next one does not fit into its column: the statement that adds it would fail, and with it
        # whatever it says of other rows.
        raise ValueError("one of its counts is at its end")
    return Row(
        task_id=row["task_id"],
        task_name=row["task_name"],
        status=row["status"],
        token=row["token"],
        owner=row["owner"],
        wake_at=row["wake_at"],
        sends=row["sends"],
        message_version=row["message_version"],
        nesting=row["nesting"],
        send_id=row["send_id"],
        crashes=row["crashes"],
        draining=bool(row["draining"]),
        outcome=outcome_from_text(row["outcome"]),
        has_message=row["body"] is not None,
        now=now,
        past_sends=sends_from_text(row["past_sends"]),
    )


def sends_to_text(sends: Sequence[str]) -> str | None:
    """Send ids as one JSON text; None for none."""
    return json.dumps(list(sends)) if sends else None


def sends_from_text(text: str | None) -> tuple[str, ...]:
    """Send ids as they were stored. Raises ValueError where the text is none of ours."""
    if text is None:
        return ()
    sends = json.loads(text)
    if not isinstance(sends, list):
        raise ValueError("its past sends are no list")
    return tuple(map(str, sends))


def entry_of(row: Mapping[Any, Any]) -> JournalEntry:
    return JournalEntry(
        position=row["position"],
        kind=row["kind"],
        name=row["name"],
        timer_id=row["timer_id"],
        due_at=row["due_at"],
        is_over=bool(row["is_over"]),
        payload=None if row["payload"] is None else bytes(row["payload"]),
        content_type=row["content_type"],
        content_encoding=row["content_encoding"],
        recorded_at=row["recorded_at"],
    )


#: What is counted, one at a time, and the most that its columns hold.
_COUNTS = ("sends", "failures", "crashes", "message_version", "nesting")
_MOST = 2**31 - 1
_OUTCOME_TEXTS = ("reason", "content_type", "content_encoding")


def outcome_to_text(outcome: Outcome) -> str:
    """The outcome as one JSON text; a payload that is no text is kept in base 64."""
    fields: dict[str, Any] = {"kind": outcome.kind}
    if outcome.reason is not None:
        fields["reason"] = outcome.reason
    if outcome.payload is not None:
        try:
            fields["payload"] = outcome.payload.decode("utf-8")
        except UnicodeDecodeError:
            fields["base64"] = base64.b64encode(outcome.payload).decode("ascii")
        fields["content_type"] = outcome.content_type
        fields["content_encoding"] = outcome.content_encoding
    if outcome.refusals:
        fields["refusals"] = outcome.refusals
    return json.dumps(fields)


def outcome_from_text(text: str | None) -> Outcome | None:
    """The outcome as it was stored.

    Raises ValueError where the text is none: somebody wrote it by hand.
    """
    if text is None:
        return None
    try:
        fields = json.loads(text)
        payload = fields.get("payload")
        if payload is not None:
            payload = payload.encode("utf-8")
        elif "base64" in fields:
            payload = base64.b64decode(fields["base64"])
        kind = fields["kind"]
        texts = [fields.get(name) for name in _OUTCOME_TEXTS]
        is_known = kind in OutcomeKind.ALL
        refusals = max(0, int(fields.get("refusals", 0)))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not an outcome: {error!r:.200}") from error
    if not is_known or not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"not an outcome: its kind is {kind!r:.60}")
    return Outcome(kind, payload=payload, **dict(zip(_OUTCOME_TEXTS, texts, strict=True)), refusals=refusals)


def outcome_shown(text: str | None) -> Outcome | None:
    """The outcome for whoever looks at the row, also where it cannot be read."""
    try:
        return outcome_from_text(text)
    except ValueError as error:
        return Outcome(OutcomeKind.UNREADABLE, str(error))
