"""The decisions of the protocol, as functions of what they are told: no SQL, no clock, no Celery.

The one rule behind them: every live execution has a ``wake_at``. The scheduler sends one wake message
for each execution whose ``wake_at`` has passed, and moves it ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from celery_durable.records import Delivery, Due, OutcomeKind, Row, Status

#: Seconds for which a taken batch belongs to the scheduler that took it.
DISPATCH_LEASE = 10.0
#: The longest pause between two sends of a wake message that nobody claims.
RESEND_CEILING = 3600.0
#: The longest pause before an execution whose worker died is sent again.
CRASH_CEILING = 300.0
#: The longest pause before an outcome that the result store did not take is told again.
TELLING_CEILING = 60.0
#: So many earlier sends of an id are remembered.
PAST_SENDS = 16
#: An outcome whose telling kills this many workers is closed without being told.
TELLING_LIMIT = 3


class Action(Enum):
    """What to do with a delivery."""

    OPEN = "open"  # no row yet: write one
    REOPEN = "reopen"  # the row has ended: a new execution under the same id
    TAKE = "take"  # the row is live and waits for this message
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Ruling:
    """The answer to a delivery. ``verdict``: the execution ends at once with this outcome."""

    action: Action
    reason: str = ""
    is_fresh_send: bool = False
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class CrashRuling:
    """What follows from a lease that ran out."""

    crashes: int
    counts: bool
    quarantine: bool
    #: Seconds to wait before the execution is sent again.
    delay: float


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which this process could not reach the database, by the database's clock."""

    began: datetime
    ended: datetime

    def covers(self, instant: datetime, grace: float) -> bool:
        """Whether a lease that ran out at ``instant`` may owe it to the outage.

        A holder that was cut off stops by itself and needs up to a ``grace`` (its ttl) after the end
        to be seen again, so an expiry shortly after the outage is excused too.
        """
        return self.began <= instant <= self.ended + timedelta(seconds=grace)


def rule_on_delivery(row: Row | None, delivery: Delivery) -> Ruling:
    """Decide whether a delivery starts an execution, continues one, or is to be dropped."""
    if row is None or _is_bare_cancel(row):
        if delivery.is_wake:
            # A bare cancel sends no wakes: this one is of an earlier row, pruned long ago.
            return Ruling(Action.REFUSE, "its row is gone")
        if row is None:
            return Ruling(Action.OPEN)
        return Ruling(Action.REOPEN, verdict=OutcomeKind.CANCELLED)
    if _was_sent_before(row, delivery):
        return Ruling(Action.REFUSE, "an old message")
    if row.is_live or _is_set_aside(row):
        return _rule_on_live(row, delivery)
    return _rule_on_ended(row, delivery)


def _is_bare_cancel(row: Row) -> bool:
    """A cancel that came before any message of its id: it waits for the first one."""
    return row.status == Status.CANCELLED and row.token == 0 and not row.has_message


def _is_set_aside(row: Row) -> bool:
    """Quarantined without an outcome (its code no longer fits its journal): not at its end."""
    return row.status == Status.QUARANTINED and row.outcome is None and row.has_message


def _same_send(row: Row, delivery: Delivery) -> bool:
    # A message of a producer without this extension carries no send id: it can only be told from a
    # copy by what the row says, so it counts as the same send.
    return row.send_id is None or delivery.send_id is None or row.send_id == delivery.send_id


def _was_sent_before(row: Row, delivery: Delivery) -> bool:
    """Whether this is a copy of a send whose execution has ended, and was followed by another one's."""
    return delivery.send_id is not None and delivery.send_id in row.past_sends


def sends_before(row: Row, delivery: Delivery) -> tuple[str, ...]:
    """The sends whose copies are to be dropped once the row of an ended task is this delivery's."""
    if row.send_id is None or row.send_id == delivery.send_id:
        return row.past_sends
    return (*row.past_sends, row.send_id)[-PAST_SENDS:]


