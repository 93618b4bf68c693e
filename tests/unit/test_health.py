"""When a process could not reach the database, and which expired leases that excuses."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_durable.errors import StoreUnavailable
from celery_durable.runtime import Health

START = datetime(2030, 1, 1, tzinfo=timezone.utc)


class Database:
    """A database and its clock, which runs an hour ahead of nothing in particular."""

    def __init__(self):
        self.seconds = 1000.0
        self.is_there = True

    def monotonic(self):
        return self.seconds

    def now(self):
        return self.answer(START + timedelta(seconds=self.seconds))

    def answer(self, value=None):
        if not self.is_there:
            raise StoreUnavailable("it is away")
        return value


@pytest.fixture
def database():
    return Database()


@pytest.fixture
def health(database):
    return Health(database.now, database)


def at(seconds):
    return START + timedelta(seconds=seconds)


def fail(health, database):
    database.is_there = False
    with pytest.raises(StoreUnavailable):
        health.watch(database.answer)
    database.is_there = True


def test_an_answer_is_handed_on(health, database):
    assert health.watch(lambda: database.answer(7)) == 7
    assert not health.is_away


def test_a_failure_is_handed_on_and_remembered(health, database):
    fail(health, database)

    assert health.is_away
    assert health.outage is None


def test_an_outage_lasts_from_the_last_success_to_the_first_answer_after_it(health, database):
    health.watch(database.answer)
    database.seconds += 100
    fail(health, database)
    database.seconds += 30

    health.watch(database.answer)

    assert not health.is_away
    assert (health.outage.began, health.outage.ended) == (at(1000), at(1130))


def test_the_statement_that_ends_an_outage_knows_of_it_already(health, database):
    health.watch(database.answer)
    fail(health, database)
    database.seconds += 30

    assert health.watch(lambda: health.outage).ended == at(1030)


def test_a_database_that_goes_away_again_at_once_was_away_all_the_time(health, database):
    health.watch(database.answer)
    database.seconds += 10
    fail(health, database)
    database.seconds += 10
    with pytest.raises(StoreUnavailable):
        health.watch(_unavailable)  # the clock could be read, the statement could not be run
    database.seconds += 10

    health.watch(database.answer)

    assert (health.outage.began, health.outage.ended) == (at(1000), at(1030))


def _unavailable():
    raise StoreUnavailable("gone again")


def test_what_ran_out_before_this_process_first_reached_the_database_is_not_excused(health, database):
    fail(health, database)
    database.seconds += 30

    health.watch(database.answer)

    assert not health.is_away
    assert health.outage is None


def test_an_error_of_another_kind_says_nothing_about_the_database(health):
    with pytest.raises(ZeroDivisionError):
        health.watch(lambda: 1 // 0)

    assert not health.is_away
