"""Moving many parked executions at once: the statement, and what its parts share with other verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, select, text, update

from celery_durable.records import Due, Kind, Status
from celery_durable.store.base import Context
from celery_durable.store.dialect import shifted

#: PostgreSQL expects a handful of rows of a list of ids, and would go through all of them for each one.
NO_LOOPS = text("SELECT set_config('enable_nestloop', 'off', true)")


def moving(
    context: Context, task_ids: Sequence[str], wanted: ColumnElement[bool], due: Due, in_order: bool
) -> Any:
    """Lock rows that are wanted, and move them and their open sleeps: one statement, for PostgreSQL.

    Rows that others hold are passed over. It gives ids and new times.
    """
    executions, journal = context.schema.executions, context.schema.journal
    before = executions.alias("before")
    locked = (
        select(executions.c.task_id, executions.c.status, executions.c.token)
        .where(among(context, executions, task_ids, in_order), wanted)
        .with_for_update(skip_locked=True)
        .cte("locked")
    )
    # The statement sees the journal as it was when it began. A task that has run between that and the
    # lock may have a new sleep by now: it is left to another statement.
    same = (
        select(locked.c.task_id, locked.c.status)
        .join(before, and_(context.mine(before, locked.c.task_id), before.c.token == locked.c.token))
        .where(among(context, before, task_ids, in_order))
        .cte("same")
    )
    last = (
        select(journal.c.task_id, func.max(journal.c.position).label("position"))
        .join(same, journal.c.task_id == same.c.task_id)
        .where(
            among(context, journal, task_ids, in_order),
            journal.c.kind == Kind.SLEEP,
            same.c.status == Status.SLEEPING,
        )
        .group_by(journal.c.task_id)
        .cte("last")
    )
    sleeps = (
        update(journal)
        .where(
            among(context, journal, task_ids, in_order),
            journal.c.task_id == last.c.task_id,
            journal.c.position == last.c.position,
            journal.c.due_at.is_not(None),
        )
        .values(due_at=due.at or shifted(journal.c.due_at, due.seconds))
        .returning(journal.c.task_id, journal.c.due_at)
        .cte("sleeps")
    )
    times = (
        select(same.c.task_id, sleeps.c.due_at)
        .select_from(same.outerjoin(sleeps, sleeps.c.task_id == same.c.task_id))
        .cte("times")
    )
    own = due.at or shifted_wake_at(context, due.seconds)
    return (
        update(executions)
        .where(among(context, executions, task_ids, in_order), executions.c.task_id == times.c.task_id)
        .values(wake_at=func.coalesce(times.c.due_at, own), sends=0, updated_at=context.now())
        .returning(executions.c.task_id, executions.c.wake_at)
    )


def shifted_wake_at(context: Context, seconds: float) -> Any:
    """What waits without a sleep has its time in ``wake_at`` only: once a wake is on its way, that is
    the time of the next one, and its own was about now."""
    executions = context.schema.executions
    is_sent = and_(executions.c.sends > 0, executions.c.wake_at > context.now())
    return shifted(case((is_sent, context.now()), else_=executions.c.wake_at), seconds)


def among(context: Context, table: Any, task_ids: Sequence[str], in_order: bool) -> ColumnElement[bool]:
    """The rows of these tasks. ``in_order``: the ids come in the database's own order.

    Then a range of the primary key is said as well: without it, and without fresh statistics,
    PostgreSQL reads the whole namespace for each list of ids.
    """
    mine = and_(table.c.namespace == context.namespace, context.among(table.c.task_id, task_ids))
    return and_(mine, table.c.task_id.between(task_ids[0], task_ids[-1])) if in_order else mine
