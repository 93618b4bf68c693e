"""The main process's book of deliveries: which are open, and who has claimed them.

Keyed by a delivery number, never by task id: two copies of one message can be in one worker.
"""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from celery_durable.claiming import Verdict
from celery_durable.records import LeaseKey

if TYPE_CHECKING:
    from celery_durable.worker.request import DurableRequest

logger = logging.getLogger(__name__)


class Book:
    """Open deliveries by number. It keeps none alive: a request lives as long as Celery needs it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._requests: WeakValueDictionary[int, DurableRequest] = WeakValueDictionary()
        self._lock = threading.Lock()
        #: Set when the worker was told to stop.
        self.is_stopping = False

    def register(self, request: DurableRequest) -> int:
        """Note a delivery. Returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._requests[number] = request
        return number

    def report(self, number: int, verdict: int, owner: str, token: int) -> None:
        """Hear what became of a delivery; ``token`` 0: there is no lease."""
        with self._lock:
            request = self._requests.get(number)
        key = LeaseKey(request.id, owner, token) if request is not None and token else None
        if request is None:
            logger.debug("Delivery %d is not open any more", number)
        elif verdict == Verdict.CLAIMED:
            request.on_claimed(key)
        elif verdict == Verdict.DECLINED:
            request.on_declined()
        elif verdict == Verdict.PUT_BACK:
            request.on_put_back()
        else:
            request.on_verdict(key, is_expiry=verdict == Verdict.EXPIRED)

    def open_requests(self) -> list[DurableRequest]:
        """Every request that is still known."""
        with self._lock:
            return list(self._requests.values())

    def leases(self) -> list[LeaseKey]:
        """The leases that the processes of this worker hold."""
        keys = (request.lease_key for request in self.open_requests() if not request.is_over)
        return [key for key in keys if key is not None]
