"""The next occurrence of intervals, crontabs, solar events and schedules of one's own."""

from __future__ import annotations

import math
import sys
from datetime import datetime, timedelta, timezone, tzinfo
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule, solar
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from celery_durable.calendar import ASK_WITHIN, SHORTEST_PERIOD, Answer, ask, is_custom, next_run

UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")
NEW_YORK = ZoneInfo("America/New_York")
NOON = datetime(2026, 5, 12, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)

instants = st.datetimes(datetime(2025, 1, 1), datetime(2032, 1, 1), timezones=st.just(UTC))


@cache
def app_in(zone):
    app = Celery(set_as_current=False)
    app.conf.timezone = zone
    return app


def cron(zone="UTC", **fields):
    return crontab(**fields, app=app_in(zone))


def every(seconds, zone="UTC", **options):
    return schedule(seconds, app=app_in(zone), **options)


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def after(entry_schedule, instant, anchor=None):
    return next_run(entry_schedule, instant, anchor=anchor or instant)


# ---------------------------------------------------------------------------------- intervals


def test_a_new_interval_first_runs_one_period_from_now():
    assert after(every(30), NOON) == NOON + 30 * SECOND


def test_a_late_run_does_not_make_the_next_one_late():
    assert after(every(30), NOON + 4 * SECOND, anchor=NOON) == NOON + 30 * SECOND


def test_missed_periods_are_stepped_over_in_the_rhythm_of_the_anchor():
    assert after(every(30), NOON + 1000 * SECOND, anchor=NOON) == NOON + 1020 * SECOND


def test_a_run_on_the_dot_is_followed_by_the_next_period():
    assert after(every(30), NOON + 30 * SECOND, anchor=NOON) == NOON + 60 * SECOND


def test_an_interval_pays_no_heed_to_turned_clocks():
    before_the_gap = utc("2026-03-29T00:30")
    assert after(every(3600, "Europe/Berlin"), before_the_gap) == utc("2026-03-29T01:30")


@settings(deadline=None)
@given(
    anchor=instants,
    elapsed=st.timedeltas(timedelta(0), 400 * DAY),
    period=st.timedeltas(timedelta(microseconds=1), 40 * DAY),
)
def test_an_interval_runs_at_the_first_whole_period_after(anchor, elapsed, period):
    found = after(every(period), anchor + elapsed, anchor=anchor)
    assert (found - anchor) % period == timedelta(0)
    assert timedelta(0) < found - (anchor + elapsed) <= period


@pytest.mark.parametrize("period", [0, -5, timedelta(0), timedelta.min])
@pytest.mark.parametrize("relative", [False, True])
def test_an_interval_of_nothing_still_moves_on(period, relative):
    assert NOON < after(every(period, relative=relative), NOON) <= NOON + SHORTEST_PERIOD


def test_an_interval_longer_than_there_are_dates_never_runs():
    assert after(every(timedelta.max), NOON) is None


def test_an_interval_without_a_period_is_refused():
    with pytest.raises(TypeError, match="needs a period, not None"):
        after(schedule(app=app_in("UTC")), NOON)


def test_a_naive_datetime_is_refused():
    with pytest.raises(ValueError, match="aware datetime"):
        next_run(every(30), datetime(2026, 5, 12), anchor=NOON)


def test_an_instant_of_any_zone_is_taken_and_utc_given_back():
    found = after(every(30), NOON.astimezone(NEW_YORK))
    assert (found, found.tzinfo) == (NOON + 30 * SECOND, UTC)


@pytest.mark.parametrize(
    ("period", "asked", "expected"),
    [
        (timedelta(hours=2), "2026-05-12T10:17", "2026-05-12T12:00"),
        (timedelta(minutes=90), "2026-05-12T10:17", "2026-05-12T11:00"),
        (timedelta(minutes=5), "2026-05-12T10:17:31", "2026-05-12T10:22"),
        (timedelta(seconds=10), "2026-05-12T10:17:31.400", "2026-05-12T10:17:41"),
        (timedelta(seconds=0.5), "2026-05-12T10:17:31.100", "2026-05-12T10:17:31.600"),
        # To Berlin's midnight.
        (timedelta(days=1), "2026-05-12T10:17", "2026-05-12T22:00"),
        (timedelta(days=2), "2026-05-12T10:17", "2026-05-13T22:00"),
    ],
)
def test_a_relative_interval_is_rounded_to_its_resolution(period, asked, expected):
    relative = every(period, "Europe/Berlin", relative=True)
    assert after(relative, utc(asked)) == utc(expected)


