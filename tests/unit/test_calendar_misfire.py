"""What a scheduler does with entries that it finds late."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import cache

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_durable.calendar import (
    ASK_WITHIN,
    SKIP_GRACE,
    Advance,
    Fire,
    Skip,
    Wait,
    advance,
    check_misfire,
    decide_misfire,
    next_run,
)

UTC = timezone.utc
NOON = datetime(2026, 5, 12, 12, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@cache
def app():
    app = Celery(set_as_current=False)
    app.conf.timezone = "UTC"
    return app


def hourly():
    return crontab(minute=0, app=app())


def daily():
    return crontab(minute=0, hour=12, app=app())


def every(seconds):
    return schedule(seconds, app=app())


# ------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("policy", "grace", "late", "runs"),
    [
        ("coalesce", None, 0, True),
        ("coalesce", None, 30 * 86_400, True),
        ("coalesce", 600, 600, True),
        ("coalesce", 600, 600.000001, False),
        ("coalesce", 0, 0, True),
        ("coalesce", 0, 0.001, False),
        ("skip", None, SKIP_GRACE, True),
        ("skip", None, SKIP_GRACE + 0.000001, False),
        ("skip", 600, 600, True),
        ("skip", 600, 601, False),
        ("skip", 0, 0.001, False),
        ("skip", 1e300, 30 * 86_400, True),
    ],
)
def test_a_run_is_skipped_when_it_is_later_than_its_policy_allows(policy, grace, late, runs):
    found = decide_misfire(NOON, NOON + late * SECOND, policy, grace)
    assert found == (Fire if runs else Skip)(late * SECOND)


def test_the_lateness_that_counts_is_that_of_the_latest_occurrence():
    now = NOON + 5 * HOUR + MINUTE
    assert decide_misfire(NOON, now, "skip", latest=NOON + 5 * HOUR) == Fire(MINUTE)


def test_a_policy_and_a_grace_are_taken_as_users_write_them():
    assert check_misfire("coalesce", None) == ("coalesce", None)
    assert check_misfire("skip", timedelta(minutes=2)) == ("skip", 120.0)
    assert check_misfire("skip", 0) == ("skip", 0.0)


@pytest.mark.parametrize(
    ("policy", "grace", "complaint"),
    [
        ("all", None, "misfire must be one of coalesce, skip, not 'all'"),
        (None, None, "misfire must be one of coalesce, skip, not None"),
        ("skip", -1, "misfire_grace must be from 0"),
        ("skip", float("nan"), "misfire_grace must be from 0"),
        ("skip", True, "misfire_grace must be seconds or a timedelta"),
        ("skip", "60", "misfire_grace must be seconds or a timedelta"),
    ],
)
def test_a_wrong_policy_or_grace_is_named(policy, grace, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_misfire(policy, grace)


# ---------------------------------------------------------------------------- moving an entry


def test_an_entry_on_time_runs_and_moves_to_its_next_occurrence():
    assert advance(hourly(), NOON, NOON + SECOND) == Advance(Fire(SECOND), NOON + HOUR)
    assert advance(every(30), NOON, NOON + SECOND) == Advance(Fire(SECOND), NOON + 30 * SECOND)


def test_an_entry_before_its_time_waits_and_keeps_it():
    assert advance(hourly(), NOON, NOON - MOMENT) == Advance(Wait(), NOON)


def test_all_that_was_missed_is_made_up_for_by_one_run():
    now = NOON + 3 * DAY + 10 * MINUTE
    assert advance(hourly(), NOON, now) == Advance(Fire(now - NOON), NOON + 3 * DAY + HOUR)


def test_with_skip_nothing_is_made_up_for():
    now = NOON + 3 * DAY + 10 * MINUTE
    found = advance(hourly(), NOON, now, policy="skip")
    assert found == Advance(Skip(now - NOON), NOON + 3 * DAY + HOUR)


@pytest.mark.parametrize("policy", ["coalesce", "skip"])
def test_an_occurrence_still_in_time_runs_however_many_were_missed_before_it(policy):
    now = NOON + 3 * DAY + 10 * MINUTE
    found = advance(hourly(), NOON, now, policy=policy, grace=600)
    assert found == Advance(Fire(10 * MINUTE), NOON + 3 * DAY + HOUR)
    found = advance(hourly(), NOON, now + MOMENT, policy=policy, grace=600)
    assert isinstance(found.decision, Skip)


def test_an_interval_shorter_than_its_grace_is_never_skipped():
    now = NOON + 3 * DAY + 7 * SECOND
    found = advance(every(30), NOON, now, policy="skip")
    assert isinstance(found.decision, Fire)
    assert found.next_run_at == NOON + 3 * DAY + 30 * SECOND


def test_an_interval_that_was_missed_keeps_its_rhythm():
    found = advance(every(3600), NOON, NOON + 5 * HOUR + 20 * MINUTE, policy="skip")
    assert found == Advance(Skip(5 * HOUR + 20 * MINUTE), NOON + 6 * HOUR)


def test_the_cron_starting_deadline_of_celery_is_the_grace_of_crontabs():
    deadline = {"cron_deadline": 1800}
    assert advance(daily(), NOON, NOON + 30 * MINUTE, **deadline).decision == Fire(30 * MINUTE)
    too_late = NOON + 30 * MINUTE + MOMENT
    assert advance(daily(), NOON, too_late, **deadline) == Advance(Skip(30 * MINUTE + MOMENT), NOON + DAY)


def test_the_cron_starting_deadline_counts_from_the_latest_occurrence():
    now = NOON + 5 * HOUR + 20 * MINUTE
    found = advance(hourly(), NOON, now, cron_deadline=1800)
    assert found == Advance(Fire(20 * MINUTE), NOON + 6 * HOUR)


def test_the_cron_starting_deadline_does_not_bind_intervals():
    found = advance(every(86_400), NOON, NOON + HOUR, cron_deadline=1800)
    assert found == Advance(Fire(HOUR), NOON + DAY)


def test_a_grace_of_its_own_goes_before_the_cron_starting_deadline():
    now = NOON + HOUR
    assert isinstance(advance(daily(), NOON, now, grace=7200, cron_deadline=60).decision, Fire)
    assert isinstance(advance(daily(), NOON, now, grace=60, cron_deadline=7200).decision, Skip)


@settings(deadline=None)
# Short of the second occurrence: before 5.7, Celery lost its count of them.
@given(seconds=st.integers(0, 43_198), deadline=st.sampled_from([0, 59, 1800, 3600, 40_000]))
def test_the_cron_starting_deadline_skips_what_celery_skips(seconds, deadline):
    now = NOON + (seconds + 0.5) * SECOND
    owner = Celery(set_as_current=False)
    owner.conf.beat_cron_starting_deadline = deadline
    twice_a_day = crontab(minute=0, hour="0,12", app=owner, nowfun=lambda: now)
    found = advance(twice_a_day, NOON, now, cron_deadline=deadline)
    is_due, delay = twice_a_day.is_due(NOON - SECOND)
    assert isinstance(found.decision, Fire) == is_due
    assert found.next_run_at == now + timedelta(seconds=delay)


def test_an_entry_that_never_comes_again_has_no_next_run():
    found = advance(every(timedelta.max), NOON, NOON + SECOND)
    assert found == Advance(Fire(SECOND), None)


class Told(BaseSchedule):
    """Answers what it was told to, and remembers what it was asked."""

    def __init__(self, *answers):
        super().__init__(app=app())
        self.answers = list(answers)
        self.asked = []

    def is_due(self, last_run_at):
        self.asked.append(last_run_at)
        return self.answers.pop(0)


def test_a_schedule_of_ones_own_decides_alone():
    told = Told((False, 30), (True, 30))
    late = {"last_run_at": NOON - HOUR, "policy": "skip", "grace": 0, "cron_deadline": 0}
    now = NOON + DAY
    assert advance(told, NOON, now, **late) == Advance(Wait(), now + 30 * SECOND)
    assert advance(told, NOON, now, **late) == Advance(Fire(timedelta(0)), now + 30 * SECOND)
    assert told.asked == [NOON - HOUR, NOON - HOUR]


def test_a_schedule_of_ones_own_that_never_ran_is_asked_from_when_it_was_due():
    told = Told((True, 3600))
    assert advance(told, NOON, NOON + SECOND).next_run_at == NOON + SECOND + ASK_WITHIN
    assert told.asked == [NOON]


@settings(deadline=None)
@given(
    late=st.timedeltas(timedelta(0), 40 * DAY),
    policy=st.sampled_from(["coalesce", "skip"]),
    grace=st.none() | st.floats(0, 1e7),
    made=st.sampled_from([hourly, daily, lambda: every(7), lambda: every(100_000)]),
)
def test_an_entry_always_moves_to_the_first_occurrence_after_now(late, policy, grace, made):
    now = NOON + late
    found = advance(made(), NOON, now, policy=policy, grace=grace)
    assert found.next_run_at == next_run(made(), now, anchor=NOON)
    assert found.next_run_at > now
