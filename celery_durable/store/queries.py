"""Reading and pruning: what people look at, and what is thrown away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update

from celery_durable.records import Execution, Status
from celery_durable.store.base import (
    MESSAGE_COLUMNS,
    Context,
    entry_of,
    message_of,
    outcome_from_text,
)

#: Ended rows keep their id, token and send id this long after they were pruned, so that a copy that a
#: broker still held does not start them anew and tokens never start again.
TOMBSTONE_SECONDS = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Filter:
    """Which executions: every given condition must hold."""

    statuses: Sequence[str] = ()
    task_name: str | None = None
    due_before: datetime | None = None
    due_after: datetime | None = None
    owner: str | None = None
    text: str | None = None


class Queries:
    """Statements that change nothing, and pruning."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions
        self._journal = context.schema.journal

    def get(self, task_id: str) -> Execution | None:
        """One execution with its journal."""
        context, journal = self._context, self._journal
        is_over = and_(journal.c.due_at.is_not(None), journal.c.due_at <= context.now())
        with context.database.statements() as connection:
            row = (
                connection.execute(
                    select(self._executions).where(
                        context.mine(self._executions, task_id),
                        self._executions.c.status != Status.OUTBOX,
                    )
                )
                .mappings()
                .one_or_none()
            )
            if row is None:
                return None
            entries = (
                connection.execute(
                    select(journal, is_over.label("is_over"))
                    .where(context.mine(journal, task_id))
                    .order_by(journal.c.position)
                )
                .mappings()
                .all()
            )
        return _execution(row, tuple(entry_of(entry) for entry in entries))

    def list(self, chosen: Filter, *, limit: int = 100, offset: int = 0) -> list[Execution]:
        """Executions, those due first at the head."""
        executions = self._executions
        with self._context.database.statements() as connection:
            rows = (
                connection.execute(
                    select(executions)
                    .where(self.condition(chosen))
                    .order_by(executions.c.wake_at.asc().nulls_last(), executions.c.task_id)
                    .limit(limit)
                    .offset(offset)
                )
                .mappings()
                .all()
            )
        return [_execution(row, ()) for row in rows]

    def count(self, chosen: Filter) -> int:
        """How many executions a filter finds."""
        with self._context.database.statements() as connection:
            found: int = connection.execute(
                select(func.count()).select_from(self._executions).where(self.condition(chosen))
            ).scalar_one()
        return found

    def ids(self, chosen: Filter, limit: int) -> list[str]:
        """The ids that a filter finds."""
        executions = self._executions
        with self._context.database.statements() as connection:
            return list(
                connection.execute(
                    select(executions.c.task_id).where(self.condition(chosen)).limit(limit)
                ).scalars()
            )

    def count_by_status(self) -> dict[str, int]:
        """How many executions there are in each state."""
        executions = self._executions
        with self._context.database.statements() as connection:
            rows = connection.execute(
                select(executions.c.status, func.count())
                .where(executions.c.namespace == self._context.namespace)
                .group_by(executions.c.status)
            ).all()
        return {status: count for status, count in rows}

    def condition(self, chosen: Filter) -> ColumnElement[bool]:
        """The filter as a condition on executions of this namespace."""
        columns = self._executions.c
        conditions: list[ColumnElement[bool]] = [
            columns.namespace == self._context.namespace,
            columns.status != Status.OUTBOX,
        ]
        if chosen.statuses:
            conditions.append(columns.status.in_(chosen.statuses))
        if chosen.task_name is not None:
            conditions.append(columns.task_name == chosen.task_name)
        if chosen.due_before is not None:
            conditions.append(columns.wake_at < chosen.due_before)
        if chosen.due_after is not None:
            conditions.append(columns.wake_at > chosen.due_after)
        if chosen.owner is not None:
            conditions.append(columns.owner.startswith(chosen.owner, autoescape=True))
        if chosen.text is not None:
            conditions.append(
                or_(
                    columns.task_id.contains(chosen.text, autoescape=True),
                    columns.task_name.contains(chosen.text, autoescape=True),
                )
            )
        return and_(*conditions)

    def prune(self, retention: float, retention_failed: float, limit: int) -> int:
        """Empty up to ``limit`` ended rows past their retention and drop old tombstones.

        Returns how many rows were touched; fewer than ``limit`` means that nothing old is left.
        """
        context, executions = self._context, self._executions
        well = and_(
            executions.c.status.in_((Status.SUCCEEDED, Status.REPLACED)),
            executions.c.finished_at <= context.now(-retention),
        )
        badly = and_(
            executions.c.status.in_((Status.FAILED, Status.CANCELLED, Status.QUARANTINED)),
            executions.c.finished_at <= context.now(-retention_failed),
        )
        with context.database.transaction() as connection:
            old = list(
                connection.execute(
                    select(executions.c.task_id)
                    .where(
                        executions.c.namespace == context.namespace,
                        executions.c.body.is_not(None),
                        or_(well, badly),
                    )
                    .order_by(executions.c.finished_at)
                    .limit(limit)
                    .with_for_update(skip_locked=True)
                ).scalars()
            )
            if old:
                self._empty(connection, old)
            dead = list(
                connection.execute(
                    select(executions.c.task_id)
                    .where(
                        executions.c.namespace == context.namespace,
                        executions.c.body.is_(None),
                        executions.c.finished_at
                        <= context.now(-TOMBSTONE_SECONDS - max(retention, retention_failed)),
                    )
                    .limit(limit)
                    .with_for_update(skip_locked=True)
                ).scalars()
            )
            if dead:
                connection.execute(delete(executions).where(self._among(executions, dead)))
            return len(old) + len(dead)

    def _empty(self, connection: Any, task_ids: Sequence[str]) -> None:
        executions, journal = self._executions, self._journal
        connection.execute(delete(journal).where(self._among(journal, task_ids)))
        connection.execute(
            update(executions)
            .where(self._among(executions, task_ids))
            .values(outcome=None, **dict.fromkeys(MESSAGE_COLUMNS))
        )

    def _among(self, table: Any, task_ids: Sequence[str]) -> ColumnElement[bool]:
        return and_(table.c.namespace == self._context.namespace, table.c.task_id.in_(task_ids))


def _execution(row: Mapping[str, Any], journal: tuple[Any, ...]) -> Execution:
    return Execution(
        task_id=row["task_id"],
        task_name=row["task_name"],
        status=row["status"],
        wake_at=row["wake_at"],
        owner=row["owner"],
        token=row["token"],
        sends=row["sends"],
        crashes=row["crashes"],
        outcome=outcome_from_text(row["outcome"]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        message=message_of(row),
        journal=journal,
    )
