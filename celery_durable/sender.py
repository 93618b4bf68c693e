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


class Sender:
    """One broker connection per process, used by one thread at a time."""

    def __init__(self, app: Any, store: Store, resend_delay: Callable[[], float]) -> None:
        self._app = app
        self._store = store
        self._resend_delay = resend_delay
        # By process. py-amqp shuts a socket down when it is collected, and one that was inherited over a fork
        # is the parent's: it is kept. Two threads that come first together get the same one.
        self._publishers: dict[int, tuple[Publisher, threading.Lock]] = {}

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Publish, and note what was confirmed. What is left over becomes due for the scheduler."""
        publisher, turn = self._own()
        if not turn.acquire(timeout=TURN_TIMEOUT):
            return
        try:
            published = publisher.publish(outgoing)
            reached(Point.FOLLOWERS_SENT)
            if published.sent:
                self._store.due.confirm(published.sent, self._resend_delay())
            reached(Point.FOLLOWERS_NOTED)
        except StoreUnavailable as error:
            # Their rows are due again in ten seconds: a durable one is then refused as a duplicate.
            logger.warning("Followers were sent but not noted: %s", error)
        except Exception:
            # They are rows. The task has ended, and must not fail for this.
            logger.exception("Followers are left to the scheduler")
        finally:
            turn.release()

    def _own(self) -> tuple[Publisher, threading.Lock]:
        """Those of this process."""
        own = self._publishers.get(os.getpid())
        if own is None:
            own = self._publishers.setdefault(os.getpid(), (Publisher(self._app), threading.Lock()))
        return own
