"""Which executions a person means: a filter, and the condition that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, or_

from celery_durable.records import Status
from celery_durable.store.base import Context


@dataclass(frozen=True, slots=True)
class Filter:
    """Which executions: every given condition must hold.

    ``due_before`` and ``due_after`` find what waits: a task that is running is not due. ``owner`` is the
    beginning of an owner's name (a node name will do), ``text`` any part of the task's id or name,
    ``id_start`` the beginning of its id.
    """

    statuses: Sequence[str] = ()
    task_name: str | None = None
    due_before: datetime | None = None
    due_after: datetime | None = None
    owner: str | None = None
    text: str | None = None
    id_start: str | None = None


def condition(context: Context, chosen: Filter) -> ColumnElement[bool]:
    """A filter as a condition on the executions of this namespace; the outbox is never among them."""
    columns = context.schema.executions.c
    conditions: list[ColumnElement[bool]] = [
        columns.namespace == context.namespace,
        columns.status != Status.OUTBOX,
    ]
    if chosen.statuses:
        conditions.append(columns.status.in_(chosen.statuses))
    if chosen.task_name is not None:
        conditions.append(columns.task_name == chosen.task_name)
    if chosen.due_before is not None or chosen.due_after is not None:
        conditions.append(columns.owner.is_(None))
    if chosen.due_before is not None:
        conditions.append(columns.wake_at < chosen.due_before)
    if chosen.due_after is not None:
        conditions.append(columns.wake_at > chosen.due_after)
    if chosen.owner is not None:
        conditions.append(columns.owner.startswith(chosen.owner, autoescape=True))
    if chosen.text is not None:
        conditions.append(
            or_(
                columns.task_id.icontains(chosen.text, autoescape=True),
                columns.task_name.icontains(chosen.text, autoescape=True),
            )
        )
    if chosen.id_start is not None:
        conditions.append(columns.task_id.startswith(chosen.id_start, autoescape=True))
    return and_(*conditions)
