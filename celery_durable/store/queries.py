"""Reading: what people and tools look at. Pruning: what is thrown away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    and_,
    delete,
    func,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from celery_durable.records import Execution, JournalEntry, Status
from celery_durable.store.base import (
    MESSAGE_COLUMNS,
    Context,
    entry_of,
    message_of,
    outcome_shown,
)
from celery_durable.store.filters import Filter, condition

__all__ = ["Filter", "Queries"]

#: Ended rows keep their id, token and send id this long after they were pruned, so that a copy that a
#: broker still held does not start them anew and tokens never start again.
TOMBSTONE_SECONDS = 30 * 86400.0
#: Rows that one statement reads, and ids.
PAGE = 2000
ID_PAGE = 10_000


class Queries:
    """Statements that change nothing, and pruning."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions
        self._journal = context.schema.journal
        columns = self._executions.c
        self._listed = (
            columns.task_id,
            columns.task_name,
            columns.status,
            columns.wake_at,
            columns.owner,
            columns.token,
            columns.sends,
            columns.crashes,
            columns.created_at,
            columns.updated_at,
            columns.finished_at,
        )

    # -- one -------------------------------------------------------------------------------------

    def get(self, task_id: str) -> Execution | None:
        """One execution with its message and its journal."""
        context, executions = self._context, self._executions
        with context.database.statements() as connection:
            row = (
                connection.execute(
                    select(executions).where(
                        context.mine(executions, task_id), executions.c.status != Status.OUTBOX
                    )
                )
                .mappings()
                .one_or_none()
            )
            if row is None:
                return None
            journal = self._entries(connection, task_id)
        return _execution(
            row, outcome=outcome_shown(row["outcome"]), message=message_of(row), journal=journal
        )

    def _entries(self, connection: Connection, task_id: str) -> tuple[JournalEntry, ...]:
        context, journal = self._context, self._journal
        is_over = and_(journal.c.due_at.is_not(None), journal.c.due_at <= context.now())
        found = connection.execute(
            select(journal, is_over.label("is_over"))
            .where(context.mine(journal, task_id))
            .order_by(journal.c.position)
        )
        return tuple(entry_of(entry) for entry in found.mappings())

    def any_known(self, task_ids: Sequence[str]) -> bool:
        """Whether any of these tasks has an execution, be it at its end."""
        if not task_ids:
            return False
        context, executions = self._context, self._executions
        found = select(executions.c.task_id).where(
            executions.c.namespace == context.namespace,
            context.among(executions.c.task_id, task_ids),
        )
        with context.database.statements() as connection:
            return connection.execute(found.limit(1)).first() is not None

    # -- many ------------------------------------------------------------------------------------

    def find(self, chosen: Filter, *, limit: int | None = None, offset: int = 0) -> Iterator[Execution]:
        """Executions without message, outcome and journal: those due first at the head, then the ended.

        They are read a page at a time, so that any number can be gone through.
        """
        columns = self._executions.c
        waiting = and_(condition(self._context, chosen), columns.wake_at.is_not(None))
        others = and_(condition(self._context, chosen), columns.wake_at.is_(None))
        count = 0
        for count, execution in enumerate(  # noqa: B007 - how many there were
            self._rows(waiting, (columns.wake_at, columns.task_id), limit, offset), 1
        ):
            yield execution
        if chosen.statuses and Status.LIVE.issuperset(chosen.statuses):
            # Every live row has a time. To find that there is no other would be to read all that have ended.
            return
        if limit is not None:
            limit -= count
        if offset:
            offset = 0 if count else offset - self._count(waiting)
        yield from self._rows(others, (columns.task_id,), limit, offset)

    def _rows(
        self,
        where: ColumnElement[bool],
        order: tuple[Column[Any], ...],
        limit: int | None,
        offset: int,
    ) -> Iterator[Execution]:
        """Rows in an order that no two of them share, continued after the last one of each page."""
        statement = select(*self._listed).where(where).order_by(*order).offset(offset)
        while limit is None or limit > 0:
            size = PAGE if limit is None else min(PAGE, limit)
            with self._context.database.statements() as connection:
                rows = connection.execute(statement.limit(size)).mappings().all()
            yield from map(_execution, rows)
            if len(rows) < size:
                return
            last = [literal(rows[-1][column], column.type) for column in order]
            # The first condition follows from the second, and is one that an index can be searched by.
            after = and_(order[0] >= last[0], tuple_(*order) > tuple_(*last))
            statement = select(*self._listed).where(where, after).order_by(*order)
            limit = None if limit is None else limit - size

    def count(self, chosen: Filter) -> int:
        """How many executions a filter finds."""
        return self._count(condition(self._context, chosen))

    def _count(self, where: ColumnElement[bool]) -> int:
        with self._context.database.statements() as connection:
            found: int = connection.execute(
                select(func.count()).select_from(self._executions).where(where)
            ).scalar_one()
        return found

    def id_pages(self, chosen: Filter, size: int = ID_PAGE) -> Iterator[Sequence[str]]:
        """The ids that a filter finds, a page at a time.

        In the order of the ids, which nothing that is done to the rows of one page can change.
        """
        executions, after = self._executions, ""
        statement = select(executions.c.task_id).where(condition(self._context, chosen))
        while True:
            with self._context.database.statements() as connection:
                page = (
                    connection.execute(
                        statement.where(executions.c.task_id > after)
                        .order_by(executions.c.task_id)
                        .limit(size)
                    )
                    .scalars()
                    .all()
                )
            if not page:
                return
            yield page
            after = page[-1]

    # -- pruning ---------------------------------------------------------------------------------

    def prunable(self, retention: float, retention_failed: float) -> int:
        """How many ended rows are past their retention."""
        return self._count(self._is_old(retention, retention_failed))

    def prune(self, retention: float, retention_failed: float, limit: int) -> int:
        """Empty up to ``limit`` ended rows past their retention and drop old tombstones.

        Returns how many rows were touched; fewer than ``limit`` means that nothing old is left.
        """
        executions = self._executions
        with self._context.database.transaction() as connection:
            old = self._some(connection, self._is_old(retention, retention_failed), limit)
            if old:
                self._empty(connection, old)
            dead = self._some(connection, self._is_dead(max(retention, retention_failed)), limit)
            if dead:
                connection.execute(delete(executions).where(self._among(executions, dead)))
        return len(old) + len(dead)

    def _some(self, connection: Connection, where: ColumnElement[bool], limit: int) -> Sequence[str]:
        executions = self._executions
        return (
            connection.execute(
                select(executions.c.task_id)
                .where(where)
                .order_by(executions.c.finished_at)
                .limit(limit)
                .with_for_update(skip_locked=True)
            )
            .scalars()
            .all()
        )

    def _is_old(self, retention: float, retention_failed: float) -> ColumnElement[bool]:
        context, columns = self._context, self._executions.c
        ended_well = columns.status.in_((Status.SUCCEEDED, Status.REPLACED))
        ended_badly = columns.status.in_((Status.FAILED, Status.CANCELLED, Status.QUARANTINED))
        return and_(
            columns.namespace == context.namespace,
            columns.body.is_not(None),
            or_(
                and_(ended_well, columns.finished_at <= self._ago(retention)),
                and_(ended_badly, columns.finished_at <= self._ago(retention_failed)),
            ),
            # It follows from these, and ends the search in the index.
            columns.finished_at <= self._ago(min(retention, retention_failed)),
        )

    def _is_dead(self, retention: float) -> ColumnElement[bool]:
        """Tombstones, and cancels whose first message never came, that are older than any copy can be."""
        context, columns = self._context, self._executions.c
        return and_(
            columns.namespace == context.namespace,
            columns.body.is_(None),
            columns.finished_at <= self._ago(TOMBSTONE_SECONDS + retention),
        )

    def _ago(self, seconds: float) -> ColumnElement[Any]:
        """An instant, asked for once: PostgreSQL's clock moves, and would be asked anew for each row."""
        return select(self._context.now(-seconds)).scalar_subquery()

    def _empty(self, connection: Connection, task_ids: Sequence[str]) -> None:
        executions, journal = self._executions, self._journal
        connection.execute(delete(journal).where(self._among(journal, task_ids)))
        connection.execute(
            update(executions)
            .where(self._among(executions, task_ids))
            .values(outcome=None, **dict.fromkeys(MESSAGE_COLUMNS))
        )

    def _among(self, table: Any, task_ids: Sequence[str]) -> ColumnElement[bool]:
        return and_(table.c.namespace == self._context.namespace, table.c.task_id.in_(task_ids))


def _execution(row: Mapping[Any, Any], **more: Any) -> Execution:
    return Execution(
        task_id=row["task_id"],
        task_name=row["task_name"],
        status=row["status"],
        wake_at=row["wake_at"],
        owner=row["owner"],
        token=row["token"],
        sends=row["sends"],
        crashes=row["crashes"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        **{"outcome": None, **more},
    )
