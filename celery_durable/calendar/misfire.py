"""What to do with an entry whose time has come, late or not, and when it is due again.

However many occurrences were missed, at most one run makes up for them. The policies differ in
how late it may be:

* ``coalesce``: however late; with a grace, no later than that.
* ``skip``: no later than the grace, which is ``SKIP_GRACE`` where none is given.

The lateness that counts is that of the latest occurrence missed: an hourly entry found at 12:05
is five minutes late, even if nothing ran since 09:00.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, get_args

from celery.schedules import BaseSchedule, crontab

from celery_durable import checks
from celery_durable.calendar.occurrence import ASK_WITHIN, ask, is_custom, next_run

MisfirePolicy = Literal["coalesce", "skip"]
MISFIRE_POLICIES: tuple[MisfirePolicy, ...] = get_args(MisfirePolicy)

#: Seconds by which a run may be late under ``skip``. One minute is a crontab's own precision, and
#: longer than a scheduler takes to restart.
SKIP_GRACE = 60.0

_TICK = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Fire:
    """Run the entry once. ``late`` counts from the occurrence that was found to be in time."""

    late: timedelta


@dataclass(frozen=True, slots=True)
class Skip:
    """Do not run: every occurrence that was missed is too old. ``late`` counts from the first."""

    late: timedelta


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not run: it is not due yet."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What to do now, and the entry's next ``next_run_at``, which is None for never."""

    decision: Fire | Skip | Wait
    next_run_at: datetime | None


def check_misfire(policy: object, grace: object) -> tuple[MisfirePolicy, float | None]:
    """Return an entry's ``misfire`` and ``misfire_grace`` (None, seconds or a timedelta), checked.

    Raises ``ValueError``, with a sentence that names the one that is wrong.
    """
    for known in MISFIRE_POLICIES:
        if policy == known:
            try:
                return known, None if grace is None else checks.seconds(grace)
            except ValueError as problem:
                raise ValueError(f"misfire_grace {problem}") from None
    raise ValueError(f"misfire must be one of {', '.join(MISFIRE_POLICIES)}, not {policy!r}")


def decide_misfire(
    due: datetime,
    now: datetime,
    policy: MisfirePolicy = "coalesce",
    grace: float | None = None,
    *,
    latest: datetime | None = None,
) -> Fire | Skip:
    """Decide about an entry that was due at ``due``, which is not after ``now``.

    ``latest`` is the last of the occurrences up to ``now``, where more than one was missed.
    ``grace`` is in seconds; a run that is late by exactly that much is still in time.
    """
    late = now - (latest or due)
    limit = SKIP_GRACE if grace is None and policy == "skip" else grace
    return Fire(late) if limit is None or late.total_seconds() <= limit else Skip(late)


def advance(
    schedule: BaseSchedule,
    due: datetime,
    now: datetime,
    *,
    last_run_at: datetime | None = None,
    policy: MisfirePolicy = "coalesce",
    grace: float | None = None,
    cron_deadline: float | None = None,
    ask_within: timedelta = ASK_WITHIN,
) -> Advance:
    """Decide about an entry whose ``next_run_at`` was ``due``, and work out its next one.

    ``cron_deadline`` is Celery's ``beat_cron_starting_deadline``: the grace of crontabs that have
    none of their own. Graces are in seconds. Before its time, an entry waits and keeps it.

    A custom schedule decides by itself, from ``last_run_at`` (``due`` if there is none): policy and
    grace do not apply to it, and its next ``next_run_at`` is when to ask it again.
    """
    if due > now:
        return Advance(Wait(), due)
    if is_custom(schedule):
        answer = ask(schedule, last_run_at or due, now, ask_within=ask_within)
        return Advance(Fire(timedelta(0)) if answer.is_due else Wait(), answer.ask_at)
    if grace is None and isinstance(schedule, crontab):
        grace = cron_deadline
    decision = decide_misfire(due, now, policy, grace)
    if isinstance(decision, Skip):
        latest = _latest_within(SKIP_GRACE if grace is None else grace, schedule, due, now)
        decision = decide_misfire(due, now, policy, grace, latest=latest)
    return Advance(decision, next_run(schedule, now, anchor=due))


def _latest_within(grace: float, schedule: BaseSchedule, due: datetime, now: datetime) -> datetime | None:
    """An occurrence of the last ``grace`` seconds, if there was one.

    The first of them rather than the last: it is enough to know that one is in time.
    """
    found = next_run(schedule, now - timedelta(seconds=grace) - _TICK, anchor=due)
    return found if found is not None and found <= now else None
