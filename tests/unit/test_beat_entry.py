"""A beat entry: Celery's own, with a policy for missed runs that Celery never sees."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab

from celery_durable.errors import ConfigurationError
from celery_durable.scheduler.entry import DurableEntry

app = Celery("tests", broker="memory://", set_as_current=False)


def entry(**fields: Any) -> DurableEntry:
    return DurableEntry(**{"name": "report", "task": "proj.report", "schedule": 30, "app": app, **fields})


def test_without_a_policy_missed_runs_are_made_up_for_by_one() -> None:
    assert (entry().misfire, entry().misfire_grace) == ("coalesce", None)


def test_the_policy_is_no_option_of_the_message() -> None:
    skipping = entry(misfire="skip", misfire_grace=timedelta(minutes=2), options={"queue": "slow"})
    assert (skipping.misfire, skipping.misfire_grace) == ("skip", 120.0)
    assert skipping.options == {"queue": "slow"}


def test_it_may_come_with_the_options_as_add_periodic_task_puts_it_there() -> None:
    options = {"queue": "slow", "misfire": "skip", "misfire_grace": 5}
    skipping = entry(options=options)
    assert (skipping.misfire, skipping.misfire_grace) == ("skip", 5.0)
    assert skipping.options == {"queue": "slow"}
    assert "misfire" in options, "the configuration is somebody else's"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"misfire": "never"}, "misfire must be one of coalesce, skip, not 'never'"),
        ({"misfire_grace": -1}, "misfire_grace must be from 0 to"),
        ({"misfire_grace": "1 minute"}, "misfire_grace must be seconds or a timedelta"),
    ],
)
def test_a_wrong_policy_is_refused_and_names_the_entry(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"beat_schedule entry 'report': {said}"):
        entry(**wrong)


def test_the_next_one_has_the_same_policy() -> None:
    following = next(entry(misfire="skip", misfire_grace=7))
    assert (following.misfire, following.misfire_grace) == ("skip", 7.0)
    assert following.total_run_count == 1
    assert type(following) is DurableEntry


def test_an_update_takes_the_policy_and_leaves_what_has_run() -> None:
    old = entry(total_run_count=5)
    old.update(entry(schedule=60, misfire="skip"))
    assert (old.misfire, old.total_run_count) == ("skip", 5)
    assert old.schedule.run_every == timedelta(seconds=60)
    old.update(ScheduleEntry(name="report", task="proj.other", schedule=60, app=app))
    assert (old.task, old.misfire) == ("proj.other", "skip")


def test_it_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(entry(schedule=crontab(minute="5"), misfire="skip", args=(1,))))
    assert (copy.name, copy.misfire, copy.args) == ("report", "skip", (1,))
    assert copy == entry(schedule=crontab(minute="5"), args=(1,))


def test_positional_fields_are_celerys() -> None:
    assert DurableEntry("report", "proj.report", schedule=30, app=app) == entry()
