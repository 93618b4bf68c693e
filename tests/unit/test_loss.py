"""A run that has lost its lease is stopped at once, and told of beside that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from celery_durable import announcer as announcers
from celery_durable.announcer import Announcer
from celery_durable.errors import LeaseInterrupt
from celery_durable.lease import Lease
from celery_durable.records import LeaseKey
from celery_durable.run import TaskRun
from celery_durable.shield import Shield
from celery_durable.signals import lease_lost


class Task:
    """A task, as far as it is asked here."""

    name = "proj.task"


class Run(TaskRun):
    """A run whose body is on, without a store."""

    def __init__(self) -> None:
        self.task = Task()
        self.lease = Lease(LeaseKey("id", "celery@host:1:abc", 1), 60.0, 10.0)
        self.announcer = Announcer(self.task, self.lease, None)  # type: ignore[arg-type]
        self.execution = SimpleNamespace(shield=Shield())  # type: ignore[assignment]
        self.interrupt = lambda run, outcome: None
        self.around_body = nullcontext
        self.reported = False
        self.report_loss = lambda: setattr(self, "reported", True)
        #: What was told, in its order.
        self.told: list[str] = []
        self.announcer.stopped = lambda: self.told.append("task_revoked")  # type: ignore[method-assign]


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def receiver(run: Run) -> Iterator[Any]:
    """A receiver of the signal that hangs until it is let go on."""
    go_on, entered = threading.Event(), threading.Event()

    def receive(**_: Any) -> None:
        entered.set()
        go_on.wait(2)
        run.told.append("lease_lost")

    lease_lost.connect(receive)
    yield SimpleNamespace(go_on=go_on, entered=entered)
    go_on.set()
    lease_lost.disconnect(receive)


@pytest.mark.report("loss-stops-the-run")
def test_a_receiver_that_hangs_does_not_hold_up_the_interrupt(run: Run, receiver: Any) -> None:
    run.interrupt = lambda run, outcome: run.told.append("interrupt")

    run._on_lost(run.lease, None)

    assert receiver.entered.wait(10)
    assert run.told == ["interrupt"]


def test_a_body_that_was_interrupted_leaves_the_signal_the_first_word(run: Run, receiver: Any) -> None:
    """Celery sends `task_postrun` as soon as the body is left."""

    def body() -> None:
        run._on_lost(run.lease, None)
        assert receiver.entered.wait(10)
        receiver.go_on.set()
        raise LeaseInterrupt

    with pytest.raises(LeaseInterrupt):
        run._run_body(body)

    assert run.told == ["lease_lost"]


def test_the_revoke_is_told_after_the_loss(run: Run, receiver: Any) -> None:
    run.interrupt = lambda run, outcome: receiver.go_on.set()
    run._on_lost(run.lease, None)

    run.tell_stopped()

    assert run.told == ["lease_lost", "task_revoked"]


def test_a_receiver_that_hangs_holds_up_neither_the_report_nor_the_revoke_for_long(
    run: Run, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcers, "FIRST_WORD_TIME", 0.001)
    run._on_lost(run.lease, None)

    run.tell_stopped()

    assert run.reported
    assert run.told == ["task_revoked"]


def test_where_no_thread_can_be_had_the_run_tells_it_itself(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told = []
    run.interrupt = lambda run, outcome: told.append("interrupt")
    receive = lambda **_: told.append("lease_lost")  # noqa: E731 - the signal holds it weakly
    lease_lost.connect(receive)
    monkeypatch.setattr(threading.Thread, "start", refuse)

    run._on_lost(run.lease, None)
    run.tell_stopped()

    assert told == ["interrupt", "lease_lost"]
