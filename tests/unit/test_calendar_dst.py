"""Crontabs while clocks are turned: against tables, and against a walk through every minute."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

import dateutil.tz
import pytest
from celery import Celery
from celery.schedules import crontab
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_durable.calendar import next_run

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)


@cache
def app_in(zone):
    app = Celery(set_as_current=False)
    app.conf.timezone = zone
    return app


def cron(zone, **fields):
    return crontab(**fields, app=app_in(zone))


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def runs(schedule, start, end):
    """Every occurrence in (start, end], as a chain of questions finds them."""
    found = []
    after = start
    while (after := next_run(schedule, after, anchor=start)) is not None and after <= end:
        found.append(after)
    return found


# ------------------------------------------------------------------------------------- tables

# time zone | minute hour day | asked from, in UTC | answers, in UTC
TABLE = """
# Berlin goes from 02:00 to 03:00 on 29 March 2026, and from 03:00 to 02:00 on 25 October.
Europe/Berlin       | 30   2     *  | 2026-03-27T12:00 | 28T01:30 29T01:00 30T00:30
Europe/Berlin       | 0    2     *  | 2026-03-27T12:00 | 28T01:00 29T01:00 30T00:00
Europe/Berlin       | 0    3     *  | 2026-03-27T12:00 | 28T02:00 29T01:00 30T01:00
Europe/Berlin       | 30   2     *  | 2026-10-23T12:00 | 24T00:30 25T00:30 26T01:30
Europe/Berlin       | 0    3     *  | 2026-10-23T12:00 | 24T01:00 25T02:00 26T02:00
Europe/Berlin       | 0    *     *  | 2026-03-28T23:30 | 29T00:00 29T01:00 29T02:00
Europe/Berlin       | 0    *     *  | 2026-10-24T23:30 | 25T00:00 25T01:00 25T02:00
Europe/Berlin       | */20 *     *  | 2026-03-29T00:30 | 29T00:40 29T01:00 29T01:20
Europe/Berlin       | */20 *     *  | 2026-10-25T00:30 | 25T00:40 25T01:00 25T01:20
# Every two hours: 02:00 is missing in March, and comes twice in October.
Europe/Berlin       | 0    */2   *  | 2026-03-28T22:30 | 28T23:00 29T02:00
Europe/Berlin       | 0    */2   *  | 2026-10-24T21:30 | 24T22:00 25T00:00 25T01:00 25T03:00
# The same hours named one by one: each of them once a day.
Europe/Berlin       | 0    0,2,4 *  | 2026-03-28T22:30 | 28T23:00 29T01:00 29T02:00
Europe/Berlin       | 0    0,2,4 *  | 2026-10-24T21:30 | 24T22:00 25T00:00 25T03:00
# One run makes up for all the times of a gap.
Europe/Berlin       | */15 2     *  | 2026-03-29T00:00 | 29T01:00 30T00:00
# New York: from 02:00 to 03:00 on 8 March, from 02:00 to 01:00 on 1 November.
America/New_York    | 30   2     *  | 2026-03-07T00:00 | 07T07:30 08T07:00 09T06:30
America/New_York    | 30   1     *  | 2026-10-31T00:00 | 31T05:30 01T05:30 02T06:30
America/New_York    | 0    *     *  | 2026-11-01T04:30 | 01T05:00 01T06:00 01T07:00
America/New_York    | 30   *     *  | 2026-03-08T06:00 | 08T06:30 08T07:30
# Lord Howe: from 02:00 to 01:30 on 5 April, from 02:00 to 02:30 on 4 October.
Australia/Lord_Howe | 45   1     *  | 2026-04-03T00:00 | 03T14:45 04T14:45 05T15:15
Australia/Lord_Howe | 15   2     *  | 2026-10-02T00:00 | 02T15:45 03T15:30 04T15:15
Australia/Lord_Howe | */20 *     *  | 2026-04-04T14:30 | 04T14:40 04T15:10 04T15:30
Australia/Lord_Howe | */20 *     *  | 2026-10-03T15:00 | 03T15:10 03T15:40 03T16:00
Australia/Lord_Howe | 0    *     *  | 2026-04-04T13:30 | 04T14:00 04T15:30 04T16:30
# Troll: from 01:00 to 03:00 on 29 March, from 03:00 to 01:00 on 25 October.
Antarctica/Troll    | 30   1     *  | 2026-03-28T00:00 | 28T01:30 29T01:00 29T23:30
Antarctica/Troll    | 30   2     *  | 2026-03-28T00:00 | 28T02:30 29T01:00 30T00:30
Antarctica/Troll    | 30   2     *  | 2026-10-24T00:00 | 24T00:30 25T00:30 26T02:30
Antarctica/Troll    | 0    *     *  | 2026-10-24T23:30 | 25T00:00 25T01:00 25T02:00 25T03:00
Antarctica/Troll    | 0    *     *  | 2026-03-28T23:30 | 29T00:00 29T01:00 29T02:00
# Beirut loses the first hour of 29 March; what was meant for it still runs, and on that day.
Asia/Beirut         | 30   0     *  | 2026-03-27T12:00 | 27T22:30 28T22:00 29T21:30
Asia/Beirut         | 0    0     29 | 2026-03-27T12:00 | 28T22:00
# Recife kept summer time for a week: from midnight on 8 October to midnight after the 14th.
America/Recife      | 30   23    14 | 2000-10-01T00:00 | 15T01:30
# Samoa had no 30 December 2011.
Pacific/Apia        | 0    9     *  | 2011-12-29T12:00 | 29T19:00 30T10:00 30T19:00
"""


def rows(table):
    lines = [line for line in table.splitlines() if line and not line.startswith("#")]
    return [tuple(cell.strip() for cell in line.split("|")) for line in lines]


@pytest.mark.parametrize(("zone", "fields", "start", "expected"), rows(TABLE))
def test_a_crontab_runs_at_these_instants(zone, fields, start, expected):
    minute, hour, day_of_month = fields.split()
    schedule = cron(zone, minute=minute, hour=hour, day_of_month=day_of_month)
    after = utc(start)
    found = []
    for _ in expected.split():
        after = next_run(schedule, after, anchor=after)
        found.append(after.strftime("%dT%H:%M"))
    assert " ".join(found) == expected


def test_a_named_hour_is_over_once_its_first_showing_has_passed():
    schedule = cron("Europe/Berlin", minute=30, hour=2)
    between_the_showings = utc("2026-10-25T01:10")
    assert next_run(schedule, between_the_showings, anchor=between_the_showings) == utc("2026-10-26T01:30")


def test_all_hours_named_one_by_one_are_every_hour():
    schedule = cron("Europe/Berlin", minute=0, hour=set(range(24)))
    assert len(runs(schedule, utc("2026-10-24T22:00"), utc("2026-10-25T23:00"))) == 25


@pytest.mark.parametrize("fields", [{"minute": 30, "hour": 2}, {"minute": "*/20"}], ids=str)
@pytest.mark.parametrize("middle", ["2026-03-29T01:00", "2026-10-25T01:00"])
def test_a_time_zone_of_another_make_gives_the_same_runs(middle, fields):
    other = crontab(**fields)
    other.tz = dateutil.tz.gettz("Europe/Berlin")
    around = (utc(middle) - DAY, utc(middle) + DAY)
    assert runs(other, *around) == runs(cron("Europe/Berlin", **fields), *around)


# --------------------------------------------------------------------------- minute by minute

TURNS = {
    "Berlin, spring": ("Europe/Berlin", "2026-03-29T01:00"),
    "Berlin, autumn": ("Europe/Berlin", "2026-10-25T01:00"),
    "New York, spring": ("America/New_York", "2026-03-08T07:00"),
    "New York, autumn": ("America/New_York", "2026-11-01T06:00"),
    "Lord Howe, autumn": ("Australia/Lord_Howe", "2026-04-04T15:00"),
    "Lord Howe, spring": ("Australia/Lord_Howe", "2026-10-03T15:30"),
    "Troll, spring": ("Antarctica/Troll", "2026-03-29T01:00"),
    "Troll, autumn": ("Antarctica/Troll", "2026-10-25T01:00"),
    "Beirut, a gap at midnight": ("Asia/Beirut", "2026-03-28T22:00"),
    "Beirut, back over midnight": ("Asia/Beirut", "2026-10-24T21:00"),
    "St. John's, back over midnight at 00:01": ("America/St_Johns", "2006-10-29T02:31"),
    "Casablanca, before Ramadan": ("Africa/Casablanca", "2026-02-15T02:00"),
    "Samoa, a day that never was": ("Pacific/Apia", "2011-12-30T10:00"),
    "Kathmandu, no turn at all": ("Asia/Kathmandu", "2026-03-29T01:00"),
}

FIELDS = [
    {"minute": 30, "hour": 2},
    {"minute": 0, "hour": 2},
    {"minute": 30, "hour": 1},
    {"minute": 0, "hour": 3},
    {"minute": "0,15,45", "hour": "0,23"},
    {"minute": "*/15", "hour": "1-3"},
    {"minute": 0},
    {"minute": "*/20"},
    {"minute": "*", "hour": "1,2,*/24"},
    {"minute": 10, "hour": "*/2"},
    {"minute": 0, "hour": "*/7"},
    {"minute": 30, "hour": 2, "day_of_week": "sun"},
    {"minute": 0, "hour": 9, "day_of_week": "mon-fri"},
    {"minute": 0, "hour": "0,2", "day_of_month": "28-31"},
    {"minute": "*/7", "hour": "*", "day_of_month": "1,29", "month_of_year": "3,10-12"},
]


class Minute(NamedTuple):
    """A minute of real time: what the wall clock shows, and what it never showed just before."""

    instant: datetime
    wall: datetime
    is_repeated: bool
    missing: tuple[datetime, ...]


@cache
def minutes_around(turn):
    """Every minute from two days before a turn of the clock to one and a half after it."""
    zone, at = TURNS[turn]
    shown = set()
    minutes = []
    for number in range(84 * 60):
        instant = utc(at) - 2 * DAY + number * MINUTE
        wall = instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        expected = minutes[-1].wall + MINUTE if minutes else wall
        missing = tuple(expected + n * MINUTE for n in range((wall - expected) // MINUTE))
        minutes.append(Minute(instant, wall, wall in shown, missing))
        shown.add(wall)
    return minutes


def matches(schedule, wall):
    return (
        wall.minute in schedule.minute
        and wall.hour in schedule.hour
        and wall.isoweekday() % 7 in schedule.day_of_week
        and wall.day in schedule.day_of_month
        and wall.month in schedule.month_of_year
    )


def is_due(schedule, minute, *, hour):
    if "*" in hour:
        return matches(schedule, minute.wall)
    if minute.missing and any(matches(schedule, wall) for wall in minute.missing):
        return True
    return not minute.is_repeated and matches(schedule, minute.wall)


def walk(schedule, turn, *, hour):
    """The occurrences of all but the first day, found by looking at every minute."""
    minutes = minutes_around(turn)[24 * 60 + 1 :]
    return [minute.instant for minute in minutes if is_due(schedule, minute, hour=hour)]


def span(turn):
    minutes = minutes_around(turn)
    return minutes[24 * 60].instant, minutes[-1].instant


@pytest.mark.parametrize("turn", [turn for turn in TURNS if "no turn" not in turn])
def test_the_walks_cross_a_turn_of_the_clock(turn):
    walked = [minute for minute in minutes_around(turn) if minute.instant > span(turn)[0]]
    assert any(minute.is_repeated or minute.missing for minute in walked)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("turn", TURNS)
def test_a_chain_of_runs_is_what_a_walk_through_every_minute_finds(turn, fields):
    schedule = cron(TURNS[turn][0], **fields)
    assert runs(schedule, *span(turn)) == walk(schedule, turn, hour=str(fields.get("hour", "*")))


numbers_of_an_hour = st.sets(st.integers(0, 59), min_size=1, max_size=4)
named_hours = st.sets(st.integers(0, 23), min_size=1, max_size=5)
starred_hours = st.sampled_from(["*", "*/2", "*/3", "*/5", "1,*/6", "*/23"])


def listed(numbers):
    return ",".join(str(number) for number in sorted(numbers))


@st.composite
def fields(draw):
    chosen = {
        "minute": draw(numbers_of_an_hour.map(listed) | st.sampled_from(["*", "*/20"])),
        "hour": draw(named_hours.map(listed) | starred_hours),
    }
    if draw(st.booleans()):
        chosen["day_of_week"] = draw(st.sampled_from(["sun", "sat,sun", "mon-fri", "5,6,0,1"]))
    if draw(st.booleans()):
        chosen["day_of_month"] = draw(st.sampled_from(["1", "28-31", "*/2", "24-29"]))
    return chosen


@settings(max_examples=60, deadline=None)
@given(turn=st.sampled_from(sorted(TURNS)), chosen=fields())
def test_no_chain_leaves_out_or_makes_up_a_run(turn, chosen):
    schedule = cron(TURNS[turn][0], **chosen)
    assert runs(schedule, *span(turn)) == walk(schedule, turn, hour=chosen["hour"])


@settings(max_examples=60, deadline=None)
@given(
    turn=st.sampled_from(sorted(TURNS)),
    chosen=fields(),
    offsets=st.lists(st.timedeltas(-DAY / 8, DAY / 8), min_size=1, max_size=8),
)
def test_from_any_instant_the_next_run_is_the_first_one_after_it(turn, chosen, offsets):
    schedule = cron(TURNS[turn][0], **chosen)
    found = walk(schedule, turn, hour=chosen["hour"])
    _, last = span(turn)
    for offset in offsets:
        after = utc(TURNS[turn][1]) + offset
        expected = next((instant for instant in found if instant > after), None)
        answer = next_run(schedule, after, anchor=after)
        assert answer == expected or (expected is None and answer > last)
