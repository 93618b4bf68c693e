"""Signals wait for the end of a block, though not for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_durable.scheduler.deferral import Deferral


class Ended(BaseException):
    """What the handler raises, as Celery's raises SystemExit."""


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that reached the process's own handlers."""
    seen: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        seen.append(number)
        raise Ended

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    yield seen
    for number, handler in previous.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def term() -> None:
    send(signal.SIGTERM)


def run(deferral: Deferral, *steps: Callable[[], object]) -> None:
    """Take some steps in a block that is not to be disturbed."""
    with deferral.undisturbed():
        for step in steps:
            step()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_within_the_block_comes_after_it(handled: list[int], number: int) -> None:
    deferral = Deferral()
    seen: list[object] = []
    with pytest.raises(Ended):
        run(
            deferral,
            lambda: seen.append(deferral.is_pending()),
            lambda: send(number),
            lambda: seen.append(deferral.is_pending()),
            lambda: seen.append(list(handled)),
        )
    assert seen == [False, True, []]
    assert handled == [number]
    assert not deferral.is_pending()


def test_without_a_signal_nothing_has_changed_afterwards(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Deferral().undisturbed():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert handled == []


def test_an_error_in_the_block_does_not_lose_the_signal(handled: list[int]) -> None:
    def fail() -> None:
        raise ValueError("the database went away")

    with pytest.raises(Ended):
        run(Deferral(), term, fail)
    assert handled == [signal.SIGTERM]


def test_a_second_signal_waits_no_longer(handled: list[int]) -> None:
    reached: list[str] = []
    with pytest.raises(Ended):
        run(Deferral(), term, lambda: reached.append("first"), term, lambda: reached.append("second"))
    assert reached == ["first"]
    assert handled == [signal.SIGTERM]


def test_a_block_that_hangs_is_ended_after_the_longest_time(handled: list[int]) -> None:
    began = time.monotonic()
    with pytest.raises(Ended):
        run(Deferral(longest=0.05), term, lambda: time.sleep(30))
    assert time.monotonic() - began < 10
    assert handled == [signal.SIGTERM]


def test_another_thread_defers_nothing(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []
    thread = threading.Thread(
        target=run, args=(Deferral(), lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    )
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_block_within_a_block_is_one(handled: list[int]) -> None:
    deferral = Deferral()
    seen: list[list[int]] = []
    with pytest.raises(Ended):
        run(deferral, lambda: run(deferral, term), lambda: seen.append(list(handled)))
    assert seen == [[]]
    assert handled == [signal.SIGTERM]
