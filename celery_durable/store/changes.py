"""What the holder of a lease writes: a fenced change of its execution, with journal entries, at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, cast, func, select, union_all, update

from celery_durable.records import JournalEntry, LeaseKey
from celery_durable.store.base import Context, lease_values
from celery_durable.store.dialect import UtcDateTime
from celery_durable.store.journal import JournalRows, entry_values
from celery_durable.store.prepared import Prepared

#: Up to so many entries are written in one statement with the change that they belong to.
FEW = 8


@dataclass(frozen=True, slots=True)
class Change:
    """What an accepted change of an execution has made of it: its time, and the database's time of it."""

    wake_at: datetime | None
    now: datetime


class FencedChange:
    """One kind of change by the run that holds the lease: owner, token, and no outcome yet.

    ``changes`` gives the columns that it sets, as expressions of the values that are given to ``apply``.
    """

    def __init__(self, context: Context, journal: JournalRows, changes: Callable[[], dict[str, Any]]) -> None:
        self._context = context
        self._journal = journal
        self._changes = changes
        self._alone = Prepared(context, self._update)
        # By the number of entries that come with it.
        self._with_entries: dict[int, Prepared] = {}

    def apply(
        self,
        key: LeaseKey,
        values: Mapping[str, Any],
        entries: Sequence[JournalEntry] = (),
        sleeps_until: datetime | None = None,
    ) -> Change | None:
        """Change the execution and journal ``entries`` with it, in one transaction of its own.

        A sleep among them is due at ``sleeps_until``, or when the execution is. None: the fence has refused
        the change, and nothing is written.
        """
        database = self._context.database
        if not entries:
            return self._apply_alone(None, key, values)
        if database.dialect_name == "postgresql" and len(entries) <= FEW:
            given = {**lease_values(key), **values, "sleeps_until": sleeps_until}
            for number, entry in enumerate(entries):
                given |= entry_values(number, key.task_id, entry)
            return _change_of(self._prepared(len(entries)).first(given))
        with database.transaction() as connection:
            return self.apply_within(connection, key, values, entries, sleeps_until)

    def apply_within(
        self,
        connection: Connection,
        key: LeaseKey,
        values: Mapping[str, Any],
        entries: Sequence[JournalEntry] = (),
        sleeps_until: datetime | None = None,
        *,
        restart: bool = False,
    ) -> Change | None:
        """The same inside the caller's transaction. ``restart``: the journal begins anew."""
        change = self._apply_alone(connection, key, values)
        if change is not None:
            if restart:
                self._journal.clear(connection, key.task_id)
            self._journal.write(connection, key.task_id, entries, sleeps_until or change.wake_at)
        return change

    def _apply_alone(
        self, connection: Connection | None, key: LeaseKey, values: Mapping[str, Any]
    ) -> Change | None:
        return _change_of(self._alone.first({**lease_values(key), **values}, connection))

    def _update(self) -> Any:
        context, executions = self._context, self._context.schema.executions
        return (
            update(executions)
            .where(context.fenced_given(), executions.c.outcome.is_(None))
            .values(updated_at=context.now(), **self._changes())
            .returning(executions.c.wake_at, context.now().label("now"))
        )

    def _prepared(self, count: int) -> Prepared:
        if count not in self._with_entries:
            self._with_entries[count] = Prepared(self._context, lambda: self._at_once(count))
        return self._with_entries[count]

    def _at_once(self, count: int) -> Any:
        """Change and entries as one statement, where the database lets a statement write two tables."""
        change = self._update().cte("change")
        sleeps_until = func.coalesce(bindparam("sleeps_until", type_=UtcDateTime()), change.c.wake_at)
        columns = list(self._context.schema.journal.c)
        rows = []
        for number in range(count):
            entry = self._journal.new_entry(number, sleeps_until)
            rows.append(select(*(cast(entry[column.name], column.type) for column in columns)))
        rows = [row.select_from(change) for row in rows]
        written = (
            self._journal.insert()
            .from_select([column.name for column in columns], rows[0] if count == 1 else union_all(*rows))
            .cte("written")
        )
        return select(change.c.wake_at, change.c.now).add_cte(written)


def _change_of(row: Mapping[str, Any] | None) -> Change | None:
    return None if row is None else Change(row["wake_at"], row["now"])