def _rule_on_live(row: Row, delivery: Delivery) -> Ruling:
    if not _same_send(row, delivery):
        # A wake of another send was sent from the row before it was opened anew: nobody's fresh send.
        is_fresh = not delivery.is_wake
        return Ruling(Action.REFUSE, f"its id is taken by a task that is {row.status}", is_fresh)
    if _is_successor(row, delivery) and not _is_cancelled(row):
        return Ruling(Action.REOPEN)
    if delivery.nesting != row.nesting or delivery.version != row.message_version:
        return Ruling(Action.REFUSE, "an old message")
    if not row.is_live:
        return Ruling(Action.REFUSE, "it is quarantined")
    if row.sends > 0 or row.is_due:
        return Ruling(Action.TAKE)
    if row.owner is not None:
        return Ruling(Action.REFUSE, f"{row.owner} holds its lease")
    return Ruling(Action.REFUSE, f"it is {row.status}")


def _is_successor(row: Row, delivery: Delivery) -> bool:
    """Whether the row's last run has handed its id on with this message.

    A run that had lost its lease may have sent one before it noticed. That counts no more than what it
    writes: the run that took its place replaces the task as well, or ends it.
    """
    return delivery.nesting > row.nesting and delivery.predecessor in (None, row.token)


def _is_cancelled(row: Row) -> bool:
    return row.outcome is not None and row.outcome.kind == OutcomeKind.CANCELLED


def _rule_on_ended(row: Row, delivery: Delivery) -> Ruling:
    if delivery.is_wake:
        return Ruling(Action.REFUSE, f"it has {row.status}")
    if not _same_send(row, delivery):
        return Ruling(Action.REOPEN)
    if _is_successor(row, delivery) and row.status != Status.CANCELLED:
        return Ruling(Action.REOPEN)
    return Ruling(Action.REFUSE, f"it has {row.status}")


def is_expired(delivery: Delivery, row: Row | None, now: datetime) -> bool:
    """``expires`` limits the first start only: what has started is never expired asleep."""
    if delivery.expires is None or delivery.expires > now:
        return False
    return row is None or row.status == Status.SCHEDULED or not row.is_live


def start_of(delivery: Delivery, due: Due, now: datetime) -> Due:
    """When a task that waits for its start is to be looked at: where it expires first, that is then."""
    if delivery.expires is None:
        return due
    wait = due.seconds if due.at is None else (due.at - now).total_seconds()
    return Due(at=delivery.expires) if (delivery.expires - now).total_seconds() < wait else due


def rule_on_crash(row: Row, *, max_crashes: int | None, ttl: float, outage: Outage | None) -> CrashRuling:
    """Decide what a lease that ran out means for its execution.

    It is no crash when the worker had said that it was shutting down, or when the lease ran out while
    the database could not be reached.
    """
    assert row.wake_at is not None
    excused = row.draining or (outage is not None and outage.covers(row.wake_at, ttl))
    return count_crash(row, max_crashes=max_crashes, excused=excused)


def count_crash(row: Row, *, max_crashes: int | None, excused: bool) -> CrashRuling:
    """Count one more crash, unless it is excused."""
    if excused:
        return CrashRuling(row.crashes, False, False, 0.0)
    crashes = row.crashes + 1
    # An execution that has its outcome is never quarantined: its telling is cut short instead.
    quarantine = row.outcome is None and max_crashes is not None and crashes >= max(1, max_crashes)
    return CrashRuling(crashes, True, quarantine, crash_delay(crashes))


def crash_delay(crashes: int) -> float:
    """Seconds before the next try after ``crashes`` in a row: none after the first, then growing."""
    if crashes <= 1:
        return 0.0
    return min(2.0 ** min(crashes - 1, 30), CRASH_CEILING)


def telling_delay(refusals: int) -> float:
    """Seconds before an outcome is told again which the result store had not taken so often before."""
    return min(2.0 ** min(refusals, 30), TELLING_CEILING)


def resend_delay(sends: int, base: float) -> float:
    """Seconds until a wake message that was sent ``sends`` times is taken for lost."""
    return min(base * 2.0 ** min(max(sends - 1, 0), 30), max(base, RESEND_CEILING))


def since_first_send(sends: int, failures: int, base: float) -> float:
    """Seconds from the first send of a wake to the next one, which it waits for.

    ``failures``: how often in a row the broker did not confirm the latest.
    """
    waits = sum(resend_delay(send, base) for send in range(1, sends))
    if not failures:
        return waits + resend_delay(sends, base)
    return waits + sum(publish_backoff(failure) for failure in range(1, failures + 1))


def publish_backoff(sends: int) -> float:
    """Seconds until a message that the broker did not confirm is tried again."""
    return min(0.5 * 2.0 ** min(max(sends - 1, 0), 10), 30.0)
