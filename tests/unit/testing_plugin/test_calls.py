"""Base classes with a ``__call__`` of their own: all of it is the body."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from celery import Task, chain

from celery_durable import DurableTask, NotDurable, sleep, step


@pytest.fixture
def did():
    """What tasks and their base classes have done, in order."""
    return []


@pytest.fixture
def bases(did):
    """Base classes by how their ``__call__`` goes on."""

    @contextmanager
    def context():
        did.append("push")
        yield
        did.append("pop")

    class Runs(DurableTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            with context():
                return self.run(*args, **kwargs)

    class Supers(DurableTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            with context():
                return super().__call__(*args, **kwargs)

    class Beside(Task):
        abstract = True

        def __call__(self, *args, **kwargs):
            with context():
                return self.run(*args, **kwargs)

    class Mixed(Beside, DurableTask):
        abstract = True

    class Inherits(Supers):
        abstract = True

    return {"runs": Runs, "supers": Supers, "mixed": Mixed, "inherits": Inherits}


KINDS = ["runs", "supers", "mixed", "inherits"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_sleeps_and_steps_under_it(durable_app, durable_clock, bases, did, kind):
    @durable_app.task(base=bases[kind], bind=True)
    def task(self, x):
        step(did.append, f"work of {self.request.id}")
        sleep(days=3)
        return x + 1

    result = task.delay(1)
    durable_clock.drain()
    assert result.state == "SLEEPING"
    durable_clock.advance(days=4)

    assert result.get() == 2
    assert durable_app.durable.get(result.id).status == "succeeded"
    assert did == ["push", f"work of {result.id}", "push", "pop"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_on_in_an_eager_run_too(durable_app, bases, did, kind):
    @durable_app.task(base=bases[kind])
    def task(x):
        sleep(days=3)
        return step(int, x)

    assert task.apply(("7",)).get() == 7
    assert did == ["push", "pop"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_within_a_body_is_a_plain_one(durable_app, durable_clock, bases, did, kind):
    @durable_app.task(base=bases[kind])
    def task(depth):
        if depth:
            return task(depth - 1)
        with pytest.raises(NotDurable):
            sleep(days=3)
        return "innermost"

    result = task.delay(1)
    durable_clock.drain()

    assert result.get() == "innermost"
    assert did == ["push", "push", "pop", "pop"]
    assert task(0) == "innermost"


def test_what_it_does_after_the_body_can_fail_the_task(durable_app, durable_clock, did):
    class Commits(DurableTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            super().__call__(*args, **kwargs)
            raise OSError("commit failed")

    @durable_app.task(base=Commits)
    def task():
        return 1

    @durable_app.task(base=DurableTask)
    def follow(value):
        did.append(value)

    result = chain(task.s(), follow.s()).delay()
    durable_clock.propagate = False
    durable_clock.drain()
    durable_clock.advance(minutes=1)

    assert result.parent.state == result.state == "FAILURE"
    assert durable_app.durable.get(result.parent.id).status == "failed"
    assert did == []


def test_it_cannot_swallow_a_sleep(durable_app, durable_clock):
    class Catches(DurableTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            try:
                return super().__call__(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - as people write it
                return repr(error)

    @durable_app.task(base=Catches)
    def task():
        sleep(days=3)
        return "awake"

    result = task.delay()
    durable_clock.drain()
    assert result.state == "SLEEPING"
    durable_clock.advance(days=4)
    assert result.get() == "awake"


def test_a_patch_that_goes_past_the_run_is_told_once_and_said(durable_app, durable_clock, did, caplog):
    @durable_app.task(base=DurableTask)
    def task():
        did.append("body")
        return 7

    type(task).__call__ = lambda self, *args, **kwargs: self.run(*args, **kwargs)
    result = task.delay()
    durable_clock.drain()
    durable_clock.advance(minutes=1)

    assert (result.get(), did) == (7, ["body"])
    assert durable_app.durable.get(result.id).status == "succeeded"
    assert "ran past its run" in caplog.text
