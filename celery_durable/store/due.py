"""Due rows: taken in batches, published by the caller outside any transaction, then confirmed.

Both statements after the publish say ``owner IS NULL AND wake_at = <as the take wrote it>``: a worker may
have claimed the row meanwhile, and moving the ``wake_at`` of a running row would steal a live lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, delete, func, select, update

from celery_durable.records import Outcome, OutcomeKind, Outgoing, Row, Status
from celery_durable.rules import (
    DISPATCH_LEASE,
    Outage,
    publish_backoff,
    resend_delay,
    rule_on_crash,
)
from celery_durable.store.base import (
    Context,
    message_of,
    outcome_to_text,
    row_of,
)
from celery_durable.store.claims import crash_reason
from celery_durable.store.dialect import UtcDateTime

#: task name → (max_crashes, lease ttl): what a crash of that task means.
CrashLimits = Callable[[str], tuple[int | None, float]]


@dataclass(frozen=True, slots=True)
class Crashed:
    """An execution whose lease ran out, as the take found it."""

    task_id: str
    task_name: str
    crashes: int
    counted: bool
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one take found: messages to publish, crashes that were counted, rows that cannot be read."""

    outgoing: tuple[Outgoing, ...]
    crashed: tuple[Crashed, ...]
    unreadable: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.outgoing) + len(self.crashed) + len(self.unreadable)


