"""The durable side of a worker that is no process: it runs tasks in the thread of the test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery.concurrency.solo import TaskPool

from celery_durable.claiming import Claiming
from celery_durable.heartbeat import Heartbeat, Heartbeats
from celery_durable.records import Claim, Delivery, Refusal, Scheduled
from celery_durable.settings import TaskSettings
from celery_durable.worker.side import DirectReporter, WorkerSide
from celery_durable.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from celery_durable.run import TaskRun

HOSTNAME = "worker@durable-tests"


class InProcessSide(WorkerSide):
    """Neither signals nor threads: what a worker does beside its tasks is done at once."""

    def __init__(self, durable: Any) -> None:
        super().__init__(durable, SimpleNamespace(hostname=HOSTNAME, task_events=False, pool_cls=TaskPool))
        self.upkeep = PromptUpkeep(self)
        #: What went wrong in a claim, and would never in production with a database that works.
        self.problems: list[Exception] = []

    @property
    def has_child_processes(self) -> bool:
        # What ends the process of a task is handed on to the test (an interrupt by the keyboard, say).
        return True

    def claiming(self) -> Claiming:
        return PromptClaiming(self)

    def enter_process(self) -> None:
        """There is no process to prepare."""

    def watch(self, run: TaskRun, number: int) -> None:
        run.report_loss = lambda: self.durable.claims.lose(number)

    def interrupt_delivery(self, number: int) -> bool:
        return True


class PromptUpkeep(Upkeep):
    """Writes at once what a worker would write soon."""

    def soon(self, job: Callable[[], object]) -> None:
        job()


class PromptClaiming(Claiming):
    """Claims once. A worker would hold the message of a claim that fails, and try again for ever."""

    def __init__(self, side: InProcessSide) -> None:
        super().__init__(lambda: side.durable.runtime, DirectReporter(side.book))
        self._side = side

    def claim(self, delivery: Delivery, limits: TaskSettings) -> Claim | Refusal | Scheduled | None:
        try:
            return self._claim(delivery, limits)
        except Exception as error:
            self._side.problems.append(error)
            raise


class StillHeartbeats(Heartbeats):
    """Renews when time is moved, and not by threads of its own."""

    def add(self, beat: Heartbeat) -> None:
        with self._lock:
            self._beats[beat.lease.key] = beat
