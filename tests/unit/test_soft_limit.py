"""A soft time limit is the body's: never that of the claim before it, of its end, or of the next task."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from billiard.pool import SIG_SOFT_TIMEOUT

from celery_durable.run import claimed
from celery_durable.shield import Shield, at_work
from celery_durable.worker import limits


class Run:
    """What the guard sees of a run."""

    def __init__(self) -> None:
        self.shield = Shield()
        self.entered = False
        self.log_fields = dict

    def work(self, body: Any) -> str:
        """What a tracer does with it, and how that ended."""
        with claimed(self):  # type: ignore[arg-type]
            self.entered = True
            try:
                with limits.missed_limit_again():
                    return str(self.shield.run(body))
            except SoftTimeLimitExceeded:
                return "limited"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The limits that hit plain tasks; before each delivery the guard is set."""
    hit: list[int] = []
    before = signal.getsignal(SIG_SOFT_TIMEOUT)
    signal.signal(SIG_SOFT_TIMEOUT, lambda signum, frame: hit.append(signum))
    monkeypatch.setattr(limits, "_guard", None)
    limits.guard_soft_limit()
    yield hit
    signal.signal(SIG_SOFT_TIMEOUT, before)


def pass_the_limit() -> None:
    signal.raise_signal(SIG_SOFT_TIMEOUT)


def wait(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.001)
    return "done"


def test_it_is_raised_in_the_body() -> None:
    with at_work():
        assert Run().work(pass_the_limit) == "limited"


def test_it_is_raised_once_in_a_run() -> None:
    """billiard sends it once more when a worker stops, to a body that is cleaning up after it."""

    def cleans_up() -> str:
        try:
            pass_the_limit()
        except SoftTimeLimitExceeded:
            pass_the_limit()
        return "cleaned up"

    with at_work():
        assert Run().work(cleans_up) == "cleaned up"
        assert Run().work(pass_the_limit) == "limited"


def test_a_plain_task_gets_it_as_ever(plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "get_current_task", lambda: "a task")
    pass_the_limit()
    assert plain == [SIG_SOFT_TIMEOUT]


def test_between_two_tasks_it_is_nobodys(plain: list[int]) -> None:
    pass_the_limit()
    assert plain == []


def test_what_passed_before_the_body_passes_again_as_long_after_its_start(plain: list[int]) -> None:
    with at_work():
        wait(0.2)
        pass_the_limit()
        wait(0.3)
        began = time.monotonic()
        assert Run().work(lambda: wait(5)) == "limited"
        assert 0.2 <= time.monotonic() - began < 2
    assert plain == []


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_body_that_ends_before_has_it_no_more_and_neither_has_the_next_task(
    plain: list[int], seconds: float
) -> None:
    """With 0.05 s it passes at about the end of the body."""
    for _ in range(20):
        with at_work():
            wait(seconds)
            pass_the_limit()
            assert Run().work(lambda: wait(seconds)) in ("done", "limited")
        limits.guard_soft_limit()
        with at_work():
            assert Run().work(lambda: wait(seconds)) == "done"
    assert plain == []


def test_what_comes_after_the_body_is_dropped(plain: list[int]) -> None:
    with at_work():
        run = Run()
        with claimed(run):  # type: ignore[arg-type]
            run.entered = True
            assert run.shield.run(lambda: "value") == "value"
            pass_the_limit()
    limits.guard_soft_limit()
    with at_work():
        assert Run().work(lambda: wait(0.01)) == "done"
    assert plain == []


def test_it_is_guarded_once_in_each_process() -> None:
    guard = signal.getsignal(SIG_SOFT_TIMEOUT)
    limits.guard_soft_limit()
    assert signal.getsignal(SIG_SOFT_TIMEOUT) is guard