class DueRows:
    """Statements of the scheduler on executions."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions

    def take(self, limit: int, limits: CrashLimits, outage: Outage | None = None) -> Batch:
        """Take up to ``limit`` due rows for ten seconds, the oldest first.

        Rows that another scheduler is taking at this moment are passed over.
        """
        context, executions = self._context, self._executions
        with context.database.transaction() as connection:
            found = (
                connection.execute(
                    select(executions, context.now().label("now"))
                    .where(
                        executions.c.namespace == context.namespace,
                        executions.c.wake_at <= context.now(),
                    )
                    .order_by(executions.c.wake_at)
                    .limit(limit)
                    .with_for_update(skip_locked=True)
                )
                .mappings()
                .all()
            )
            if not found:
                return Batch((), (), ())
            taken_until = found[0]["now"] + timedelta(seconds=DISPATCH_LEASE)
            outgoing: list[Outgoing] = []
            crashed: list[Crashed] = []
            unreadable: list[str] = []
            for columns in found:
                self._sort(connection, columns, taken_until, limits, outage, outgoing, crashed, unreadable)
            self._mark_taken(connection, [item.key for item in outgoing], taken_until)
            return Batch(tuple(outgoing), tuple(crashed), tuple(unreadable))

    def _sort(
        self,
        connection: Connection,
        columns: Mapping[str, Any],
        taken_until: datetime,
        limits: CrashLimits,
        outage: Outage | None,
        outgoing: list[Outgoing],
        crashed: list[Crashed],
        unreadable: list[str],
    ) -> None:
        """Decide on one due row: send it, let it wait after a crash, or set it aside."""
        key = columns["task_id"]
        try:
            row = row_of(columns, columns["now"])
            message = message_of(columns)
        except (ValueError, KeyError, TypeError):
            message = None
        if message is None:
            self._postpone_unreadable(connection, key)
            unreadable.append(key)
            return
        if row.lease_expired:
            max_crashes, ttl = limits(row.task_name)
            waits, crash = self._crash(connection, row, max_crashes, ttl, outage)
            crashed.append(crash)
            if waits:
                return
        outgoing.append(
            Outgoing(
                key=key,
                status=row.status,
                task_name=row.task_name,
                send_id=row.send_id,
                message_version=row.message_version,
                sends=row.sends + 1,
                taken_until=taken_until,
                message=message,
            )
        )

    def _crash(
        self,
        connection: Connection,
        row: Row,
        max_crashes: int | None,
        ttl: float,
        outage: Outage | None,
    ) -> tuple[bool, Crashed]:
        """Count the crash of an expired lease. Whether its execution has to wait before it is sent."""
        context, executions = self._context, self._executions
        ruling = rule_on_crash(row, max_crashes=max_crashes, ttl=ttl, outage=outage)
        outcome = row.outcome
        changes: dict[str, Any] = {"crashes": ruling.crashes}
        if ruling.quarantine:
            outcome = Outcome(OutcomeKind.QUARANTINED, crash_reason(ruling.crashes))
            changes = {"crashes": 0, "status": Status.ENDING, "outcome": outcome_to_text(outcome)}
        waits = ruling.delay > 0 and not ruling.quarantine
        if waits:
            changes["wake_at"] = context.now(ruling.delay)
        connection.execute(
            update(executions)
            .where(context.mine(executions, row.task_id))
            .values(owner=None, sends=0, draining=False, updated_at=context.now(), **changes)
        )
        return waits, Crashed(row.task_id, row.task_name, ruling.crashes, ruling.counts, outcome)

    def _mark_taken(self, connection: Connection, keys: Sequence[str], taken_until: datetime) -> None:
        if not keys:
            return
        context, executions = self._context, self._executions
        connection.execute(
            update(executions)
            .where(executions.c.namespace == context.namespace, executions.c.task_id.in_(keys))
            .values(sends=executions.c.sends + 1, wake_at=taken_until)
        )

    def _postpone_unreadable(self, connection: Connection, key: str) -> None:
        """A row that cannot be read must not be found due at every pass: it comes back in an hour."""
        context, executions = self._context, self._executions
        connection.execute(
            update(executions)
            .where(context.mine(executions, key))
            .values(wake_at=context.now(3600.0), updated_at=context.now())
        )

    def confirm(self, sent: Sequence[Outgoing], resend_base: float) -> None:
        """Note that the broker has these messages: a wake is due again when no worker claims it in time;
        the message of a plain task has done its work."""
        context, executions = self._context, self._executions
        outbox = [item for item in sent if item.status == Status.OUTBOX]
        wakes = [item for item in sent if item.status != Status.OUTBOX]
        with context.database.transaction() as connection:
            if outbox:
                connection.execute(delete(executions).where(self._still_taken(outbox)))
            if wakes:
                delays = {item.sends: resend_delay(item.sends, resend_base) for item in wakes}
                seconds = case(delays, value=executions.c.sends, else_=resend_base)
                connection.execute(
                    update(executions).where(self._still_taken(wakes)).values(wake_at=context.now(seconds))
                )

    def give_back(self, unsent: Sequence[Outgoing]) -> None:
        """Make what the broker did not confirm due again, after a growing pause."""
        context, executions = self._context, self._executions
        delays = {item.sends: publish_backoff(item.sends) for item in unsent}
        seconds = case(delays, value=executions.c.sends, else_=1.0)
        with context.database.statements() as connection:
            connection.execute(
                update(executions).where(self._still_taken(unsent)).values(wake_at=context.now(seconds))
            )

    def next_due_in(self) -> float | None:
        """Seconds until the next row is due (negative: overdue), None where nothing waits."""
        context, executions = self._context, self._executions
        earliest = (
            select(func.min(executions.c.wake_at, type_=UtcDateTime()))
            .where(executions.c.namespace == context.namespace, executions.c.wake_at.is_not(None))
            .scalar_subquery()
        )
        with context.database.statements() as connection:
            wake_at, now = connection.execute(
                select(earliest.label("wake_at"), context.now().label("now"))
            ).one()
        if wake_at is None:
            return None
        seconds: float = (wake_at - now).total_seconds()
        return seconds

    def _still_taken(self, items: Sequence[Outgoing]) -> ColumnElement[bool]:
        executions = self._executions
        return and_(
            executions.c.namespace == self._context.namespace,
            executions.c.task_id.in_([item.key for item in items]),
            executions.c.owner.is_(None),
            executions.c.wake_at == items[0].taken_until,
        )
