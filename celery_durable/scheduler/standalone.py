"""The scheduler as a process of its own, for those whose beat is another one's."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery_durable.scheduler.build import build_ticker
from celery_durable.scheduler.deferral import AT_ONCE, SOON, Deferral
from celery_durable.scheduler.state import HealthFile

logger = logging.getLogger(__name__)


def run_scheduler(app: Any, *, health_file: Path | None = None) -> None:
    """Wake what is due until SIGTERM or SIGINT, then return. ``beat_schedule`` is left to beat.

    ``health_file``: see ``HealthFile``; by default what ``CELERY_DURABLE_HEALTH_FILE`` names.

    Raises:
        ConfigurationError: a setting is wrong, or the tables are of another version.
    """
    durable = app.durable
    # As Celery's beat does: a task's own limits hold for a lease that has run out, and who knows no task
    # would count by the settings.
    app.loader.import_default_modules()
    durable.check_configuration()
    health = HealthFile(health_file) if health_file is not None else HealthFile.of_environment()
    deferral = Deferral()
    ticker = build_ticker(durable, deferral, health=health)
    logger.info("The scheduler of %r is starting", durable.settings.namespace)
    with _ending_by_signal():
        try:
            while True:
                delay = 0.0
                with deferral.holding(SOON):
                    delay = ticker.run_once()
                with deferral.holding(AT_ONCE):
                    ticker.wait(delay)
        except _Ended:
            logger.info("The scheduler is stopping")
    ticker.close()


class _Ended(BaseException):
    """A signal asked for the end."""


@contextmanager
def _ending_by_signal() -> Iterator[None]:
    def end(_number: int, _frame: Any) -> None:
        # Once: nothing may interrupt the closing.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise _Ended

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
