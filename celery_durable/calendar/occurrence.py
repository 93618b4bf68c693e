"""The next occurrence of a Celery schedule of any class."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any, cast

import celery
from celery.schedules import BaseSchedule, crontab, schedule, solar
from celery.utils.time import remaining

from celery_durable.calendar.cron import Pattern, next_match
from celery_durable.calendar.walltime import as_zone

#: The period that an interval of zero or less is given. Celery would run it without a pause.
SHORTEST_PERIOD = timedelta(seconds=1)
#: A custom schedule is asked again at least this often, as its answer may have changed.
ASK_WITHIN = timedelta(seconds=300)

_ZERO = timedelta(0)
# Sunrise comes back after half a year at most, but at the very poles.
_SOLAR_SEARCH_DAYS = 400
_STOCK: tuple[tuple[type[BaseSchedule], tuple[str, ...]], ...] = (
    (crontab, ("is_due", "remaining_estimate", "remaining_delta")),
    (schedule, ("is_due", "remaining_estimate")),
    (solar, ("is_due", "remaining_estimate")),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a custom schedule said: whether to run now, and when to ask it again."""

    is_due: bool
    ask_at: datetime


def next_run(
    entry_schedule: BaseSchedule,
    after: datetime,
    *,
    anchor: datetime,
    ask_within: timedelta = ASK_WITHIN,
) -> datetime | None:
    """Return the first occurrence strictly after ``after``, or None if there will be none.

    Both arguments are aware; the answer is in UTC. ``anchor`` is the occurrence that the entry
    was last due at, or the time at which it first became known. Intervals count whole periods
    from it, so that being late once does not make them late for ever; a ``relative`` one is
    rounded by Celery's rule. Other schedules do not look at it.

    A custom schedule (``is_custom``) cannot say when it is due, only whether it is: for one of
    those, this is the instant at which to ``ask`` it.

    Raises ``ValueError`` for a naive datetime, ``TypeError`` for an interval without a period,
    and whatever a custom schedule raises.
    """
    after, anchor = _in_utc(after), _in_utc(anchor)
    if is_custom(entry_schedule):
        return ask(entry_schedule, after, after, ask_within=ask_within).ask_at
    try:
        if isinstance(entry_schedule, crontab):
            return next_match(Pattern.of(entry_schedule), zone_of(entry_schedule), after)
        if isinstance(entry_schedule, solar):
            return _next_solar(entry_schedule, after)
        return _next_interval(cast(schedule, entry_schedule), after, anchor)
    except OverflowError:
        # Beyond the year 9999, which is to say never.
        return None


def ask(
    custom: BaseSchedule,
    last_run_at: datetime,
    now: datetime,
    *,
    ask_within: timedelta = ASK_WITHIN,
) -> Answer:
    """Ask a custom schedule whether to run now, as Celery's beat does.

    Calls ``custom.is_due(last_run_at)`` and nothing else, on the object itself (it may keep
    state), with ``last_run_at`` in the schedule's time zone. The method reads whatever clock it
    likes; ``now`` only says from where its delay counts. The delay is kept between
    ``SHORTEST_PERIOD`` and ``ask_within``, and is ``ask_within`` where it is no number.
    """
    now = _in_utc(now)
    is_due, delay = custom.is_due(_in_utc(last_run_at).astimezone(zone_of(custom)))
    return Answer(bool(is_due), now + _clamp(delay, ask_within))


def is_custom(entry_schedule: BaseSchedule) -> bool:
    """Return whether a schedule has its own idea of when it is due.

    True for classes other than Celery's ``schedule``, ``crontab`` and ``solar``, and for their
    subclasses that override how these decide.
    """
    kind = type(entry_schedule)
    if _is_crontab_with_a_zone(kind):
        return False
    for stock, methods in _STOCK:
        if issubclass(kind, stock):
            return any(getattr(kind, name) is not getattr(stock, name) for name in methods)
    return True


def zone_of(entry_schedule: BaseSchedule) -> tzinfo:
    """Return the time zone that a schedule counts in.

    That is the app's, or the one the schedule itself carries as ``tz``. A ``nowfun`` that returns
    aware datetimes sets the zone as far as it does in the Celery installed.
    """
    nowfun = getattr(entry_schedule, "nowfun", None)
    if nowfun is not None and _nowfun_sets_zone(entry_schedule):
        zone = cast("tzinfo | None", nowfun().tzinfo)
        if zone is not None:
            return zone
    return as_zone(cast("tzinfo | str", getattr(entry_schedule, "tz", timezone.utc)))


def _nowfun_sets_zone(entry_schedule: BaseSchedule) -> bool:
    # Celery reads the fields of ``last_run_at`` in the zone that ``now()`` once gave it. Since 5.7,
    # crontab alone converts it to ``tz`` first.
    return not isinstance(entry_schedule, crontab) or celery.VERSION[:2] < (5, 7)


def _is_crontab_with_a_zone(kind: type[BaseSchedule]) -> bool:
    # django-celery-beat and its SQLAlchemy sibling override ``is_due`` for the zone's sake only.
    return issubclass(kind, crontab) and kind.__name__ == "TzAwareCrontab"


def _next_interval(interval: schedule, after: datetime, anchor: datetime) -> datetime:
    period = cast(Any, interval).run_every
    if not isinstance(period, timedelta):
        raise TypeError(f"an interval schedule needs a period, not {period!r}")
    if period <= _ZERO:
        period = SHORTEST_PERIOD
    if interval.relative:
        return _next_relative(period, zone_of(interval), after, anchor)
    return anchor + ((after - anchor) // period + 1) * period


def _next_relative(period: timedelta, zone: tzinfo, after: datetime, anchor: datetime) -> datetime:
    here = after.astimezone(zone)
    # From the anchor first: a run that was a little late must not shift the ones after it.
    for start in (anchor, after) if anchor <= after else (after,):
        found = after + remaining(start.astimezone(zone), period, here, relative=True)
        if found > after:
            return found
    # Rounding can lead back to the start, for periods under a second.
    return after + period


def _next_solar(event: solar, after: datetime) -> datetime | None:
    """Search on from one midnight of the sun to the next while the event fails to happen.

    Celery before 5.7 fails on the first day without it.
    """
    sky = cast(Any, event)
    search = getattr(sky.cal, sky.method)
    options = {"use_center": True} if sky.use_center else {}
    sun = sky.ephem.Sun()
    start = sky.ephem.Date(after.replace(tzinfo=None))
    for _ in range(_SOLAR_SEARCH_DAYS):
        try:
            found = search(sun, start=start, **options)
        except sky.ephem.CircumpolarError:
            start = sky.cal.next_antitransit(sun, start=start)
            continue
        instant = cast(datetime, found.datetime()).replace(tzinfo=timezone.utc)
        if instant > after:
            return instant
        start = sky.ephem.Date(start + sky.ephem.minute)
    return None


def _clamp(delay: object, longest: timedelta) -> timedelta:
    # NaN is less than nothing, and so ends up as the longest, too.
    if isinstance(delay, (int, float)) and delay < longest.total_seconds():
        return timedelta(seconds=max(delay, SHORTEST_PERIOD.total_seconds()))
    return longest


def _in_utc(instant: datetime) -> datetime:
    if instant.tzinfo is None:
        raise ValueError(f"an aware datetime is needed, not {instant!r}")
    return instant.astimezone(timezone.utc)
