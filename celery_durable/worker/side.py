"""The durable side of one worker: how claims are reported, per pool, and what its main process does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.worker.request import Request

from celery_durable.claiming import Claiming, Reporter
from celery_durable.records import LeaseKey
from celery_durable.worker.book import Book
from celery_durable.worker.pipe import ClaimsPipe, PipeReporter
from celery_durable.worker.steps import PipeThread

if TYPE_CHECKING:
    from celery_durable.worker.request import DurableRequest

logger = logging.getLogger(__name__)

PREFORK, SOLO, THREADS, GREENLETS = "prefork", "solo", "threads", "greenlets"

_POOLS = {
    "celery.concurrency.prefork": PREFORK,
    "celery.concurrency.solo": SOLO,
    "celery.concurrency.thread": THREADS,
    "celery.concurrency.gevent": GREENLETS,
    "celery.concurrency.eventlet": GREENLETS,
}


class WorkerSide:
    """Made by the worker's bootstep, before the pool forks."""

    def __init__(self, durable: Any, worker: Any) -> None:
        self.durable = durable
        self.worker = worker
        self.node: str = worker.hostname
        self.pool = _POOLS.get(worker.pool_cls.__module__, THREADS)
        self.book = Book()
        self.pipe = ClaimsPipe(self.node) if self.pool == PREFORK else None
        self._thread: PipeThread | None = None

    def claiming(self) -> Claiming:
        """How the processes of this worker claim."""
        reporter: Reporter = DirectReporter(self.book)
        if self.pipe is not None:
            reporter = PipeReporter(self.pipe, self._identity)
        return Claiming(lambda: self.durable.runtime, reporter)

    def _identity(self) -> tuple[int, Any]:
        runtime = self.durable.runtime
        return runtime.pid, runtime.instance

    # -- reading the pipe ------------------------------------------------------------------------

    def read_claims(self, consumer: Any) -> None:
        """Have the pipe read; called again after each reconnect to the broker."""
        if self.pipe is None:
            return
        if consumer.hub is not None:
            consumer.hub.add_reader(self.pipe.reader, self.drain)
        elif self._thread is None:
            self._thread = PipeThread(self.pipe, self.drain)
            self._thread.start()

    def drain(self) -> None:
        """Hear every claim that has been reported up to now."""
        if self.pipe is not None:
            self.pipe.drain(self.book)

    def on_lease_taken(self, request: DurableRequest) -> None:
        """A process of this worker holds a lease from now on."""

    def acknowledge(self, request: DurableRequest) -> None:
        """Acknowledge the broker's message of a claimed delivery."""
        if request.acknowledged:
            return
        if self.pool == SOLO:
            # Celery would queue it for the event loop, which is busy with the task.
            request.message.ack_log_error(logger, request.connection_errors)
            request.acknowledged = True
        else:
            Request.acknowledge(request)

    # -- the worker's life -----------------------------------------------------------------------

    def start(self) -> None:
        """The pool is up."""

    def stop(self) -> None:
        """The worker stops: what waits for the database gives its message back."""
        self.book.is_stopping = True
        if self.pipe is not None:
            self.pipe.announce_stop()
        if self._thread is not None:
            self._thread.stop()


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
