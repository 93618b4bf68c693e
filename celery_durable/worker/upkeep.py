"""What a worker's main process does in a thread, so that its event loop never waits for the database."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_durable.clock import monotonic
from celery_durable.errors import StoreUnavailable
from celery_durable.points import Point, reached

if TYPE_CHECKING:
    from celery_durable.records import LeaseKey
    from celery_durable.worker.side import WorkerSide

logger = logging.getLogger(__name__)

Job = Callable[[], object]

#: Seconds between two rounds; shorter while the worker is stopping.
ROUND = 2.0
STOPPING_ROUND = 0.5
#: Seconds that a message waits behind other tasks before it becomes a row. Well below the shortest
#: patience that brokers are given (RabbitMQ's ``consumer_timeout``, which it checks now and then only).
ADOPT_AFTER = 10.0
#: Seconds after which it becomes a row in any case: RabbitMQ ends a worker that keeps one for half an hour.
ADOPT_AT_LAST = 600.0
#: Seconds without a scheduler after which the worker warns, and between two looks.
SCHEDULER_PATIENCE = 60.0
#: Seconds for which a worker that is told to stop at once waits for the database.
LAST_WORDS = 5.0


class Upkeep:
    """Writes what the event loop wants written, adopts waiting messages, marks leases as draining, and looks
    whether a scheduler is about."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        # A simple queue, because jobs are put into it by signal handlers too.
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        # What the database did not take yet, in order.
        self._open_jobs: deque[Job] = deque()
        self._marked: set[LeaseKey] = set()
        self._is_stopping = False
        self._is_over = False
        self._looked_at = monotonic()
        self._scheduler_seen = True
        self._is_waiting = False
        self._thread = threading.Thread(target=self._run, name="durable-upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Do what is to be done now, and end."""
        self._is_over = True
        self._jobs.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(LAST_WORDS)

    def soon(self, job: Job) -> None:
        """Do something with the database; again and again while that is away. In the order of the calls."""
        self._jobs.put(job)

    def wait_for(self, job: Job, timeout: float) -> None:
        """Do something once, and wait until it is done. Safe in a signal handler."""
        done = threading.Event()

        def once() -> None:
            try:
                job()
            except StoreUnavailable as error:
                logger.warning("The database is away: %s", error)
            finally:
                done.set()

        self.soon(once)
        if self._thread.is_alive():
            done.wait(timeout)

    def announce_stop(self) -> None:
        """From now on mark every lease of the worker as draining. Safe in a signal handler."""
        if not self._is_stopping:
            self._is_stopping = True
            self.soon(self._mark_draining)

    def hand_back(self, *, wait: bool) -> None:
        """Give every lease of the worker back, at once."""
        keys = self._side.book.leases()
        if keys:
            self.wait_for(lambda: self._hand_back(keys), LAST_WORDS if wait else 0.0)

    def _hand_back(self, keys: list[LeaseKey]) -> None:
        count = self._side.durable.store.leases.hand_back_many(keys)
        reached(Point.LEASES_HANDED_BACK)
        logger.info("%d leases are handed back", count)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            self._take_jobs(STOPPING_ROUND if self._is_stopping else ROUND)
            try:
                self._round()
            except StoreUnavailable as error:
                logger.debug("Upkeep waits for the database: %s", error)
            except Exception:
                logger.exception("Upkeep failed, and will try again")
        # What came while the last round was on.
        self._take_jobs(0.0)

    def _take_jobs(self, timeout: float) -> None:
        """Wait for jobs, and do what there is."""
        try:
            self._open_jobs.append(self._jobs.get(timeout=timeout))
            while True:
                self._open_jobs.append(self._jobs.get_nowait())
        except queue.Empty:
            pass
        while self._open_jobs:
            try:
                self._open_jobs[0]()
            except StoreUnavailable as error:
                level = logging.DEBUG if self._is_waiting else logging.WARNING
                logger.log(level, "%d writes wait for the database: %s", len(self._open_jobs), error)
                self._is_waiting = True
                return
            except Exception:
                logger.exception("A write of the worker's main process failed")
            self._open_jobs.popleft()
        if self._is_waiting:
            self._is_waiting = False
            logger.info("The writes that waited for the database are done")

    def _round(self) -> None:
        self._side.drain()
        if self._is_stopping:
            self._mark_draining()
            return
        self._adopt()
        self._look_for_scheduler()

    def _mark_draining(self) -> None:
        keys = [key for key in self._side.book.leases() if key not in self._marked]
        if keys:
            self._side.durable.store.leases.mark_draining(keys)
            reached(Point.LEASES_MARKED)
            self._marked.update(keys)

    def _adopt(self) -> None:
        """Make rows of what has waited long, up to one prefetch of them; more only when it must be.

        A message that is acknowledged makes room for the next one, so without a limit a worker whose pool is
        busy would take in the whole queue.
        """
        requests, now = self._side.book.open_requests(), monotonic()
        room = self._side.prefetch - sum(request.waits_as_row for request in requests)
        for request in requests:
            waited = now - request.arrived_at
            if request.is_waiting and waited >= (ADOPT_AFTER if room > 0 else ADOPT_AT_LAST):
                request.adopt()
                room -= 1

    def _look_for_scheduler(self) -> None:
        now = monotonic()
        if now - self._looked_at < SCHEDULER_PATIENCE:
            return
        self._looked_at = now
        seconds = self._side.durable.store.schedule.seconds_since_tick()
        is_seen = seconds is not None and seconds < SCHEDULER_PATIENCE
        if self._scheduler_seen and not is_seen:
            logger.warning(
                "No scheduler has been seen for a minute: what sleeps will not wake. Run `celery beat`,"
                " or `celery durable scheduler` beside another beat"
            )
        self._scheduler_seen = is_seen
