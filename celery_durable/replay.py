"""Replay: what the journal says about the durable call that the code makes now."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from celery_durable.records import JournalEntry, Kind

#: The namespace of timer ids, fixed for ever: (task, position) always gives the same id.
TIMER_NAMESPACE = uuid.UUID("6f0c1a52-5f0e-5d3e-9d42-7f1f3c0f9b11")


def timer_id(task_id: str, position: int) -> str:
    """The id of the durable call at ``position`` of a task."""
    return str(uuid.uuid5(TIMER_NAMESPACE, f"{task_id}/{position}"))


class Journal:
    """The durable calls of one run, counted in program order and held against what was journaled."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        self._entries = {entry.position: entry for entry in entries}
        self.position = 0

    def advance(self) -> int:
        """Take the next position."""
        self.position += 1
        return self.position

    def recorded(self) -> JournalEntry | None:
        """What was journaled at the current position, if anything."""
        return self._entries.get(self.position)


def fits(entry: JournalEntry, kind: str, name: str) -> bool:
    """Whether a journaled entry belongs to a call of this kind and name.

    A step that raised was journaled as an error of the same name.
    """
    if entry.name != name:
        return False
    if kind == Kind.STEP:
        return entry.kind in (Kind.STEP, Kind.ERROR)
    return entry.kind == kind


def describe(kind: str, name: str) -> str:
    """A durable call in words."""
    shown = Kind.STEP if kind == Kind.ERROR else kind
    return f"{shown} {name!r}" if name else shown
