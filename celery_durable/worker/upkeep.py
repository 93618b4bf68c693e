"""What a worker's main process does now and then, in a thread: the event loop never waits for the database."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from celery_durable.clock import monotonic
from celery_durable.errors import StoreUnavailable

if TYPE_CHECKING:
    from celery_durable.records import LeaseKey
    from celery_durable.worker.side import WorkerSide

logger = logging.getLogger(__name__)

#: Seconds between two rounds; shorter while the worker is stopping.
ROUND = 2.0
STOPPING_ROUND = 0.5
#: Seconds that a message waits behind other tasks before it becomes a row. Well below the shortest
#: patience that brokers are given (RabbitMQ's ``consumer_timeout``).
ADOPT_AFTER = 10.0
#: Seconds without a scheduler after which the worker warns, and between two looks.
SCHEDULER_PATIENCE = 60.0


class Upkeep:
    """Adopts waiting messages, marks leases as draining, and looks whether a scheduler is about."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._wake = threading.Event()
        self._marked: set[LeaseKey] = set()
        self._is_stopping = False
        self._started_at = monotonic()
        self._looked_at = self._started_at
        self._scheduler_seen = True
        self._thread = threading.Thread(target=self._run, name="durable-upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def announce_stop(self) -> None:
        """From now on mark every lease of the worker as draining. Safe in a signal handler."""
        self._is_stopping = True
        self._wake.set()

    def hand_back(self) -> None:
        """Give every lease of the worker back, at once."""
        keys = self._side.book.leases()
        if not keys:
            return
        try:
            count = self._side.durable.store.leases.hand_back_many(keys)
        except StoreUnavailable as error:
            logger.warning("%d leases are not handed back and will run out: %s", len(keys), error)
        else:
            logger.info("%d leases are handed back", count)

    def _run(self) -> None:
        while True:
            self._wake.wait(STOPPING_ROUND if self._is_stopping else ROUND)
            self._wake.clear()
            try:
                self._round()
            except StoreUnavailable as error:
                logger.debug("Upkeep waits for the database: %s", error)
            except Exception:
                logger.exception("Upkeep failed, and will try again")

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
            self._marked.update(keys)

    def _adopt(self) -> None:
        patience = monotonic() - ADOPT_AFTER
        for request in self._side.book.open_requests():
            if request.is_waiting and request.arrived_at <= patience:
                request.adopt()

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