def test_a_relative_interval_keeps_its_rhythm_after_a_late_run():
    relative = every(10, relative=True)
    assert after(relative, NOON + 2 * SECOND, anchor=NOON) == NOON + 10 * SECOND
    relative = every(7200, relative=True)
    assert after(relative, NOON + timedelta(minutes=70), anchor=NOON) == NOON + 2 * HOUR


def test_a_relative_interval_is_counted_from_the_run_once_a_period_was_missed():
    relative = every(7200, relative=True)
    assert after(relative, NOON + timedelta(hours=5, minutes=50), anchor=NOON) == NOON + 7 * HOUR


def test_a_relative_interval_with_an_anchor_ahead_is_counted_from_now():
    relative = every(7200, relative=True)
    assert after(relative, NOON, anchor=NOON + 5 * HOUR) == NOON + 2 * HOUR


@settings(deadline=None)
@given(asked=instants, seconds=st.integers(1, 100_000))
def test_a_relative_interval_is_rounded_by_the_rule_of_celery(asked, seconds):
    relative = schedule(seconds, relative=True, app=app_in("Asia/Kolkata"), nowfun=lambda: local(asked))

    def local(instant):
        return instant.astimezone(ZoneInfo("Asia/Kolkata"))

    theirs = asked + relative.remaining_estimate(local(asked))
    assert after(relative, asked) == theirs if theirs > asked else asked + seconds * SECOND


@settings(deadline=None)
@given(
    asked=instants,
    since=st.timedeltas(timedelta(0), 3 * DAY),
    period=st.timedeltas(timedelta(0), 3 * DAY),
)
def test_a_relative_interval_always_moves_on(asked, since, period):
    relative = every(period, "Australia/Lord_Howe", relative=True)
    assert after(relative, asked, anchor=asked - since) > asked


# ----------------------------------------------------------------------------------- crontabs


