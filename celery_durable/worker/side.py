"""The durable side of one worker: how claims are reported, per pool, and what its main process does."""

from __future__ import annotations

import logging
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from billiard import get_start_method
from celery.worker.request import Request

from celery_durable.claiming import Claiming, Reporter
from celery_durable.errors import ConfigurationError
from celery_durable.logs import about
from celery_durable.records import LeaseKey
from celery_durable.worker.book import Book
from celery_durable.worker.interrupt import (
    Interrupter,
    SignalDelivery,
    deliver_to_greenlet,
    deliver_to_nobody,
    deliver_to_thread,
)
from celery_durable.worker.limits import guard_soft_limit, missed_limit_again
from celery_durable.worker.pipe import ClaimsPipe, PipeReporter
from celery_durable.worker.steps import PipeThread
from celery_durable.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from celery_durable.run import TaskRun
    from celery_durable.worker.request import DurableRequest

logger = logging.getLogger(__name__)

#: Seconds between two looks for pool children that have died.
CHILD_ROUND = 0.5
#: Seconds that a pool without an event loop waits for a result of a child that has died. billiard waits 10,
#: but what the child has sent before it died lies in a pipe that a thread reads all the time.
LOST_PATIENCE = 1.0

PREFORK, SOLO, THREADS, GEVENT, EVENTLET = "prefork", "solo", "threads", "gevent", "eventlet"

_POOLS = {
    "celery.concurrency.prefork": PREFORK,
    "celery.concurrency.solo": SOLO,
    "celery.concurrency.thread": THREADS,
    "celery.concurrency.gevent": GEVENT,
    "celery.concurrency.eventlet": EVENTLET,
}


