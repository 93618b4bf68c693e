"""What ``sleep`` and ``sleep_until`` accept, as seconds and as instants."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

UNITS: dict[str, float] = {
    "weeks": 604_800.0,
    "days": 86_400.0,
    "hours": 3_600.0,
    "minutes": 60.0,
    "seconds": 1.0,
    "milliseconds": 0.001,
}

#: A thousand years: further away than a mistake in units, nearer than the last year of a database.
MAX_SECONDS = 1_000 * 365.25 * 86_400.0

Number = int | float | Decimal | Fraction

_UTC_MIN = datetime.min.replace(tzinfo=timezone.utc)


def seconds_of(duration: Number | timedelta | None, units: Mapping[str, Number]) -> float:
    """The length of a sleep in seconds; a negative one is 0.0.

    Takes either a duration (seconds or a timedelta) or units, as in ``{"days": 3, "hours": 1}``.

    Raises TypeError for both, neither, an unknown unit or what is no number, and ValueError for
    NaN, infinity or more than a thousand years. Both name the argument.
    """
    if duration is not None and units:
        raise TypeError(f"sleep() takes a duration or units, not both: {', '.join(units)}")
    if duration is None and not units:
        raise TypeError("sleep() needs a duration, or units such as days=3")
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif duration is not None:
        seconds = _finite("duration", duration)
    else:
        seconds = sum(_unit_in_seconds(unit, amount) for unit, amount in units.items())
    return _within_limit("duration" if not units else " + ".join(units), seconds)


def instant_of(when: datetime, zone: tzinfo, make_aware: Callable[[datetime, tzinfo], datetime]) -> datetime:
    """The instant as an aware datetime in UTC.

    A naive ``when`` is read in ``zone`` by ``make_aware`` (Celery's, so that local times which
    come twice or never mean what they mean to Celery). What is before year 1 in UTC is year 1.

    Raises TypeError for what is no datetime, ValueError for what is after year 9999 in UTC.
    """
    if not isinstance(when, datetime):
        raise TypeError(f"when must be a datetime, not {when!r} ({type(when).__name__})")
    try:
        aware = make_aware(when, zone) if when.utcoffset() is None else when
        return aware.astimezone(timezone.utc)
    except OverflowError:
        if when.year == _UTC_MIN.year:
            return _UTC_MIN
        raise ValueError(f"when is after the last year there is, in UTC: {when!r}") from None


def _unit_in_seconds(unit: str, amount: Number) -> float:
    if unit not in UNITS:
        raise TypeError(f"sleep() does not know the unit {unit!r}; it knows {', '.join(UNITS)}")
    return _finite(unit, amount) * UNITS[unit]


def _finite(argument: str, value: object) -> float:
    # bool is an int to Python; a sleep of True is a mistake all the same.
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise TypeError(f"{argument} must be a number, not {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except (OverflowError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{argument} must be a finite number, not {_shown(value)}")
    return number


def _within_limit(argument: str, seconds: float) -> float:
    # Written so that NaN, which finite units can still add up to, is refused as well.
    if not seconds <= MAX_SECONDS:
        raise ValueError(f"{argument} is more than 1,000 years: {seconds:g} seconds")
    return max(0.0, seconds)


def _shown(value: object) -> str:
    # Python refuses to print an int of more than some thousand digits.
    return "one that large" if isinstance(value, int) else str(value)
