"""The fingerprint of a beat entry: which edits it shows, and which are none."""

from __future__ import annotations

import sys
from collections import deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from types import SimpleNamespace
from uuid import UUID
from zoneinfo import ZoneInfo

import dateutil.tz
import pytest
from celery import Celery, signature
from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule, crontab, schedule, solar

from celery_durable.calendar import definition_hash


@cache
def app_in(zone):
    app = Celery(set_as_current=False)
    app.conf.timezone = zone
    return app


def cron(zone="UTC", **fields):
    return crontab(**fields, app=app_in(zone))


def hash_of(task="proj.add", schedule=30, args=(), kwargs=None, options=None):
    return definition_hash(task, schedule, args, kwargs, options)


class Colour(Enum):
    RED = 1
    BLUE = 2


class Opaque:
    def __init__(self, inside):
        self.inside = inside


class Tides(BaseSchedule):
    """A custom schedule with fields."""

    def __init__(self, harbour, **options):
        super().__init__(**options)
        self.harbour = harbour

    def is_due(self, last_run_at):
        return False, 60


class Pickled(Tides):
    """A custom schedule that says by itself what it consists of, and counts its calls."""

    calls = 0

    def __reduce__(self):
        self.calls += 1
        return type(self), (self.harbour,)


class Jittered(schedule):
    def __init__(self, run_every, jitter, **options):
        super().__init__(run_every, **options)
        self.jitter = jitter

    def is_due(self, last_run_at):
        return super().is_due(last_run_at)


def local_now():
    return datetime.now(timezone.utc)


def utc_now():
    return datetime.now(timezone.utc)


def lazy(*args, **kwargs):
    return BeatLazyFunc(local_now, *args, **kwargs)


def test_a_fingerprint_is_the_same_for_ever():
    entry = definition_hash(
        "proj.report",
        cron("Europe/Berlin", minute="*/15", hour=2, nowfun=None),
        [1, 2.5, "x", None, True, b"y", {"p", "q", "r"}, SimpleNamespace(a=1)],
        {"day": date(2026, 1, 2), "now": BeatLazyFunc(date.today), "span": timedelta(minutes=1)},
        {"queue": "slow", "expires": 12 * 3600, "headers": {"b": 1, "a": 2}},
    )
    assert entry == "a76a63eb3c064c00f0f963a7ab07926799a21e78f016c4377491035eb16f8782"