@pytest.mark.parametrize(
    ("fields", "asked", "expected"),
    [
        ({}, "2026-05-12T12:00:00", "2026-05-12T12:01"),
        ({}, "2026-05-12T11:59:59.999999", "2026-05-12T12:00"),
        ({"minute": 0, "hour": 4}, "2026-05-12T04:00", "2026-05-13T04:00"),
        ({"minute": 0, "hour": 0, "day_of_month": 31}, "2026-05-31T00:00", "2026-07-31T00:00"),
        ({"minute": 0, "hour": 0, "day_of_month": "30,31"}, "2027-01-31T00:00", "2027-03-30T00:00"),
        (
            {"minute": 59, "hour": 23, "day_of_month": "28-31"},
            "2027-02-28T23:59",
            "2027-03-28T23:59",
        ),
        ({"minute": 0, "hour": 0, "month_of_year": "*/6"}, "2026-01-31T00:00", "2026-07-01T00:00"),
        ({"minute": 0, "hour": 0, "day_of_week": "sun"}, "2026-05-10T00:00", "2026-05-17T00:00"),
        # Day of the week and day of the month: both must fit. The next Friday the 13th.
        (
            {"minute": 0, "hour": 13, "day_of_week": "fri", "day_of_month": 13},
            "2026-03-13T13:00",
            "2026-11-13T13:00",
        ),
        (
            {"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2},
            "2026-01-01T00:00",
            "2028-02-29T00:00",
        ),
        # 2100 is no leap year: the next 29 February on a Sunday is forty years off.
        (
            {"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2, "day_of_week": "sun"},
            "2088-03-01T00:00",
            "2128-02-29T00:00",
        ),
    ],
)
def test_a_crontab_runs_next_at(fields, asked, expected):
    assert after(cron(**fields), utc(asked)) == utc(expected)


def impossible(**fields):
    # Celery refuses some of them since 5.7, so they are made in two steps.
    made = cron(minute=0, hour=0)
    for name, numbers in fields.items():
        setattr(made, name, numbers)
    return made


@pytest.mark.parametrize(
    "fields",
    [
        {"day_of_month": {31}, "month_of_year": {2, 4, 6, 9, 11}},
        {"day_of_month": {30}, "month_of_year": {2}},
        {"day_of_week": set()},
        {"hour": set()},
    ],
)
def test_a_date_that_never_comes_is_none(fields):
    assert after(impossible(**fields), NOON) is None


def test_nothing_runs_after_the_last_year():
    assert after(cron(minute=0, hour=0), datetime(9999, 12, 31, 23, tzinfo=UTC)) is None


class CountingZone(tzinfo):
    """New York, counting how often it is asked for the time."""

    def __init__(self):
        self.asked = 0

    def fromutc(self, dt):
        self.asked += 1
        return dt.replace(tzinfo=NEW_YORK).astimezone(NEW_YORK) if dt.tzinfo else dt

    def utcoffset(self, dt):
        return dt.replace(tzinfo=NEW_YORK).utcoffset()


@pytest.mark.parametrize(
    ("fields", "asked", "most"),
    [
        ({}, "2026-05-12T12:00", 4),
        ({"minute": 0, "hour": 4}, "2026-05-12T12:00", 6),
        ({"minute": 0, "hour": 4, "day_of_month": 1, "month_of_year": 5}, "2026-05-12T12:00", 200),
        (
            {"minute": 0, "hour": 0, "day_of_month": 29, "month_of_year": 2, "day_of_week": 1},
            "2088-03-01T00:00",
            8_000,
        ),
    ],
)
def test_a_search_is_bounded(fields, asked, most):
    zone = CountingZone()
    assert after(cron(zone, **fields), utc(asked)) > utc(asked)
    assert 0 < zone.asked <= most


@st.composite
def crontab_fields(draw):
    numbers = {
        "minute": st.integers(0, 59),
        "hour": st.integers(0, 23),
        "day_of_week": st.integers(0, 6),
        "day_of_month": st.integers(1, 28),
        "month_of_year": st.integers(1, 12),
    }
    everything = st.sampled_from(["*", "*/2", "*/5"])
    return {
        name: draw(everything | st.sets(number, min_size=1, max_size=4)) for name, number in numbers.items()
    }


@settings(deadline=None)
@given(asked=instants, fields=crontab_fields())
def test_where_no_clock_is_turned_celery_says_the_same(asked, fields):
    zone = ZoneInfo("Asia/Kolkata")
    ours = cron("Asia/Kolkata", **fields)
    theirs = crontab(**fields, app=ours.app, nowfun=lambda: asked.astimezone(zone))
    assert after(ours, asked) == asked + theirs.remaining_estimate(asked.astimezone(zone))


@settings(deadline=None)
@given(asked=instants, fields=crontab_fields())
def test_where_clocks_are_turned_celery_says_the_same_on_all_other_days(asked, fields):
    ours = cron("Europe/Berlin", **fields)
    theirs = crontab(**fields, app=ours.app, nowfun=lambda: asked.astimezone(BERLIN))
    found = after(ours, asked)
    assume(not is_turned_near(asked) and not is_turned_near(found))
    assert found == asked + theirs.remaining_estimate(asked.astimezone(BERLIN))


def is_turned_near(instant):
    offsets = [(instant + days * DAY).astimezone(BERLIN).utcoffset() for days in (-1, 1)]
    return offsets[0] != offsets[1]


@settings(deadline=None)
@given(asked=st.lists(instants, min_size=2, max_size=6), fields=crontab_fields())
def test_asking_later_never_gives_an_earlier_run(asked, fields):
    schedule = cron("America/New_York", **fields)
    found = [after(schedule, instant) for instant in sorted(asked)]
    assert found == sorted(found)
    assert all(run > instant for run, instant in zip(found, sorted(asked), strict=True))


@settings(deadline=None)
@given(asked=instants, fields=crontab_fields())
def test_nothing_runs_between_an_instant_and_the_run_that_follows_it(asked, fields):
    schedule = cron("America/New_York", **fields)
    found = after(schedule, asked)
    assert after(schedule, found - timedelta(microseconds=1)) == found


# ---------------------------------------------------------------------------------- time zone


def test_a_crontab_counts_in_the_time_zone_of_the_app():
    nine = {"minute": 0, "hour": 9}
    assert after(cron("America/New_York", **nine), NOON) == utc("2026-05-12T13:00")
    assert after(cron("Europe/Berlin", **nine), NOON) == utc("2026-05-13T07:00")


@pytest.mark.parametrize("zone", [NEW_YORK, "America/New_York"])
def test_a_crontab_with_a_time_zone_of_its_own_counts_in_that(zone):
    nine = cron("Europe/Berlin", minute=0, hour=9)
    nine.tz = zone
    assert after(nine, NOON) == utc("2026-05-12T13:00")


def in_new_york():
    return NOON.astimezone(NEW_YORK)


@pytest.mark.parametrize(
    ("version", "expected"), [((5, 6, 2), "2026-05-12T13:00"), ((5, 7, 0), "2026-05-13T07:00")]
)
def test_a_nowfun_sets_the_zone_of_a_crontab_where_celery_lets_it(monkeypatch, version, expected):
    monkeypatch.setattr(celery, "VERSION", version)
    assert after(cron("Europe/Berlin", minute=0, hour=9, nowfun=in_new_york), NOON) == utc(expected)


@pytest.mark.parametrize("version", [(5, 6, 2), (5, 7, 0)])
def test_a_naive_nowfun_sets_no_zone(monkeypatch, version):
    monkeypatch.setattr(celery, "VERSION", version)
    nine = cron("Europe/Berlin", minute=0, hour=9, nowfun=lambda: datetime(2026, 5, 12))
    assert after(nine, NOON) == utc("2026-05-13T07:00")


def test_a_nowfun_sets_the_zone_of_a_relative_interval():
    daily = every(DAY, "Europe/Berlin", relative=True, nowfun=in_new_york)
    assert after(daily, NOON) == utc("2026-05-13T04:00")


def test_the_clock_of_a_schedule_is_not_asked_for_the_time():
    def stopped():
        return datetime(1999, 1, 1, tzinfo=UTC)

    assert after(cron(minute=0, nowfun=stopped), NOON) == NOON + HOUR
    assert after(every(30, nowfun=stopped), NOON) == NOON + 30 * SECOND


# --------------------------------------------------------------------------------------- solar


class Date(float):
    """Days since 1970, the way ephem has days since 1899."""

    def __new__(cls, value):
        if isinstance(value, datetime):
            value = (value - datetime(1970, 1, 1)) / DAY
        return super().__new__(cls, value)

    def datetime(self):
        return datetime(1970, 1, 1) + timedelta(microseconds=round(self * DAY / timedelta.resolution))


class Polar(Exception):
    """The sun stays on one side of the horizon."""


class Observer:
    """A place where the sun rises at 06:00, but not on the first 70 days of a year.

    It is as exact as ephem: within a second of a sunrise, it may find the same one again.
    """

    def next_rising(self, sun, start, use_center=False):
        day = math.floor(start - 0.25 - SECOND / DAY) + 1
        if Date(day).datetime().timetuple().tm_yday <= 70:
            raise Polar
        return Date(day + 0.25)

    def next_setting(self, sun, start, use_center=False):
        raise Polar

    def next_antitransit(self, sun, start):
        return Date(math.floor(start) + 1)


@pytest.fixture
def sky(monkeypatch):
    fake = SimpleNamespace(Observer=Observer, Sun=object, Date=Date, CircumpolarError=Polar, minute=1 / 1440)
    monkeypatch.setitem(sys.modules, "ephem", fake)


@pytest.mark.usefixtures("sky")
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("2026-05-12T05:59", "2026-05-12T06:00"),
        ("2026-05-12T06:00", "2026-05-13T06:00"),
        ("2026-12-31T12:00", "2027-03-12T06:00"),
    ],
)
def test_a_solar_event_runs_when_it_next_happens(asked, expected):
    assert after(solar("sunrise", 68, 20, app=app_in("Europe/Berlin")), utc(asked)) == utc(expected)


