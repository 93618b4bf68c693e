"""A worker lives for months: what a run leaves behind is gone with it, without the collector."""

from __future__ import annotations

import gc

import pytest

from celery_durable import DurableTask, sleep
from celery_durable.run import TaskRun


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def runs_in_memory():
    return [thing for thing in gc.get_objects() if type(thing) is TaskRun]


@pytest.mark.usefixtures("no_collector")
def test_neither_a_park_nor_an_end_leaves_a_run_behind(durable_app, durable_clock):
    @durable_app.task(base=DurableTask)
    def naps():
        sleep(days=3)
        return 7

    result = naps.delay()
    assert durable_clock.drain() == 1
    assert runs_in_memory() == []
    durable_clock.advance(days=3)
    assert result.get() == 7
    assert runs_in_memory() == []
