"""Interrupting a run that lost its lease, as far as each pool allows."""

from __future__ import annotations

import logging
from typing import Any

from celery_durable.records import Outcome

logger = logging.getLogger(__name__)


class Interrupter:
    """Stops the body of a run whose lease is lost. Called by the heartbeat's thread."""

    def __init__(self, pool: str) -> None:
        self._pool = pool

    def __call__(self, run: Any, outcome: Outcome | None) -> None:
        logger.debug("%s is told by its guard only", run.lease.task_id)
