"""Occurrences of a crontab, with its clock turned forwards and back.

Celery's own search steps over the repeated hour of autumn for hourly and minutely entries, so
the search here is ours: it finds the next matching wall time, and asks of every turn of the
clock on the way what it does to that time.

* An hour that is named (``hour=2``, ``"2-6"``) means once a day. A time that is missing in spring
  runs at the first instant after the gap; one that comes twice in autumn runs the first time.
* An hour with a star in it (``"*"``, ``"*/7"``), or all 24 of them, means whenever the wall clock
  shows such a time: in both repeated hours, and not at a time that is missing.
"""

from __future__ import annotations

from bisect import bisect_left
from calendar import monthrange
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any, cast

from celery.schedules import crontab

from celery_durable.calendar.walltime import (
    end_of_repeat,
    instant_of,
    next_turn,
    offset_at,
    wall_at,
)

_MINUTE = timedelta(minutes=1)
_HOURS_A_DAY = 24
_LEAP_YEAR = 2000
# 29 February falls on a given weekday again after at most 40 years (across 2100, 2200, ...).
_YEARS_AHEAD = 40


@dataclass(frozen=True, slots=True)
class Pattern:
    """The times that a crontab matches, sorted; ``every_hour`` if its hour has a star."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    weekdays: frozenset[int]
    days: tuple[int, ...]
    months: tuple[int, ...]
    every_hour: bool

    @classmethod
    def of(cls, schedule: crontab) -> Pattern:
        fields = cast(Any, schedule)
        hours = tuple(sorted(fields.hour))
        text = getattr(fields, "_orig_hour", None)
        return cls(
            minutes=tuple(sorted(fields.minute)),
            hours=hours,
            weekdays=frozenset(fields.day_of_week),
            days=tuple(sorted(fields.day_of_month)),
            months=tuple(sorted(fields.month_of_year)),
            every_hour=len(hours) == _HOURS_A_DAY or (isinstance(text, str) and "*" in text),
        )

    def is_possible(self) -> bool:
        """Return False for a pattern that no day matches, such as 31 February."""
        return bool(self.minutes and self.hours and self.weekdays) and any(
            day <= monthrange(_LEAP_YEAR, month)[1] for month in self.months for day in self.days
        )

    def first_from(self, wall: datetime) -> datetime | None:
        """Return the first matching wall time at or after ``wall``, or None."""
        if wall.second or wall.microsecond:
            wall = wall.replace(second=0, microsecond=0) + _MINUTE
        today = wall.date()
        if self._matches(today):
            later = self._time_from(wall.hour, wall.minute)
            if later is not None:
                return datetime.combine(today, later)
        day = self._day_after(today)
        if day is None:
            return None
        return datetime.combine(day, time(self.hours[0], self.minutes[0]))

    def _matches(self, day: date) -> bool:
        return day.month in self.months and day.day in self.days and day.isoweekday() % 7 in self.weekdays

    def _time_from(self, hour: int, minute: int) -> time | None:
        at = bisect_left(self.hours, hour)
        if at < len(self.hours) and self.hours[at] == hour:
            later = bisect_left(self.minutes, minute)
            if later < len(self.minutes):
                return time(hour, self.minutes[later])
            at += 1
        return time(self.hours[at], self.minutes[0]) if at < len(self.hours) else None

    def _day_after(self, today: date) -> date | None:
        last_year = min(today.year + _YEARS_AHEAD, date.max.year)
        for year in range(today.year, last_year + 1):
            for month in self.months:
                if (year, month) < (today.year, today.month):
                    continue
                day = self._day_in(year, month, today)
                if day is not None:
                    return day
        return None

    def _day_in(self, year: int, month: int, today: date) -> date | None:
        length = monthrange(year, month)[1]
        for number in self.days:
            if number > length:
                break
            day = date(year, month, number)
            if day > today and day.isoweekday() % 7 in self.weekdays:
                return day
        return None


def next_match(pattern: Pattern, zone: tzinfo, after: datetime) -> datetime | None:
    """Return the first instant strictly after ``after`` at which ``pattern`` runs in ``zone``.

    None if there is none, within the years that a datetime can hold.
    """
    if not pattern.is_possible():
        return None
    offset = offset_at(zone, after)
    floor = wall_at(after, offset).replace(second=0, microsecond=0) + _MINUTE
    if not pattern.every_hour:
        floor = max(floor, end_of_repeat(zone, after) or floor)
    while (wall := pattern.first_from(floor)) is not None:
        instant = instant_of(wall, offset)
        turn = next_turn(zone, after, instant)
        if turn is None:
            return instant
        if pattern.every_hour:
            floor = turn.shown
        elif wall < turn.shown:
            return turn.at
        else:
            floor = max(turn.shown, turn.expected)
        after, offset = turn.at, turn.offset
    return None
