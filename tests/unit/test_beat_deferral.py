"""Signals wait for the end of a block, though not for ever."""

from __future__ import annotations

import os
import signal
import sys
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


def run(deferral: Deferral, *steps: Callable[[], object], patience: float = 60) -> None:
    """Take some steps in a block that is not to be disturbed."""
    with deferral.holding(patience):
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
    with Deferral().holding(60):
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


def test_a_block_that_hangs_is_left_after_its_time(handled: list[int]) -> None:
    began = time.monotonic()
    with pytest.raises(Ended):
        run(Deferral(), term, lambda: time.sleep(30), patience=0.05)
    assert time.monotonic() - began < 10
    assert handled == [signal.SIGTERM]


def test_it_is_not_left_by_an_exception_that_a_driver_has_plans_for(handled: list[int]) -> None:
    """psycopg answers SystemExit and KeyboardInterrupt with ten seconds of its own."""
    seen: list[BaseException] = []

    def hang() -> None:
        try:
            time.sleep(30)
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises(Ended):
        run(Deferral(), term, hang, patience=0.05)
    (error,) = seen
    assert not isinstance(error, (Exception, SystemExit, KeyboardInterrupt))


def test_without_patience_it_is_left_at_once(handled: list[int]) -> None:
    reached: list[str] = []
    with pytest.raises(Ended):
        run(Deferral(), term, lambda: reached.append("second"), patience=0)
    assert reached == []
    assert handled == [signal.SIGTERM]


def test_a_signal_that_a_finalizer_swallows_comes_after_the_block(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python prints what is raised in a finalizer, and goes on."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    reached: list[str] = []

    class Finalized:
        def __del__(self) -> None:
            term()

    with pytest.raises(Ended):
        run(Deferral(), Finalized, lambda: reached.append("the next step"), patience=0)
    assert reached == ["the next step"]
    assert handled == [signal.SIGTERM]


def test_a_handler_that_only_takes_note_ends_the_block_and_nothing_else() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        run(Deferral(), term, lambda: time.sleep(30), patience=0.05)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_another_thread_defers_nothing(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []
    thread = threading.Thread(
        target=run, args=(Deferral(), lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    )
    thread.start()
    thread.join()
    assert seen == [before]


class TestWithinAnother:
    def test_its_end_is_a_good_place_to_leave(self, handled: list[int]) -> None:
        deferral = Deferral()
        seen: list[object] = []
        with pytest.raises(Ended):
            run(
                deferral,
                lambda: run(deferral, term, lambda: seen.append(list(handled))),
                lambda: seen.append("more"),
            )
        assert seen == [[]]
        assert handled == [signal.SIGTERM]

    def test_it_has_a_patience_of_its_own(self, handled: list[int]) -> None:
        deferral = Deferral()
        reached: list[str] = []
        with pytest.raises(Ended):
            run(
                deferral,
                lambda: run(deferral, term, lambda: time.sleep(0.2), lambda: reached.append("noted")),
                patience=0.05,
            )
        assert reached == ["noted"]

    def test_one_that_is_pending_already_waits_for_it_too(self, handled: list[int]) -> None:
        deferral = Deferral()
        reached: list[str] = []
        with pytest.raises(Ended):
            run(
                deferral,
                term,
                lambda: run(deferral, lambda: time.sleep(0.3), lambda: reached.append("noted")),
                patience=0.1,
            )
        assert reached == ["noted"]
