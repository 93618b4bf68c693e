"""Due rows: taken in batches, published by the caller outside any transaction, then confirmed.

Both statements after the publish say ``owner IS NULL AND wake_at = <as the take wrote it>``: a worker may
have claimed the row meanwhile, and moving the ``wake_at`` of a running row would steal a live lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Select,
    and_,
    bindparam,
    case,
    delete,
    func,
    select,
    text,
    update,
)

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
from celery_durable.store.prepared import Prepared

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
    """What one take found: messages to publish, crashes that were counted, rows that cannot be read.

    ``found``: how many rows were due; fewer than asked for means that nothing more is.
    """

    outgoing: tuple[Outgoing, ...] = ()
    crashed: tuple[Crashed, ...] = ()
    unreadable: tuple[str, ...] = ()
    found: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """The answer to a poll: the database's time, and when the next row is due (None: nothing waits)."""

    now: datetime
    wake_at: datetime | None

    @property
    def due_in(self) -> float | None:
        """Seconds until the next row is due, negative where it is overdue."""
        return None if self.wake_at is None else (self.wake_at - self.now).total_seconds()


#: Seconds for which a row that cannot be read or sent is set aside.
SET_ASIDE = 3600.0


_IN_ORDER = text(
    "SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true),"
    " set_config('enable_sort', 'off', true)"
)


@dataclass(slots=True)
class _Sorted:
    """What became of the rows of one take so far."""

    outgoing: list[Outgoing]
    crashed: list[Crashed]
    unreadable: list[str]


