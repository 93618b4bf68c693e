"""Ways out of a task that are neither a value nor an exception."""

from __future__ import annotations

import asyncio
import builtins
import sys

import pytest
from celery.exceptions import Reject

from celery_durable import DurableTask, sleep


def test_a_body_that_is_cancelled_by_asyncio_has_failed_and_does_not_run_again(durable_app, durable_clock):
    runs = []

    @durable_app.task(base=DurableTask)
    def fetches():
        runs.append(1)
        raise asyncio.CancelledError("by the loop")

    result = fetches.delay()
    durable_clock.propagate = False
    durable_clock.drain()
    durable_clock.advance(days=1)

    assert result.state == "FAILURE"
    assert "CancelledError('by the loop')" in str(result.result)
    assert durable_app.durable.get(result.id).status == "failed"
    assert len(runs) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is of Python 3.11")
def test_a_group_of_exceptions_is_an_exception(durable_app, durable_clock):
    group = builtins.ExceptionGroup("two", [ValueError("one"), KeyError("other")])
    failures = []

    class Heard(DurableTask):
        def on_failure(self, exc, task_id, args, kwargs, einfo):
            failures.append(exc)

    @durable_app.task(base=Heard)
    def gathers():
        raise group

    result = gathers.delay()
    durable_clock.propagate = False
    durable_clock.drain()

    assert result.state == "FAILURE"
    assert failures == [group]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is of Python 3.11")
def test_a_sleep_in_a_task_group_is_a_sleep(durable_app, durable_clock):
    async def waits():
        sleep(days=3)
        return 7

    async def asks():
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(waits())
        return answer.result()

    @durable_app.task(base=DurableTask)
    def gathers():
        return asyncio.run(asks())

    result = gathers.delay()
    durable_clock.drain()
    assert result.state == "SLEEPING"
    durable_clock.advance(days=3)

    assert result.get() == 7


def test_a_hook_that_puts_its_task_back_sees_it_again(durable_app, durable_clock):
    starts = []

    class Guarded(DurableTask):
        def before_start(self, task_id, args, kwargs):
            starts.append(task_id)
            if len(starts) < 3:
                raise Reject("in maintenance", requeue=True)

    @durable_app.task(base=Guarded)
    def serves():
        return 7

    result = serves.delay()
    durable_clock.drain()
    durable_clock.advance(minutes=1)

    assert result.get() == 7
    assert starts == [result.id] * 3
