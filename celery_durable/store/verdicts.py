"""Verdicts: what people and the crash limit decide about an execution from outside.

A cancel or a quarantine does not end a row: it writes the outcome and makes the row due, and the claim
that finds the outcome tells it. An outcome is written once, so a task is completed or cancelled, never both.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select, update

from celery_durable.records import Due, Kind, Outcome, OutcomeKind, Status
from celery_durable.store.base import Context, outcome_to_text
from celery_durable.store.dialect import insert


class Verdicts:
    """Statements of operators and of durable revoke."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions
        self._journal = context.schema.journal

    def cancel(self, task_ids: Sequence[str], reason: str | None = None) -> set[str]:
        """Cancel for good. Returns the ids that the verdict was written for.

        An id that no row has is remembered as cancelled, so that its first message is not run.
        """
        cancelled = set()
        for task_id in task_ids:
            if self._cancel(task_id, reason):
                cancelled.add(task_id)
        return cancelled

    def _cancel(self, task_id: str, reason: str | None) -> bool:
        context, executions = self._context, self._executions
        outcome = outcome_to_text(Outcome(OutcomeKind.CANCELLED, reason))
        with context.database.transaction() as connection:
            written = connection.execute(
                update(executions)
                .where(context.mine(executions, task_id), self._open_for_cancel())
                .values(
                    status=Status.ENDING,
                    outcome=outcome,
                    owner=None,
                    sends=0,
                    crashes=0,
                    draining=False,
                    wake_at=context.now(),
                    finished_at=None,
                    updated_at=context.now(),
                )
            )
            if written.rowcount == 1:
                return True
            bare = connection.execute(
                insert(executions, context.database.dialect_name)
                .values(
                    namespace=context.namespace,
                    task_id=task_id,
                    task_name="",
                    outcome=outcome,
                    status=Status.CANCELLED,
                    created_at=context.now(),
                    updated_at=context.now(),
                    finished_at=context.now(),
                )
                .on_conflict_do_nothing(index_elements=["namespace", "task_id"])
            )
            return bare.rowcount == 1

    def _open_for_cancel(self) -> ColumnElement[bool]:
        executions = self._executions
        return and_(
            executions.c.body.is_not(None),
            or_(
                and_(executions.c.status.in_(Status.LIVE), executions.c.outcome.is_(None)),
                and_(executions.c.status == Status.QUARANTINED, executions.c.outcome.is_(None)),
                executions.c.status == Status.REPLACED,
            ),
        )

    def release(self, task_ids: Sequence[str]) -> set[str]:
        """Let quarantined executions run again, at once. Returns those that were quarantined."""
        context, executions = self._context, self._executions
        with context.database.statements() as connection:
            released = connection.execute(
                update(executions)
                .where(
                    executions.c.namespace == context.namespace,
                    executions.c.task_id.in_(task_ids),
                    executions.c.status == Status.QUARANTINED,
                    executions.c.body.is_not(None),
                )
                .values(
                    status=Status.RUNNING,
                    outcome=None,
                    crashes=0,
                    sends=0,
                    owner=None,
                    draining=False,
                    wake_at=context.now(),
                    finished_at=None,
                    updated_at=context.now(),
                )
                .returning(executions.c.task_id)
            )
            return set(released.scalars())

    def move(self, task_ids: Sequence[str], due: Due, *, relative: bool = False) -> dict[str, datetime]:
        """Move parked executions to another time (``relative``: by ``due.seconds`` from their own).

        The open sleep's journaled due time moves with it. Running and ended ones are left alone.
        Returns the new times of those that were moved.
        """
        context, executions = self._context, self._executions
        with context.database.transaction() as connection:
            parked = connection.execute(
                select(executions.c.task_id, executions.c.wake_at)
                .where(
                    executions.c.namespace == context.namespace,
                    executions.c.task_id.in_(task_ids),
                    executions.c.status.in_(Status.PARKED),
                )
                .with_for_update()
            ).all()
            moved: dict[str, datetime] = {}
            for task_id, _ in parked:
                moved[task_id] = self._move_one(connection, task_id, due, relative)
            return moved

    def _move_one(self, connection: Any, task_id: str, due: Due, relative: bool) -> datetime:
        context, executions, journal = self._context, self._executions, self._journal
        last_sleep = connection.execute(
            select(journal.c.position, journal.c.due_at)
            .where(context.mine(journal, task_id), journal.c.kind == Kind.SLEEP)
            .order_by(journal.c.position.desc())
            .limit(1)
        ).one_or_none()
        status, wake_at = connection.execute(
            select(executions.c.status, executions.c.wake_at).where(context.mine(executions, task_id))
        ).one()
        is_sleep = status == Status.SLEEPING and last_sleep is not None
        if relative:
            # A wake may be on its way (then wake_at is its resend time): the sleep keeps the true one.
            base = last_sleep.due_at if is_sleep else wake_at
            due = Due(at=_shifted(base, due.seconds))
        new: datetime = connection.execute(
            update(executions)
            .where(context.mine(executions, task_id))
            .values(wake_at=context.instant(due), sends=0, updated_at=context.now())
            .returning(executions.c.wake_at)
        ).scalar_one()
        if is_sleep:
            connection.execute(
                update(journal)
                .where(context.mine(journal, task_id), journal.c.position == last_sleep.position)
                .values(due_at=new)
            )
        return new


def _shifted(instant: datetime, seconds: float) -> datetime:
    return instant + timedelta(seconds=seconds)
