"""What is said of a sleep: the warning that it outlives what a group has in the result store."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from celery_durable.announcer import Announcer
from celery_durable.lease import Lease
from celery_durable.records import LeaseKey

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Nap:
    """A task, as far as it is asked here."""

    name = "proj.nap"

    def __init__(self, app):
        self.app = app


def warnings_of_a_sleep(caplog, result_expires, **request):
    """What is logged as a warning when a task sleeps for an hour."""
    app = SimpleNamespace(
        conf=SimpleNamespace(result_expires=result_expires), durable=SimpleNamespace(worker=None)
    )
    announcer = Announcer(Nap(app), Lease(LeaseKey("id", "celery@host:1:abc", 1), 60.0, 10.0), None)
    announcer.request = SimpleNamespace(**{"chord": None, "group": None, **request})
    caplog.set_level(logging.INFO)
    announcer.parked(NOW + timedelta(hours=1), "", NOW)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.report("results-expire")
@pytest.mark.parametrize("member_of", [{"group": "g"}, {"chord": {"task": "body"}}])
@pytest.mark.parametrize("result_expires", [10, 3599.0, timedelta(minutes=59)])
def test_a_member_that_sleeps_longer_than_results_are_kept_is_warned_of(caplog, result_expires, member_of):
    (warning,) = warnings_of_a_sleep(caplog, result_expires, **member_of)
    assert "sleeps longer than result_expires" in warning


@pytest.mark.parametrize("result_expires", [0, None, timedelta(0), 3600, timedelta(hours=2)])
def test_where_results_are_kept_for_longer_or_for_ever_nobody_is_warned(caplog, result_expires):
    assert not warnings_of_a_sleep(caplog, result_expires, group="g")


def test_a_task_alone_has_nothing_to_lose(caplog):
    assert not warnings_of_a_sleep(caplog, 10)
