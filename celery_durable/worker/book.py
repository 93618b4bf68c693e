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
from celery_durable.logs import about
from celery_durable.records import LeaseKey

if TYPE_CHECKING:
    from celery_durable.worker.request import DurableRequest

logger = logging.getLogger(__name__)


class Book:
    """Open deliveries by number. It keeps none alive: a request lives as long as Celery needs it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._requests: WeakValueDictionary[int, DurableRequest] = WeakValueDictionary()
        # A signal handler of the main thread may come while it is held there.
        self._lock = threading.RLock()
        #: Set when the worker was told to stop.
        self.is_stopping = False

    def register(self, request: DurableRequest) -> int:
        """Note a delivery. Returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._requests[number] = request
        return number

    def report(self, number: int, verdict: int, owner: str, token: int) -> None:
        """Hear what became of a delivery; ``token`` 0: there is no lease. Never raises."""
        with self._lock:
            request = self._requests.get(number)
        if request is None:
            logger.debug("Delivery %d is not open any more", number)
            return
        request.is_adopted = False
        key = LeaseKey(request.id, owner, token) if token else None
        try:
            _hear(request, verdict, key)
        except Exception:
            # From a broker or a result store that is away. The other deliveries have to be heard all the
            # same; what this one's row says comes again by itself.
            logger.exception(
                "What became of %s[%s] could not be dealt with",
                request.name,
                request.id,
                extra=about(request.name, request.id),
            )

    def open_requests(self) -> list[DurableRequest]:
        """Every request that is still known."""
        with self._lock:
            return list(self._requests.values())

    def leases(self) -> list[LeaseKey]:
        """The leases that the processes of this worker hold."""
        requests = (request for request in self.open_requests() if request.holds_lease)
        return [request.lease_key for request in requests if request.lease_key is not None]


def _hear(request: DurableRequest, verdict: int, key: LeaseKey | None) -> None:
    if verdict == Verdict.CLAIMED:
        request.on_claimed(key)
    elif verdict == Verdict.DECLINED:
        request.on_declined()
    elif verdict == Verdict.PUT_BACK:
        request.on_put_back()
    elif verdict == Verdict.LOST:
        request.on_lost()
    else:
        request.on_verdict(key, is_expiry=verdict == Verdict.EXPIRED)