class WorkerSide:
    """Made by the worker's bootstep, before the pool forks; a forked child has its copy."""

    def __init__(self, durable: Any, worker: Any) -> None:
        self.durable = durable
        self.node: str = worker.hostname
        #: Whether the worker sends events to monitors (``-E``, ``worker_send_task_events``).
        self.sends_events = bool(worker.task_events)
        self.pool = _POOLS.get(worker.pool_cls.__module__, THREADS)
        if self.pool == PREFORK and get_start_method() != "fork":
            raise ConfigurationError(
                "durable tasks need pool processes that are forked: choose another pool"
                " (--pool=threads or solo), or billiard.set_start_method('fork')"
            )
        self.book = Book()
        self.pipe = ClaimsPipe(self.node) if self.pool == PREFORK else None
        self._signals = SignalDelivery()
        #: Held while a message is answered. A signal handler of the main thread may come meanwhile.
        self.answering = threading.RLock()
        self.interrupter = self._new_interrupter()
        self.upkeep = Upkeep(self)
        self._thread: PipeThread | None = None
        self._look: Any = None
        self._consumer: Any = None
        # The thread of the event loop.
        self._loop: threading.Thread | None = None
        # The runs of this process by delivery number, where its tasks run in the main process.
        self._runs: WeakValueDictionary[int, TaskRun] = WeakValueDictionary()

    def _new_interrupter(self) -> Interrupter:
        if self.pool in (PREFORK, SOLO):
            return Interrupter(self._signals, can_kill=self.pool == PREFORK)
        deliver = {THREADS: deliver_to_thread, GEVENT: deliver_to_greenlet}
        return Interrupter(deliver.get(self.pool, deliver_to_nobody), can_kill=False)

    @property
    def has_child_processes(self) -> bool:
        """Whether tasks run in processes that may die alone."""
        return self.pool == PREFORK

    def claiming(self) -> Claiming:
        """How the processes of this worker claim."""
        reporter: Reporter = DirectReporter(self.book)
        if self.pipe is not None:
            reporter = PipeReporter(self.pipe, self._identity)
        return Claiming(lambda: self.durable.runtime, reporter)

    def _identity(self) -> tuple[int, Any]:
        runtime = self.durable.runtime
        return runtime.pid, runtime.instance

    # -- around a run ------------------------------------------------------------------------------

    def enter_process(self) -> None:
        """Prepare the process that runs tasks; called before each claim, in the task's thread."""
        if self.pool in (PREFORK, SOLO):
            self._signals.install()
        if self.pool == PREFORK:
            guard_soft_limit()

    def watch(self, run: TaskRun, number: int) -> None:
        """Have the run stopped when its lease is lost."""
        run.interrupt = self.interrupter
        run.report_loss = lambda: self.durable.claims.lose(number)
        if self.pool == GEVENT:
            import gevent  # noqa: PLC0415 - only where the worker runs on it

            run.greenlet = gevent.getcurrent()
        if self.pool == PREFORK:
            run.around_body = missed_limit_again
        else:
            self._runs[number] = run

    def interrupt_delivery(self, number: int) -> bool:
        """Interrupt a run of this process. False: it runs in a process of its own, or not any more."""
        run = self._runs.get(number)
        if run is None:
            return self.pool != PREFORK
        name = f"durable-interrupt-{run.lease.task_id}"
        threading.Thread(target=self.interrupter, args=(run, None), name=name, daemon=True).start()
        return True

    # -- claims ------------------------------------------------------------------------------------

    @property
    def prefetch(self) -> int:
        """How many messages the broker gives the worker before it wants one acknowledged."""
        count = 0 if self._consumer is None else self._consumer.initial_prefetch_count
        # Celery's 0 means: no limit.
        return count or sys.maxsize

    def adopted(self) -> list[str]:
        """The tasks whose row says that the wake is on its way, while it waits for its turn here."""
        return [request.id for request in self.book.open_requests() if request.waits_as_row]

    def make_due(self, task_ids: list[str], delay: float = 0.0) -> None:
        """Have these woken in ``delay`` seconds: Celery has dropped what waited for its turn.

        The broker has kept what was not acknowledged. What was adopted is brought back by nobody before its
        wake is taken for lost.
        """
        for task_id in task_ids:
            self.upkeep.soon(partial(self.durable.store.leases.make_due, task_id, delay))

    def read_claims(self, consumer: Any) -> None:
        """Have the pipe read; called again after each reconnect to the broker."""
        self._consumer, self._loop = consumer, threading.current_thread()
        if self.pipe is None:
            return
        if consumer.hub is not None:
            consumer.hub.add_reader(self.pipe.reader, self.drain)
            self._look_after_children(consumer)
        elif self._thread is None:
            consumer.pool._pool.lost_worker_timeout = LOST_PATIENCE
            self._thread = PipeThread(self.pipe, self.drain)
            self._thread.start()

    def _look_after_children(self, consumer: Any) -> None:
        """Notice a dead child soon.

        Celery looks when the child's end of a pipe closes, which is a moment before the kernel lets it be
        reaped: a look that comes too early finds it alive, and the next one comes 5 s later (seen in 5.7).
        """
        if self._look is not None:
            self._look.cancel()
        self._look = consumer.hub.call_repeatedly(CHILD_ROUND, consumer.pool.maintain_pool)

    def drain(self) -> None:
        """Hear every claim that has been reported up to now."""
        if self.pipe is not None:
            self.pipe.drain(self.book)

    def acknowledge(self, request: DurableRequest) -> None:
        """Acknowledge the broker's message of a claimed delivery, once.

        The thread of a task, that of the upkeep and the event loop may all come here, and a message that is
        acknowledged twice is the end of Celery's worker.
        """
        with self.answering:
            if request.acknowledged:
                return
            if self.pool == SOLO and threading.current_thread() is self._loop:
                # Celery would queue it for the event loop, which is busy with the task.
                request.message.ack_log_error(logger, request.connection_errors)
                request.acknowledged = True
            else:
                Request.acknowledge(request)

    # -- the worker's life -------------------------------------------------------------------------

    def start(self) -> None:
        """The pool is up."""
        self.upkeep.start()

    @property
    def is_stopping(self) -> bool:
        """Whether the worker was told to stop: if its processes die from now on, that is no crash."""
        return self.book.is_stopping

    def shutting_down(self) -> None:
        """The worker is told to stop, in whatever way. Safe in a signal handler."""
        self.book.is_stopping = True
        if self.pipe is not None:
            self.pipe.announce_stop()
        self.upkeep.announce_stop()

    def stop(self) -> None:
        """The worker stops warmly: renewal goes on for as long as the tasks do."""
        self.shutting_down()

    def abandon(self, pool: Any) -> None:
        """The worker stops and will not wait: hand all leases back and stop what runs under them.

        Celery's own cold shutdown passes over tasks whose message is acknowledged, and then waits for them.
        """
        self.shutting_down()
        self.drain()
        running = [request for request in self.book.open_requests() if request.holds_lease]
        # A greenlet's signal handler may run in the hub, which must not wait.
        self.upkeep.hand_back(wait=self.pool not in (GEVENT, EVENTLET))
        for request in running:
            try:
                request.cancel(pool)
            except Exception:
                logger.exception(
                    "%s[%s] could not be stopped",
                    request.name,
                    request.id,
                    extra=about(request.name, request.id),
                )

    def close(self) -> None:
        """The worker has stopped, its pool is empty."""
        self.upkeep.close()
        if self._thread is not None:
            self._thread.stop()

    def terminate(self) -> None:
        """The worker stops at once: what leases are left are handed back, and no crash is counted."""
        self.shutting_down()
        self.drain()
        self.upkeep.hand_back(wait=True)


class DirectReporter:
    """Reports claims within the process: solo, threads, greenlets."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def report(self, number: int, verdict: int, key: LeaseKey | None) -> None:
        owner, token = ("", 0) if key is None else (key.owner, key.token)
        self._book.report(number, verdict, owner, token)

    @property
    def is_stopping(self) -> bool:
        return self._book.is_stopping
