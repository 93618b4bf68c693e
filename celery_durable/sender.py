"""Sending followers from the worker that wrote them: one try, right after the commit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from celery_durable.errors import StoreUnavailable
from celery_durable.points import Point, reached
from celery_durable.publisher import Publisher
from celery_durable.records import Outgoing
from celery_durable.store import Store

logger = logging.getLogger(__name__)

#: Seconds to wait for another thread of this process that is sending.
TURN_TIMEOUT = 1.0

# Publishers inherited over a fork. py-amqp shuts a socket down when it is collected, and this one is the
# parent's.
_inherited: list[Publisher] = []


class Sender:
    """One broker connection per process, used by one thread at a time."""

    def __init__(self, app: Any, store: Store, resend_delay: Callable[[], float]) -> None:
        self._app = app
        self._store = store
        self._resend_delay = resend_delay
        self._pid = 0
        self._publisher: Publisher | None = None
        self._turn = threading.Lock()

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Publish, and note what was confirmed. What is left over becomes due for the scheduler."""
        self._enter_process()
        if not self._turn.acquire(timeout=TURN_TIMEOUT):
            return
        try:
            assert self._publisher is not None
            published = self._publisher.publish(outgoing)
            reached(Point.FOLLOWERS_SENT)
            if published.sent:
                self._store.due.confirm(published.sent, self._resend_delay())
            reached(Point.FOLLOWERS_NOTED)
        except StoreUnavailable as error:
            # Their rows are due again in ten seconds: a durable one is then refused as a duplicate.
            logger.warning("Followers were sent but not noted: %s", error)
        finally:
            self._turn.release()

    def _enter_process(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._turn = threading.Lock()
            if self._publisher is not None:
                _inherited.append(self._publisher)
            self._publisher = Publisher(self._app)
