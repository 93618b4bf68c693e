"""The journal of an execution: read as a whole, written with a change of its execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, and_, bindparam, case, delete, select

from celery_durable.records import JournalEntry, Kind
from celery_durable.replay import timer_id
from celery_durable.store.base import Context, entry_of, given
from celery_durable.store.dialect import UtcDateTime, insert
from celery_durable.store.prepared import Prepared

_KEY = ("namespace", "task_id", "position")
#: What an entry says itself; the rest is known where it is written.
_GIVEN = ("position", "kind", "name", "timer_id", "payload", "content_type", "content_encoding")


class JournalRows:
    """Statements on journal entries."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._journal = context.schema.journal
        self._reading = Prepared(context, self._read)
        self._writing = Prepared(context, self._write)

    def columns(self) -> tuple[Any, ...]:
        """An entry as it is read, with whether it is a sleep that is over."""
        due_at = self._journal.c.due_at
        is_over = and_(due_at.is_not(None), due_at <= self._context.now())
        return (*self._journal.c, is_over.label("is_over"))

    def read(self, task_id: str, connection: Connection | None = None) -> tuple[JournalEntry, ...]:
        """All entries of an execution, in order."""
        found = self._reading.all({"the_task_id": task_id}, connection)
        return tuple(entry_of(row) for row in found)

    def _read(self) -> Any:
        mine = self._context.mine(self._journal, given(self._journal, "task_id"))
        return select(*self.columns()).where(mine).order_by(self._journal.c.position)

    def clear(self, connection: Connection, task_id: str) -> None:
        """Remove the entries of an execution."""
        connection.execute(delete(self._journal).where(self._context.mine(self._journal, task_id)))

    def write(
        self, connection: Connection, task_id: str, entries: Sequence[JournalEntry], sleeps_until: Any
    ) -> None:
        """Write entries in the transaction of the change that they belong to."""
        for entry in entries:
            values = entry_values(0, task_id, entry)
            self._writing.count({**values, "sleeps_until": sleeps_until}, connection)

    def _write(self) -> Any:
        return self.insert().values(self.new_entry(0, bindparam("sleeps_until", type_=UtcDateTime())))

    def insert(self) -> Any:
        """An INSERT of entries. A write whose answer was lost is tried again by the same holder: then its
        entries are there."""
        into = insert(self._journal, self._context.database.dialect_name)
        return into.on_conflict_do_nothing(index_elements=_KEY)

    def new_entry(self, number: int, sleeps_until: Any) -> dict[str, Any]:
        """An entry as expressions of the values that ``entry_values`` makes."""
        columns = self._journal.c
        own = {name: bindparam(f"{name}_{number}", type_=columns[name].type) for name in _GIVEN}
        return {
            "namespace": self._context.namespace,
            "task_id": bindparam(f"task_id_{number}", type_=columns.task_id.type),
            "due_at": case((own["kind"] == Kind.SLEEP, sleeps_until)),
            "recorded_at": self._context.now(),
            **own,
        }


def entry_values(number: int, task_id: str, entry: JournalEntry) -> dict[str, Any]:
    """The values of one entry, the ``number``-th of a statement."""
    return {
        f"task_id_{number}": task_id,
        f"position_{number}": entry.position,
        f"kind_{number}": entry.kind,
        f"name_{number}": entry.name,
        f"timer_id_{number}": timer_id(task_id, entry.position),
        f"payload_{number}": entry.payload,
        f"content_type_{number}": entry.content_type,
        f"content_encoding_{number}": entry.content_encoding,
    }