class DueRows:
    """Statements of the scheduler on executions."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions
        self._looking_ahead = Prepared(context, self._look_ahead)
        self._finding = Prepared(context, lambda: self.due(bindparam("limit", type_=Integer())))

    def poll(self) -> Outlook:
        """When the next row is due. One statement, which costs the same however many rows wait."""
        seen = self._looking_ahead.first({})
        assert seen is not None
        wake_at = seen["wake_at"]
        if wake_at is None and seen["is_due"]:
            # It cannot be read, and is the earliest for the database: whoever takes that row sets it aside.
            wake_at = seen["now"]
        return Outlook(seen["now"], wake_at)

    def _look_ahead(self) -> Select[Any]:
        context, executions = self._context, self._executions
        earliest = (
            select(func.min(executions.c.wake_at, type_=UtcDateTime()))
            .where(executions.c.namespace == context.namespace, executions.c.wake_at.is_not(None))
            .scalar_subquery()
        )
        now = context.now()
        return select(earliest.label("wake_at"), (earliest <= now).label("is_due"), now.label("now"))

    def take(self, limit: int, limits: CrashLimits, outage: Outage | None = None) -> Batch:
        """Take up to ``limit`` due rows for ten seconds, the oldest first.

        Rows that another scheduler is taking at this moment are passed over.
        """
        with self._context.database.transaction() as connection:
            self.walk_the_index(connection)
            rows = self._finding.all({"limit": limit}, connection)
            if not rows:
                return Batch()
            taken_until = rows[0]["now"] + timedelta(seconds=DISPATCH_LEASE)
            sort = _Sorted([], [], [])
            for columns in rows:
                self._sort(connection, columns, taken_until, limits, outage, sort)
            self._mark_taken(connection, [item.key for item in sort.outgoing], taken_until)
        return Batch(tuple(sort.outgoing), tuple(sort.crashed), tuple(sort.unreadable), len(rows))

    def due(self, limit: Any) -> Select[Any]:
        """The query for what is due, for a take and for whoever wants to see its plan."""
        context, executions = self._context, self._executions
        # PostgreSQL's clock moves within a statement, so it would be asked anew for each row that waits,
        # and the index could not be searched by it. A subquery is evaluated once.
        now = select(context.now()).scalar_subquery()
        return (
            select(executions, context.now().label("now"))
            .where(executions.c.namespace == context.namespace, executions.c.wake_at <= now)
            .order_by(executions.c.wake_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )

    def walk_the_index(self, connection: Connection) -> None:
        """Have the query for what is due, in this transaction, stop at its limit."""
        # While its statistics lag behind a backlog, PostgreSQL expects a handful of rows, and would fetch
        # and sort the whole backlog for every batch.
        if not self._context.database.is_sqlite:
            connection.execute(_IN_ORDER)

    def _sort(
        self,
        connection: Connection,
        columns: Mapping[Any, Any],
        taken_until: datetime,
        limits: CrashLimits,
        outage: Outage | None,
        sort: _Sorted,
    ) -> None:
        """Decide on one due row: send it, let it wait after a crash, or set it aside."""
        key = columns["task_id"]
        try:
            message = message_of(columns)
            found = row_of(columns, columns["now"])
            if found.wake_at is None:
                raise ValueError("its time cannot be read")
            row = found if found.owner is not None else None
            # Taking an expired lease starts the count of wakes anew.
            send = 1 if row is not None else _next_send(found.sends, columns["failures"])
        except (ValueError, KeyError, TypeError):
            message = None
        if message is None:
            self._postpone_unreadable(connection, key)
            sort.unreadable.append(key)
            return
        if row is not None:
            max_crashes, ttl = limits(row.task_name)
            waits, crash = self._crash(connection, row, max_crashes, ttl, outage)
            sort.crashed.append(crash)
            if waits:
                return
        sort.outgoing.append(
            Outgoing(
                key=key,
                status=columns["status"],
                task_name=columns["task_name"],
                send_id=columns["send_id"],
                message_version=columns["message_version"],
                sends=send,
                taken_until=taken_until,
                message=message,
                failures=columns["failures"],
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
        # What the broker did not confirm is sent for the same time again: a broker that is away for a day
        # is no reason to take a wake for one that nobody understands. See ``_next_send``.
        unconfirmed = (and_(executions.c.failures > 0, executions.c.sends > 0), executions.c.sends)
        connection.execute(
            update(executions)
            .where(executions.c.namespace == context.namespace, context.among(executions.c.task_id, keys))
            .values(sends=case(unconfirmed, else_=executions.c.sends + 1), wake_at=taken_until)
        )

    def _postpone_unreadable(self, connection: Connection, key: str) -> None:
        """A row that cannot be read must not be found due at every pass."""
        context, executions = self._context, self._executions
        connection.execute(
            update(executions)
            .where(context.mine(executions, key))
            .values(wake_at=context.now(SET_ASIDE), updated_at=context.now())
        )

    def confirm(self, sent: Sequence[Outgoing], resend_base: float) -> None:
        """Note that the broker has these messages: a wake is due again when no worker claims it in time;
        the message of a plain task has done its work."""
        outbox = [item for item in sent if item.status == Status.OUTBOX]
        wakes = [item for item in sent if item.status != Status.OUTBOX]
        if outbox:
            with self._context.database.statements() as connection:
                connection.execute(delete(self._executions).where(self._still_taken(outbox)))
        if wakes:
            sends = self._executions.c.sends
            delays = {item.sends: resend_delay(item.sends, resend_base) for item in wakes}
            self._move(wakes, sends, delays, failures=0)

    def give_back(self, unsent: Sequence[Outgoing]) -> None:
        """Make what the broker did not confirm due again, after a growing pause."""
        if unsent:
            failures = self._executions.c.failures
            delays = {item.failures: publish_backoff(item.failures + 1) for item in unsent}
            self._move(unsent, failures, delays, failures=failures + 1)

    def set_aside(self, broken: Sequence[Outgoing]) -> None:
        """Let what cannot be sent as it is wait for an hour, so that nobody meets it at every pass."""
        if broken:
            self._move(broken, self._executions.c.sends, {item.sends: SET_ASIDE for item in broken})

    def _move(
        self, items: Sequence[Outgoing], count: Any, delays: Mapping[int, float], **values: Any
    ) -> None:
        """Make rows that are still ours due after a delay, which hangs on one of their counts."""
        context, executions = self._context, self._executions
        first, *others = set(delays.values())
        seconds: Any = case(dict(delays), value=count, else_=first) if others else first
        with context.database.statements() as connection:
            connection.execute(
                update(executions)
                .where(self._still_taken(items))
                .values(wake_at=context.now(seconds), **values)
            )

    def _still_taken(self, items: Sequence[Outgoing]) -> ColumnElement[bool]:
        executions = self._executions
        return and_(
            executions.c.namespace == self._context.namespace,
            self._context.among(executions.c.task_id, [item.key for item in items]),
            executions.c.owner.is_(None),
            executions.c.wake_at == items[0].taken_until,
        )


def _next_send(sends: int, failures: int) -> int:
    """The number of the send that follows ``sends`` of them, the last of which may not have arrived."""
    return sends if failures > 0 and sends > 0 else sends + 1
