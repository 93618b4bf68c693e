"""An interrupt hits the body of its run, and nothing else: no transaction, no tracer, no other task."""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_durable.errors import LeaseInterrupt
from celery_durable.records import Outcome, OutcomeKind
from celery_durable.shield import Shield
from celery_durable.worker import interrupt
from celery_durable.worker.interrupt import (
    INTERRUPT_SIGNAL,
    Interrupter,
    SignalDelivery,
    deliver_to_thread,
)

TRIALS = 3000


class Run:
    """What an interrupter sees of a run; made in the thread that runs it."""

    def __init__(self, grace: float = 0.05) -> None:
        self.shield = Shield()
        self.task = SimpleNamespace(name="proj.task")
        self.lease = SimpleNamespace(task_id="1234", token=3)
        self.limits = SimpleNamespace(revoke_grace=grace)
        self.over = threading.Event()
        self.greenlet = None
        self.stopped = 0

    def tell_stopped(self) -> None:
        self.stopped += 1


class Task:
    """A task between two others, with a transaction in its body; each part takes a random while."""

    def __init__(self) -> None:
        self.run = Run()
        self.began = self.committed = 0
        self.ended = False

    def body(self) -> str:
        busy()
        with self.run.shield.closed():
            self.began += 1
            busy()
            self.committed += 1
        busy()
        return "value"

    def work(self) -> str:
        """What a tracer does with a task. Returns how it ended."""
        busy()
        try:
            outcome = self.run.shield.run(self.body)
        except LeaseInterrupt:
            outcome = "interrupted"
        self.ended = True
        busy()
        return outcome


def busy() -> None:
    """Be busy for a random while: up to some tens of microseconds, as long as threads need to take turns."""
    for _ in range(random.randrange(1000)):
        pass


class Shooter:
    """A thread, or whoever calls ``shoot``, that interrupts each task once at a random instant."""

    def __init__(self, deliver: Callable[[Any], bool]) -> None:
        self._deliver = deliver
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.aim = self._tasks.put

    def shoot(self) -> None:
        while (task := self._tasks.get()) is not None:
            busy()
            self._deliver(task.run)


def run_trials(shooter: Shooter) -> dict[str, int]:
    """Work through the tasks while the shooter shoots at them. How many ended in which way.

    Many of each: on a busy machine, the shots come early or late for a while.
    """
    outcomes = {"value": 0, "interrupted": 0}
    try:
        while min(outcomes.values()) < TRIALS / 50 or sum(outcomes.values()) < TRIALS:
            task = Task()
            shooter.aim(task)
            outcome = task.work()
            # The next task of the process has no part in it.
            assert Task().work() == "value"
            assert task.ended
            assert task.began == task.committed, "a transaction was cut"
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    finally:
        shooter.aim(None)
    return outcomes


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after microseconds: they meet everywhere."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def signals() -> Iterator[SignalDelivery]:
    """The delivery of prefork and solo, in this process."""
    before = signal.getsignal(INTERRUPT_SIGNAL)
    delivery = SignalDelivery()
    delivery.install()
    yield delivery
    signal.signal(INTERRUPT_SIGNAL, before)


class TestRandomInstants:
    def test_a_signal_around_the_end_of_a_task_hits_its_body_only(
        self, signals: SignalDelivery, quick_switches: None
    ) -> None:
        shooter = Shooter(signals)
        thread = threading.Thread(target=shooter.shoot)
        thread.start()
        outcomes = run_trials(shooter)
        thread.join()
        assert outcomes.keys() == {"value", "interrupted"}

    def test_an_asynchronous_exception_around_the_end_of_a_task_hits_its_body_only(
        self, quick_switches: None
    ) -> None:
        shooter = Shooter(deliver_to_thread)
        found: list[dict[str, int]] = []
        thread = threading.Thread(target=lambda: found.append(run_trials(shooter)))
        thread.start()
        shooter.shoot()
        thread.join()
        (outcomes,) = found
        assert outcomes.keys() == {"value", "interrupted"}


