"""What one process has: its name as an owner, its heartbeats, its view of the database's health."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar

from celery_durable import metrics
from celery_durable.clock import Clock, SystemClock
from celery_durable.codec import Codec, OutcomeCodec
from celery_durable.errors import StoreUnavailable
from celery_durable.heartbeat import Heartbeats
from celery_durable.rules import Outage
from celery_durable.settings import Settings
from celery_durable.store import Store

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Runtime:
    """The durable side of one process.

    ``node`` is the worker's node name (``celery@host``), or another word for what the process is.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        node: str,
        serializer: str,
        result_serializer: str,
    ) -> None:
        self.settings = settings
        self.store = store
        self.pid = os.getpid()
        # A process id comes back; a lease of an earlier process of the same number must not fit.
        self.instance = uuid.uuid4()
        self.owner = owner_name(node, self.pid, self.instance)
        self.codec = Codec(serializer, settings.payload_limit)
        self.outcome_codec = OutcomeCodec(result_serializer)
        self.heartbeats = Heartbeats(store.heartbeats, on_renewed=metrics.renewed)
        self.health = Health(store.now)


def owner_name(node: str, pid: int, instance: uuid.UUID) -> str:
    """How a process signs its leases."""
    return f"{node}:{pid}:{instance.hex}"


class Health:
    """When this process could not reach the database: a lease that ran out in that time is no crash.

    What ran out before this process first reached the database is not excused.
    ``now`` asks the database for its time.
    """

    def __init__(self, now: Callable[[], datetime], clock: Clock | None = None) -> None:
        self._now = now
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._last_success: float | None = None
        self._is_away = False
        #: The last time without a database that this process has come out of.
        self.outage: Outage | None = None

    @property
    def is_away(self) -> bool:
        """Whether the last statement did not reach the database."""
        return self._is_away

    def watch(self, statement: Callable[[], Answer]) -> Answer:
        """Run a statement, noting whether the database was there.

        Raises StoreUnavailable as the statement does.
        """
        try:
            if self._is_away:
                # First of all: the statement itself may be one that finds leases that ran out.
                self._note_return(self._now())
            answer = statement()
        except StoreUnavailable:
            self._is_away = True
            raise
        self._last_success = self._clock.monotonic()
        return answer

    def _note_return(self, now: datetime) -> None:
        with self._lock:
            if not self._is_away:
                return
            if self._last_success is not None:
                away = timedelta(seconds=self._clock.monotonic() - self._last_success)
                self.outage = Outage(now - away, now)
            self._is_away = False
