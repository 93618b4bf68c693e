"""Statistics: the state of a namespace in a handful of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, not_, select

from celery_durable.records import Kind, Status
from celery_durable.rules import DISPATCH_LEASE, since_first_send
from celery_durable.store.base import Context
from celery_durable.store.dialect import UtcDateTime
from celery_durable.store.schedule import TICK


@dataclass(frozen=True, slots=True)
class Stats:
    """What a namespace looks like, by the database's clock. Times are aware, spans in seconds."""

    now: datetime
    #: How many executions there are in each state.
    counts: dict[str, int]
    #: Messages of plain tasks that wait to be sent.
    outbox: int
    #: What is due and has not been claimed: how many, and since when.
    overdue: int
    oldest_due_at: datetime | None
    #: The next time at which something will be due.
    next_due_at: datetime | None
    #: Wake messages on their way: sent, and not claimed yet; and the most sends of one of them.
    unclaimed: int
    most_sends: int
    #: Leases that are held; those with little time left; those that ran out and were not taken over yet.
    leases: int
    leases_near_end: int
    leases_expired: int
    #: Seconds since a scheduler was last seen; None: never.
    scheduler_seen: float | None

    @property
    def lateness(self) -> float:
        """How late the oldest due execution is, in seconds; 0.0 where nothing is due."""
        if self.oldest_due_at is None:
            return 0.0
        return max(0.0, (self.now - self.oldest_due_at).total_seconds())

    @property
    def live(self) -> int:
        """How many executions have not ended."""
        return sum(count for status, count in self.counts.items() if status in Status.LIVE)


class Statistics:
    """The one statement that looks at every row, and two small ones."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions

    def read(self, near_end: float, resend_base: float) -> Stats:
        """Count.

        ``near_end``: the seconds that a lease has left when it counts as near its end. ``resend_base``: those
        after which a wake is first sent again.
        """
        with self._context.database.statements() as connection:
            now, tick = self._clock(connection)
            rows = connection.execute(self._by_status(near_end)).mappings().all()
            sent: list[datetime] = []
            if any(row["unclaimed"] for row in rows):
                sent = [*self._unclaimed_sleeps(connection), *self._unclaimed_others(connection, resend_base)]
        oldest = [row["oldest_unsent"] for row in rows if row["oldest_unsent"] is not None]
        oldest += [due_at for due_at in sent if due_at <= now]
        upcoming = [row["next"] for row in rows if row["next"] is not None]
        return Stats(
            now=now,
            counts={row["status"]: row["count"] for row in rows if row["status"] != Status.OUTBOX},
            outbox=sum(row["count"] for row in rows if row["status"] == Status.OUTBOX),
            overdue=_sum(rows, "overdue"),
            oldest_due_at=min(oldest, default=None),
            next_due_at=min(upcoming, default=None),
            unclaimed=_sum(rows, "unclaimed"),
            most_sends=max((row["most_sends"] or 0 for row in rows), default=0),
            leases=_sum(rows, "leases"),
            leases_near_end=_sum(rows, "near_end"),
            leases_expired=_sum(rows, "expired"),
            scheduler_seen=None if tick is None else (now - tick).total_seconds(),
        )

    def _clock(self, connection: Connection) -> tuple[datetime, datetime | None]:
        """The database's time, and when a scheduler last ticked."""
        schedule, context = self._context.schema.schedule, self._context
        tick = (
            select(schedule.c.seen_at)
            .where(schedule.c.namespace == context.namespace, schedule.c.name == TICK)
            .scalar_subquery()
        )
        now, seen_at = connection.execute(select(context.now(), tick)).one()
        return now, seen_at

    def _by_status(self, near_end: float) -> Any:
        context, columns = self._context, self._executions.c
        # One instant for all rows; PostgreSQL's clock moves within a statement.
        now = select(context.now()).scalar_subquery()
        waits, is_held = columns.owner.is_(None), columns.owner.is_not(None)
        is_unsent = and_(waits, columns.sends == 0)
        is_over = columns.wake_at <= now
        return (
            select(
                columns.status,
                func.count().label("count"),
                # What was sent and not claimed is due as well; its ``wake_at`` is that of the next send.
                _number(and_(waits, (columns.sends > 0) | is_over), "overdue"),
                _earliest(and_(is_unsent, is_over), columns.wake_at, "oldest_unsent"),
                _earliest(and_(is_unsent, columns.wake_at > now), columns.wake_at, "next"),
                _number(and_(waits, columns.sends > 0), "unclaimed"),
                func.max(columns.sends).label("most_sends"),
                _number(is_held, "leases"),
                _number(
                    and_(is_held, columns.wake_at > now, columns.wake_at <= context.now(near_end)),
                    "near_end",
                ),
                _number(and_(is_held, is_over), "expired"),
            )
            .where(columns.namespace == context.namespace)
            .group_by(columns.status)
        )

    def _unclaimed_sleeps(self, connection: Connection) -> list[datetime]:
        """Since when the oldest sleep is over whose wake nobody has claimed: only the journal knows."""
        executions, journal = self._executions, self._context.schema.journal
        last = (
            select(func.max(journal.c.due_at, type_=UtcDateTime()).label("due_at"))
            .join_from(
                executions,
                journal,
                and_(
                    journal.c.namespace == executions.c.namespace,
                    journal.c.task_id == executions.c.task_id,
                ),
            )
            .where(
                executions.c.namespace == self._context.namespace,
                executions.c.status == Status.SLEEPING,
                executions.c.sends > 0,
                journal.c.kind == Kind.SLEEP,
            )
            .group_by(executions.c.task_id)
            .subquery()
        )
        oldest: datetime | None = connection.execute(
            select(func.min(last.c.due_at, type_=UtcDateTime()))
        ).scalar()
        return [] if oldest is None else [oldest]

    def _unclaimed_others(self, connection: Connection, resend_base: float) -> list[datetime]:
        """About since when the others are due that were sent: their times tell of the next send only."""
        context, columns = self._context, self._executions.c
        # The first send is on its way for an instant, and its row is then taken for some seconds only.
        is_on_its_way = and_(
            columns.sends == 1, columns.failures == 0, columns.wake_at <= context.now(DISPATCH_LEASE)
        )
        groups = connection.execute(
            select(columns.sends, columns.failures, func.min(columns.wake_at, type_=UtcDateTime()))
            .where(
                columns.namespace == context.namespace,
                columns.owner.is_(None),
                columns.sends > 0,
                columns.wake_at.is_not(None),
                columns.status != Status.SLEEPING,
                not_(is_on_its_way),
            )
            .group_by(columns.sends, columns.failures)
        )
        return [
            next_send - timedelta(seconds=since_first_send(sends, failures, resend_base))
            for sends, failures, next_send in groups
            if next_send is not None
        ]


def _number(where: ColumnElement[bool], name: str) -> Any:
    return func.sum(case((where, 1), else_=0)).label(name)


def _earliest(where: ColumnElement[bool], instant: ColumnElement[Any], name: str) -> Any:
    return func.min(case((where, instant)), type_=UtcDateTime()).label(name)


def _sum(rows: Any, name: str) -> int:
    return sum(int(row[name] or 0) for row in rows)