class Checkpoints:
    """Stands still at the n-th place where Python looks for signals and asynchronous exceptions.

    These are the start of a Python function and the return from a C function (jumps back apart), which are
    the very events that a profiler sees; what it raises is raised there.
    """

    def __init__(self, task: Task, number: int) -> None:
        self.task = task
        self.left = number
        self.sent: type[BaseException] | None = None

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_return"):
            return
        self.left -= 1
        self.stop_here()

    def stop_here(self) -> None:
        """A signal handler runs."""
        if self.left == 0 and self.task.run.shield.request(LeaseInterrupt):
            raise LeaseInterrupt

    @property
    def was_reached(self) -> bool:
        return self.left <= 0


class OtherThread(Checkpoints):
    """Another thread interrupts there; what it has sent is raised at the next such place."""

    def stop_here(self) -> None:
        if self.sent is not None:
            error, self.sent = self.sent, None
            raise error
        # The other thread would have to wait for the lock.
        if self.left <= 0 and not self.task.run.shield._lock._is_owned():  # type: ignore[attr-defined]
            self.left = -TRIALS * 1000
            self.task.run.shield.request_from_outside(LeaseInterrupt, self._raise_soon)

    def _raise_soon(self, error: type[BaseException] | None) -> None:
        self.sent = error


class TestEveryInstant:
    @pytest.mark.parametrize("kind", [Checkpoints, OtherThread])
    def test_an_interrupt_at_any_place_of_a_task_hits_its_body_only(
        self, kind: type[Checkpoints], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules[__name__], "busy", lambda: len(()))
        outcomes = []
        for number in range(1, 1000):
            task = Task()
            place = kind(task, number)
            with place:
                outcome = task.work()
            assert place.sent is None, "it would hit whatever comes next"
            assert task.began == task.committed, f"place {number} is in a transaction"
            assert task.run.shield._depth == 0
            assert not task.run.shield.in_body
            if not place.was_reached:
                break
            outcomes.append(outcome)
        assert set(outcomes) == {"value", "interrupted"}
        assert len(outcomes) > 20


class Deliveries:
    """A delivery that reaches the body so many times; each of them is noted."""

    def __init__(self, run: Run, *, ends_run_at: int = 0, fails_at: int = 0) -> None:
        self.run = run
        self.count = 0
        self._ends_run_at = ends_run_at
        self._fails_at = fails_at

    def __call__(self, run: Any) -> bool:
        assert run is self.run
        self.count += 1
        if self.count == self._ends_run_at:
            run.over.set()
        return self.count != self._fails_at


