"""What the clock on the wall shows in a time zone, and when it is turned.

Only the direction from UTC to local time is asked of a zone. It is the one that every kind of
``tzinfo`` gets right (zoneinfo, pytz, dateutil, Celery's own), and it knows neither missing nor
repeated times.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo

# The shortest time that any zone in the tz database, past or foretold, keeps an offset before
# it returns to the one before is four days (Freetown 1939; since then, seven).
_STRIDE = timedelta(days=3)
# No clock has ever been turned by more.
_LARGEST_TURN = timedelta(days=1)
_SECOND = timedelta(seconds=1)


class Turn(NamedTuple):
    """A change of a zone's offset.

    ``at`` is the first instant with the new offset. The wall clock would have shown ``expected``
    then, and shows ``shown`` instead: later than expected in spring (the times between are
    missing), earlier in autumn (the times between come twice).
    """

    at: datetime
    offset: timedelta
    expected: datetime
    shown: datetime


def as_zone(zone: tzinfo | str) -> tzinfo:
    """Return ``zone``, looked up if it is a name."""
    return ZoneInfo(zone) if isinstance(zone, str) else zone


def offset_at(zone: tzinfo, instant: datetime) -> timedelta:
    """Return local time minus UTC at ``instant``, an aware datetime in UTC."""
    return instant.astimezone(zone).utcoffset() or timedelta(0)


def wall_at(instant: datetime, offset: timedelta) -> datetime:
    """Return what the wall clock shows at ``instant``, as a naive datetime."""
    return instant.replace(tzinfo=None) + offset


def instant_of(wall: datetime, offset: timedelta) -> datetime:
    """Return the instant in UTC at which a clock with this offset shows ``wall``."""
    return (wall - offset).replace(tzinfo=timezone.utc)


def next_turn(zone: tzinfo, after: datetime, until: datetime) -> Turn | None:
    """Return the first turn of the clock in (``after``, ``until``], or None."""
    before = offset_at(zone, after)
    while after < until:
        probe = min(after + _STRIDE, until)
        if offset_at(zone, probe) != before:
            return _turn_between(zone, after, probe, before)
        after = probe
    return None


def end_of_repeat(zone: tzinfo, instant: datetime) -> datetime | None:
    """Return the wall time up to which ``instant`` may be a second showing, if there is one.

    That is: if the clock was turned back within the day before ``instant``, what it showed then.
    """
    turn = next_turn(zone, instant - _LARGEST_TURN, instant)
    return turn.expected if turn is not None and turn.shown < turn.expected else None


def _turn_between(zone: tzinfo, after: datetime, probe: datetime, before: timedelta) -> Turn:
    base = after.replace(microsecond=0)
    low, high = 0, (probe - base) // _SECOND
    while high - low > 1:
        middle = (low + high) // 2
        if offset_at(zone, base + middle * _SECOND) == before:
            low = middle
        else:
            high = middle
    at = base + high * _SECOND
    offset = offset_at(zone, at)
    return Turn(at, offset, expected=wall_at(at, before), shown=wall_at(at, offset))
