"""What is said of a run, and to whom."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from celery import Celery, Task, signals
from celery.app.task import Context

from celery_durable.announcer import Announcer
from celery_durable.lease import Lease
from celery_durable.records import LeaseKey, Outcome, OutcomeKind

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


# -- who hears of the end ------------------------------------------------------------------------


def has_audience(message=None, annotations=None, **options):
    """Whether somebody hears when a task with these options succeeds."""
    app = Celery("proj", set_as_current=False)
    app.conf.task_annotations = annotations

    @app.task(name="proj.task", shared=False, lazy=False, **{"ignore_result": True, **options})
    def task():
        """Nothing."""

    announcer = Announcer(task, Lease(LeaseKey("id", "celery@host:1:abc", 1), 60.0, 10.0), None)
    announcer.request = Context(message or {})
    try:
        return announcer.has_audience
    finally:
        app.close()


class Telling(Task):
    def on_success(self, *args, **kwargs):
        """Tells somebody."""


class Closing(Task):
    def after_return(self, *args, **kwargs):
        """Tells somebody."""


def test_nobody_hears_of_a_task_whose_result_is_ignored():
    assert not has_audience()
    assert not has_audience({"ignore_result": True}, ignore_result=False)


@pytest.mark.parametrize(
    "options",
    [{"ignore_result": False}, {"base": Telling}, {"base": Closing}],
    ids=["a result store", "on_success", "after_return"],
)
def test_a_result_store_and_a_hook_of_the_task_do(options):
    assert has_audience(**options)


def test_so_does_a_hook_from_the_annotations():
    assert has_audience(annotations={"proj.task": {"on_success": lambda self, *args: None}})


@pytest.mark.parametrize(
    "message", [{"chord": {"task": "body"}}, {"ignore_result": False}], ids=["a chord", "the caller"]
)
def test_so_do_those_whom_the_message_names(message):
    assert has_audience(message)


def test_so_does_a_receiver_of_the_signal():
    def receive(**_):
        """Tells somebody."""

    signals.task_success.connect(receive)
    try:
        assert has_audience()
    finally:
        signals.task_success.disconnect(receive)
    assert not has_audience()


# -- a run that was refused ------------------------------------------------------------------------


def test_an_outcome_that_cannot_be_stored_again_is_a_line_in_the_log(caplog):
    class Away:
        def store_result(self, *_, **__):
            raise ConnectionError("no store")

    outcome = Outcome(OutcomeKind.QUARANTINED, "died too often")
    leases = SimpleNamespace(lost_to=lambda key: outcome)
    runtime = SimpleNamespace(store=SimpleNamespace(leases=leases), outcome_codec=None)
    task = SimpleNamespace(name="proj.nap", backend=Away(), ignore_result=False)
    announcer = Announcer(task, Lease(LeaseKey("id", "celery@host:1:abc", 1), 60.0, 10.0), runtime)

    announcer.refused()

    assert announcer.taker == outcome
    assert "could not be stored again: no store" in caplog.text