class TestInterrupter:
    @pytest.fixture(autouse=True)
    def short_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interrupt, "AGAIN", 0.01)
        monkeypatch.setattr(interrupt, "REPORT_EVERY", 0.01)

    @pytest.fixture
    def killed(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        killed: list[tuple[int, int]] = []
        monkeypatch.setattr(interrupt.os, "kill", lambda *call: killed.append(call))
        return killed

    def test_a_run_that_stops_is_asked_once(self, killed: list[object]) -> None:
        run = Run()
        deliver = Deliveries(run, ends_run_at=1)
        Interrupter(deliver, can_kill=True)(run, None)
        assert (deliver.count, killed) == (1, [])

    def test_a_run_that_goes_on_is_asked_again(self, killed: list[object]) -> None:
        run = Run(grace=5)
        deliver = Deliveries(run, ends_run_at=3)
        Interrupter(deliver, can_kill=True)(run, None)
        assert (deliver.count, killed) == (3, [])

    def test_a_run_whose_body_is_over_is_left_alone(self, killed: list[object]) -> None:
        run = Run(grace=5)
        deliver = Deliveries(run, fails_at=2)
        Interrupter(deliver, can_kill=True)(run, None)
        assert (deliver.count, killed, run.stopped) == (2, [], 0)

    @pytest.mark.parametrize("can_kill", [True, False])
    def test_a_run_that_has_not_come_to_its_body_is_stopped_there(
        self, killed: list[object], caplog: pytest.LogCaptureFixture, can_kill: bool
    ) -> None:
        """Signal receivers and hooks come first; a terminate that meets them is not to be forgotten."""
        run = Run()
        Interrupter(deliver_to_thread, can_kill=can_kill)(run, None)
        with pytest.raises(LeaseInterrupt):
            run.shield.run(lambda: pytest.fail("the body has begun"))
        assert (killed, run.stopped, caplog.text) == ([], 0, "")

    def test_after_the_grace_the_process_kills_itself_and_says_so_before(self, killed: list[object]) -> None:
        run = Run(grace=0.03)
        deliver = Deliveries(run)
        run.shield.run(lambda: Interrupter(deliver, can_kill=True)(run, None))
        assert killed == [(os.getpid(), signal.SIGKILL)]
        assert run.stopped == 1
        assert 2 <= deliver.count <= 4

    def test_with_no_grace_it_is_asked_all_the_same(self, killed: list[object]) -> None:
        run = Run(grace=0)
        deliver = Deliveries(run)
        run.shield.run(lambda: Interrupter(deliver, can_kill=True)(run, None))
        assert (deliver.count, len(killed)) == (1, 1)

    def test_nothing_is_killed_once_the_body_is_over(self, killed: list[object]) -> None:
        run = Run(grace=0)
        Interrupter(Deliveries(run), can_kill=True)(run, None)
        assert (killed, run.stopped) == ([], 0)

    def test_where_nothing_can_be_killed_it_is_reported_until_it_is_over(
        self, killed: list[object], caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Run(grace=0)
        Interrupter(Deliveries(run, ends_run_at=4), can_kill=False)(run, None)
        assert caplog.text.count("proj.task[1234] is a runaway") == 3
        assert killed == []

    def test_a_run_that_was_cancelled_ends_at_its_next_durable_call(self, killed: list[object]) -> None:
        run = Run(grace=0)
        deliver = Deliveries(run)
        Interrupter(deliver, can_kill=True)(run, Outcome(OutcomeKind.CANCELLED))
        assert (deliver.count, killed) == (0, [])
        assert run.shield.run(lambda: "value") == "value"

    def test_a_run_that_was_quarantined_by_an_operator_is_stopped(self, killed: list[object]) -> None:
        run = Run(grace=0)
        deliver = Deliveries(run, ends_run_at=1)
        Interrupter(deliver, can_kill=True)(run, Outcome(OutcomeKind.QUARANTINED))
        assert deliver.count == 1


class TestSignals:
    def test_a_signal_that_nobody_has_sent_on_purpose_does_nothing(self, signals: SignalDelivery) -> None:
        run = Run()

        def body() -> str:
            signal.raise_signal(INTERRUPT_SIGNAL)
            return "value"

        assert run.shield.run(body) == "value"

    def test_the_handler_is_set_again_in_a_forked_process(self, signals: SignalDelivery) -> None:
        signal.signal(INTERRUPT_SIGNAL, signal.SIG_DFL)
        signals.install()
        assert signal.getsignal(INTERRUPT_SIGNAL) == signal.SIG_DFL
        pid = os.fork()
        if pid == 0:
            signals.install()
            os._exit(0 if callable(signal.getsignal(INTERRUPT_SIGNAL)) else 1)
        assert os.waitpid(pid, 0)[1] == 0

    @pytest.mark.report("loss-stops-the-run")
    def test_a_blocked_call_ends(self, signals: SignalDelivery) -> None:
        run = Run()
        lock = threading.Lock()
        lock.acquire()

        def body() -> None:
            threading.Thread(target=signals, args=(run,)).start()
            lock.acquire(timeout=30)

        with pytest.raises(LeaseInterrupt):
            run.shield.run(body)


class TestThreads:
    def test_a_withdrawn_exception_leaves_nothing_behind_that_hangs_a_profiler(self) -> None:
        """CPython 3.11 loops for ever in the next call when an exception is withdrawn as its manual says."""
        run = Run()

        def body() -> str:
            with run.shield.closed():
                deliver_to_thread(run)
            return "value"

        with pytest.raises(LeaseInterrupt):
            run.shield.run(body)
        assert run.shield.run(lambda: deliver_and_leave(run)) in (True, None)
        seen = []
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        busy()
        sys.setprofile(None)
        assert "call" in seen


def deliver_and_leave(run: Run) -> bool | None:
    """Have an exception sent, which may or may not arrive before the body's end."""
    try:
        return deliver_to_thread(run)
    except LeaseInterrupt:
        return None