@pytest.mark.usefixtures("sky")
def test_a_solar_event_that_does_not_happen_is_none():
    assert after(solar("sunset", 68, 20, app=app_in("UTC")), NOON) is None


class TestTheRealSun:
    """With ephem itself, which Celery asks, too."""

    @pytest.mark.parametrize(
        ("event", "expected"),
        [
            # As almanacs have them for Berlin (52.52 N, 13.41 E), to the minute.
            ("sunrise", "2026-06-21T02:43"),
            ("solar_noon", "2026-06-21T11:08"),
            ("sunset", "2026-06-21T19:33"),
        ],
    )
    def test_it_is_where_an_almanac_has_it(self, event, expected):
        found = after(solar(event, 52.52, 13.41, app=app_in("Europe/Berlin")), utc("2026-06-21T00:00"))
        assert abs(found - utc(expected)) < 90 * SECOND

    @pytest.mark.parametrize("event", sorted(solar._all_events))
    def test_every_event_of_celerys_happens_once_a_day(self, event):
        happens = solar(event, 30, 31, app=app_in("Africa/Cairo"))
        found = [after(happens, NOON)]
        for _ in range(5):
            found.append(after(happens, found[-1]))
        days = [later - earlier for earlier, later in pairwise(found)]
        assert all(abs(day - DAY) < 180 * SECOND for day in days)

    def test_it_is_as_celery_says(self):
        happens = solar("dawn_civil", 52.52, 13.41, app=app_in("UTC"))
        happens.nowfun = lambda: NOON
        celerys = NOON + happens.remaining_estimate(NOON)
        assert abs(after(happens, NOON) - celerys) < SECOND

    def test_a_sun_that_does_not_set_for_weeks_sets_at_last(self):
        found = after(solar("sunset", 69.65, 18.96, app=app_in("Europe/Oslo")), utc("2026-06-01T00:00"))
        assert utc("2026-07-20T00:00") < found < utc("2026-07-30T00:00")