SAME = {
    "seconds and a timedelta": ({"schedule": 30}, {"schedule": timedelta(seconds=30)}),
    "seconds and a schedule": ({"schedule": 30}, {"schedule": schedule(30.0)}),
    "none and nothing": ({"args": None, "kwargs": None}, {"args": (), "kwargs": {}}),
    "a list and a tuple": ({"args": [1, [2]]}, {"args": (1, (2,))}),
    "a list and a deque": ({"args": [[1]]}, {"args": [deque([1])]}),
    "the order of keys": ({"kwargs": {"a": 1, "b": 2}}, {"kwargs": {"b": 2, "a": 1}}),
    "the order of a set": ({"args": [{"a", "b", "c"}]}, {"args": [{"c", "b", "a"}]}),
    "one crontab and another": (
        {"schedule": cron(minute=5, hour="*/2")},
        {"schedule": cron(minute="5", hour="*/2")},
    ),
    "a step and its minutes": (
        {"schedule": cron(minute="*/30")},
        {"schedule": cron(minute=[30, 0])},
    ),
    "an interval in two zones": (
        {"schedule": schedule(30, app=app_in("UTC"))},
        {"schedule": schedule(30, app=app_in("Europe/Berlin"))},
    ),
    "two apps of one zone": (
        {"schedule": cron(minute=1)},
        {"schedule": crontab(minute=1, app=Celery(timezone="UTC", set_as_current=False))},
    ),
    "two lazy arguments": ({"args": [lazy(1, tz="x")]}, {"args": [lazy(1, tz="x")]}),
    "two lambdas of one place": tuple({"args": [BeatLazyFunc(lambda n=n: n)]} for n in (1, 2)),
    "two objects of one class": ({"args": [Opaque(1)]}, {"args": [Opaque(2)]}),
    "two custom schedules": (
        {"schedule": Tides("Bremen", app=app_in("UTC"))},
        {"schedule": Tides("Bremen", app=app_in("UTC"))},
    ),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_an_entry_that_means_the_same_is_unchanged(one, other):
    assert hash_of(**one) == hash_of(**other)


CHANGED = {
    "the task": ({"task": "proj.add"}, {"task": "proj.mul"}),
    "the period": ({"schedule": 30}, {"schedule": 30.000001}),
    "relative": ({"schedule": schedule(30)}, {"schedule": schedule(30, relative=True)}),
    "the kind of schedule": ({"schedule": 60}, {"schedule": cron()}),
    "a minute": ({"schedule": cron(minute=1)}, {"schedule": cron(minute=2)}),
    "an hour": ({"schedule": cron(hour=1)}, {"schedule": cron(hour=2)}),
    "a weekday": ({"schedule": cron(day_of_week=1)}, {"schedule": cron(day_of_week=2)}),
    "a day": ({"schedule": cron(day_of_month=1)}, {"schedule": cron(day_of_month=2)}),
    "a month": ({"schedule": cron(month_of_year=1)}, {"schedule": cron(month_of_year=2)}),
    # They differ on the days on which a clock is turned.
    "a step and its hours": (
        {"schedule": cron(hour="*/12")},
        {"schedule": cron(hour="0,12")},
    ),
    "the zone of a crontab": (
        {"schedule": cron("UTC", hour=1)},
        {"schedule": cron("Europe/London", hour=1)},
    ),
    "the zone of a relative interval": (
        {"schedule": schedule(86_400, relative=True, app=app_in("UTC"))},
        {"schedule": schedule(86_400, relative=True, app=app_in("Asia/Kolkata"))},
    ),
    "the zone of a custom schedule": (
        {"schedule": Tides("Bremen", app=app_in("UTC"))},
        {"schedule": Tides("Bremen", app=app_in("Asia/Kolkata"))},
    ),
    "the nowfun": (
        {"schedule": cron(nowfun=local_now)},
        {"schedule": cron(nowfun=utc_now)},
    ),
    "a field of a custom schedule": (
        {"schedule": Tides("Bremen")},
        {"schedule": Tides("Hamburg")},
    ),
    "a field that a subclass added": (
        {"schedule": Jittered(30, jitter=1)},
        {"schedule": Jittered(30, jitter=2)},
    ),
    "a schedule that says what it is": (
        {"schedule": Pickled("Bremen")},
        {"schedule": Pickled("Hamburg")},
    ),
    "an argument": ({"args": [1]}, {"args": [2]}),
    "the order of arguments": ({"args": [1, 2]}, {"args": [2, 1]}),
    "a type": ({"args": [1]}, {"args": ["1"]}),
    "a type that compares equal": ({"args": [1]}, {"args": [1.0]}),
    "a truth and a number": ({"args": [1]}, {"args": [True]}),
    "text and bytes": ({"args": ["a"]}, {"args": [b"a"]}),
    "nesting": ({"args": [[1], 2]}, {"args": [[1, 2]]}),
    "a list and a set": ({"args": [[1]]}, {"args": [{1}]}),
    "an argument and a keyword": ({"args": ["a"]}, {"kwargs": {"a": "a"}}),
    "a key": ({"kwargs": {"a": 1}}, {"kwargs": {"b": 1}}),
    "the type of a key": ({"args": [{1: 1}]}, {"args": [{"1": 1}]}),
    "an instant": tuple({"args": [datetime(2026, 1, day)]} for day in (1, 2)),
    "a span": tuple({"args": [timedelta(microseconds=n)]} for n in (1, 2)),
    "a decimal": tuple({"args": [Decimal(text)]} for text in ("1.0", "1.00")),
    "a uuid": tuple({"args": [UUID(int=n)]} for n in (1, 2)),
    "an enum": ({"args": [Colour.RED]}, {"args": [Colour.BLUE]}),
    "a huge number": tuple({"args": [10**5000 + n]} for n in (1, 2)),
    "what a lazy argument is called with": ({"args": [lazy(1)]}, {"args": [lazy(2)]}),
    "a lazy function": (
        {"args": [BeatLazyFunc(local_now)]},
        {"args": [BeatLazyFunc(utc_now)]},
    ),
    "a lazy method": (
        {"args": [BeatLazyFunc(date.today)]},
        {"args": [BeatLazyFunc(date.ctime)]},
    ),
    "a lazy partial": tuple({"args": [BeatLazyFunc(partial(local_now, n))]} for n in (1, 2)),
    "a class": ({"args": [Opaque]}, {"args": [Colour]}),
    "a zone": ({"args": [ZoneInfo("UTC")]}, {"args": [ZoneInfo("Asia/Kolkata")]}),
    "a zone without a name": (
        {"args": [dateutil.tz.gettz("Asia/Tokyo")]},
        {"args": [dateutil.tz.gettz("Asia/Kolkata")]},
    ),
    "an option": ({"options": {"queue": "a"}}, {"options": {"queue": "b"}}),
    "a linked task": tuple(
        {"options": {"link": signature("proj.told", args=(n,), app=app_in("UTC"))}} for n in (1, 2)
    ),
    "the class of an object": ({"args": [Opaque(1)]}, {"args": [SimpleNamespace()]}),
}


@pytest.mark.parametrize(("one", "other"), CHANGED.values(), ids=CHANGED)
def test_an_entry_that_was_edited_is_changed(one, other):
    assert hash_of(**one) != hash_of(**other)


def test_a_schedule_is_unchanged_by_use():
    tides, minutely = Tides("Bremen", app=app_in("UTC")), cron(minute="*/2")
    before = [hash_of(schedule=tides), hash_of(schedule=minutely)]
    for used in (tides, minutely):
        assert used.tz is not None
        assert used.utc_enabled
    minutely.remaining_estimate(local_now())
    assert [hash_of(schedule=tides), hash_of(schedule=minutely)] == before


def test_a_schedule_that_says_what_it_is_may_keep_count():
    pickled = Pickled("Bremen", app=app_in("UTC"))
    assert hash_of(schedule=pickled) == hash_of(schedule=pickled)
    assert pickled.calls == 2


def test_a_solar_schedule_is_its_event_and_place(monkeypatch):
    monkeypatch.setitem(sys.modules, "ephem", SimpleNamespace(Observer=SimpleNamespace))
    sunrise = hash_of(schedule=solar("sunrise", 52, 13, app=app_in("UTC")))
    assert hash_of(schedule=solar("sunrise", 52.0, 13.0, app=app_in("Asia/Kolkata"))) == sunrise
    assert hash_of(schedule=solar("sunset", 52, 13)) != sunrise
    assert hash_of(schedule=solar("sunrise", 53, 13)) != sunrise
    assert hash_of(schedule=solar("sunrise", 52, 14)) != sunrise
