"""The journal of an execution: read as a whole, written together with a fenced change of its execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, Update, and_, cast, delete, select, union_all

from celery_durable.records import JournalEntry, Kind
from celery_durable.replay import timer_id
from celery_durable.store.base import Context, entry_of
from celery_durable.store.dialect import insert

#: Up to so many entries are written in one statement with the change that they belong to.
FEW = 8

_KEY = ("namespace", "task_id", "position")


@dataclass(frozen=True, slots=True)
class Change:
    """What an accepted change of an execution has made of it: its time, and the database's time of it."""

    wake_at: datetime | None
    now: datetime


class JournalRows:
    """Statements on journal entries."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._journal = context.schema.journal
        self._executions = context.schema.executions

    def columns(self) -> tuple[Any, ...]:
        """An entry as it is read, with whether it is a sleep that is over."""
        due_at = self._journal.c.due_at
        is_over = and_(due_at.is_not(None), due_at <= self._context.now())
        return (*self._journal.c, is_over.label("is_over"))

    def read(self, connection: Connection, task_id: str) -> tuple[JournalEntry, ...]:
        """All entries of an execution, in order."""
        journal = self._journal
        found = connection.execute(
            select(*self.columns()).where(self._context.mine(journal, task_id)).order_by(journal.c.position)
        )
        return tuple(entry_of(row) for row in found.mappings())

    def clear(self, connection: Connection, task_id: str) -> None:
        """Remove the entries of an execution."""
        connection.execute(delete(self._journal).where(self._context.mine(self._journal, task_id)))

    def change(
        self, fenced: Update, task_id: str, entries: Sequence[JournalEntry], due_at: datetime | None = None
    ) -> Change | None:
        """Change an execution and journal ``entries`` with it, in one transaction of its own.

        A sleep among them is due at ``due_at``, or when the execution is. None: the fence has refused the
        change, and nothing is written.
        """
        database = self._context.database
        if not entries:
            with database.statements() as connection:
                return self._apply(connection, fenced)
        if database.dialect_name == "postgresql" and len(entries) <= FEW:
            with database.statements() as connection:
                return _change_of(connection.execute(self._at_once(fenced, task_id, entries, due_at)))
        with database.transaction() as connection:
            return self.change_within(connection, fenced, task_id, entries, due_at)

    def change_within(
        self,
        connection: Connection,
        fenced: Update,
        task_id: str,
        entries: Sequence[JournalEntry],
        due_at: datetime | None = None,
        *,
        restart: bool = False,
    ) -> Change | None:
        """The same inside the caller's transaction. ``restart``: the journal begins anew."""
        change = self._apply(connection, fenced)
        if change is None:
            return None
        if restart:
            self.clear(connection, task_id)
        if entries:
            sleeps_until = due_at or change.wake_at
            # One statement for all, which SQLAlchemy keeps compiled: of a list of values it does not.
            connection.execute(
                self._insert()
                .values(recorded_at=self._context.now())
                .on_conflict_do_nothing(index_elements=_KEY),
                [self._values(task_id, entry, sleeps_until) for entry in entries],
            )
        return change

    def _apply(self, connection: Connection, fenced: Update) -> Change | None:
        return _change_of(connection.execute(self._returning(fenced)))

    def _returning(self, fenced: Update) -> Any:
        return fenced.returning(self._executions.c.wake_at, self._context.now().label("now"))

    def _at_once(
        self, fenced: Update, task_id: str, entries: Sequence[JournalEntry], due_at: datetime | None
    ) -> Select[Any]:
        """Change and entries as one statement, where the database lets a statement write two tables."""
        change = self._returning(fenced).cte("change")
        columns = list(self._journal.c)
        rows = []
        for entry in entries:
            values = self._values(task_id, entry, due_at or change.c.wake_at)
            values["recorded_at"] = self._context.now()
            rows.append(
                select(*(cast(values[column.name], column.type) for column in columns)).select_from(change)
            )
        written = (
            self._insert()
            .from_select([column.name for column in columns], rows[0] if len(rows) == 1 else union_all(*rows))
            .on_conflict_do_nothing(index_elements=_KEY)
            .cte("written")
        )
        return select(change.c.wake_at, change.c.now).add_cte(written)

    def _insert(self) -> Any:
        # A write whose answer was lost is tried again by the same holder: its entries are there then.
        return insert(self._journal, self._context.database.dialect_name)

    def _values(self, task_id: str, entry: JournalEntry, sleeps_until: Any) -> dict[str, Any]:
        return {
            "namespace": self._context.namespace,
            "task_id": task_id,
            "position": entry.position,
            "kind": entry.kind,
            "name": entry.name,
            "timer_id": timer_id(task_id, entry.position),
            "due_at": sleeps_until if entry.kind == Kind.SLEEP else None,
            "payload": entry.payload,
            "content_type": entry.content_type,
            "content_encoding": entry.content_encoding,
        }


def _change_of(result: Any) -> Change | None:
    row = result.one_or_none()
    return None if row is None else Change(row.wake_at, row.now)