# --------------------------------------------------------------------------------- of one's own


class Told(BaseSchedule):
    """Answers what it was told to, and remembers what it was asked."""

    def __init__(self, *answers, **options):
        super().__init__(**options)
        self.answers = list(answers)
        self.asked = []

    def is_due(self, last_run_at):
        self.asked.append(last_run_at)
        return self.answers.pop(0)


def test_a_schedule_of_ones_own_is_asked_whether_it_is_due():
    told = Told((False, 12.5), (True, 60), app=app_in("America/New_York"))
    assert ask(told, NOON, NOON + HOUR) == Answer(False, NOON + HOUR + 12.5 * SECOND)
    assert ask(told, NOON, NOON + 2 * HOUR) == Answer(True, NOON + 2 * HOUR + 60 * SECOND)
    assert told.asked == [NOON, NOON]
    assert told.asked[0].tzinfo == NEW_YORK


def test_the_next_run_of_a_schedule_of_ones_own_is_when_to_ask_it():
    assert after(Told((False, 12.5), app=app_in("UTC")), NOON) == NOON + 12.5 * SECOND


@pytest.mark.parametrize("delay", [0, -3, 0.001, -math.inf])
def test_an_answer_that_leaves_no_time_is_stretched(delay):
    assert ask(Told((False, delay), app=app_in("UTC")), NOON, NOON).ask_at == NOON + SHORTEST_PERIOD


@pytest.mark.parametrize("delay", [None, math.nan, math.inf, 86_400, 10**400, "soon"])
def test_an_answer_far_off_or_without_sense_is_asked_for_again(delay):
    assert ask(Told((False, delay), app=app_in("UTC")), NOON, NOON).ask_at == NOON + ASK_WITHIN


def test_how_soon_to_ask_again_can_be_said():
    told = Told((False, 86_400), app=app_in("UTC"))
    assert ask(told, NOON, NOON, ask_within=HOUR).ask_at == NOON + HOUR


def test_what_a_schedule_of_ones_own_raises_is_not_hidden():
    with pytest.raises(NotImplementedError):
        after(BaseSchedule(app=app_in("UTC")), NOON)


class NotOnHolidays(crontab):
    def is_due(self, last_run_at):
        return super().is_due(last_run_at)


class Jittered(schedule):
    def remaining_estimate(self, last_run_at):
        return super().remaining_estimate(last_run_at)


class Renamed(crontab):
    """A subclass that leaves the deciding to its parent."""


class TzAwareCrontab(crontab):
    """Shaped like the class of that name in django-celery-beat."""

    def __init__(self, *args, tz, **kwargs):
        super().__init__(*args, nowfun=lambda: NOON.astimezone(tz), **kwargs)
        self.tz = tz

    def is_due(self, last_run_at):
        return super().is_due(last_run_at.astimezone(self.tz))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (crontab(), False),
        (schedule(30), False),
        (Renamed(), False),
        (TzAwareCrontab(tz=NEW_YORK), False),
        (NotOnHolidays(), True),
        (Jittered(30), True),
        (BaseSchedule(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_schedule_is_custom_if_it_decides_by_itself(made, expected):
    assert is_custom(made) is expected


def test_the_crontab_of_django_celery_beat_counts_in_its_own_zone():
    nine = TzAwareCrontab(minute=0, hour=9, tz=NEW_YORK, app=app_in("Europe/Berlin"))
    assert after(nine, NOON) == utc("2026-05-12T13:00")


def test_a_custom_crontab_is_asked_in_the_way_of_celery():
    def ten_past():
        return NOON + timedelta(minutes=10)

    hourly = NotOnHolidays(minute=0, app=app_in("UTC"), nowfun=ten_past)
    assert ask(hourly, NOON - HOUR, ten_past(), ask_within=DAY) == Answer(True, NOON + HOUR)
