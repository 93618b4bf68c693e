"""Whether something outside can be reached: said once for each change, and when to try again."""

from __future__ import annotations

import logging
import random

from celery_durable.clock import Clock, SystemClock

#: Seconds before the second try; doubled for each one after it.
FIRST_DELAY = 0.5
#: The longest pause between two tries, in seconds. Short: what comes back is to be used at once.
CEILING = 5.0


class Reach:
    """What one process knows about a database or a broker.

    ``name`` begins the sentences in the log: "The broker".
    """

    def __init__(self, name: str, logger: logging.Logger, clock: Clock | None = None) -> None:
        self._name = name
        self._logger = logger
        self._clock = clock or SystemClock()
        self._failures = 0
        self._since = 0.0
        self._retry_at = 0.0

    @property
    def is_away(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    @property
    def retry_in(self) -> float:
        """Seconds until the next try makes sense, 0 for now."""
        return max(self._retry_at - self._clock.monotonic(), 0.0) if self._failures else 0.0

    def lost(self, error: object) -> None:
        """Note a failed try: the next one comes after a growing pause, not the same for every process."""
        now = self._clock.monotonic()
        if not self._failures:
            self._since = now
            reason = str(error).rstrip(".")
            self._logger.error("%s cannot be reached: %s. Trying again", self._name, reason)
        else:
            self._logger.debug("%s still cannot be reached: %s", self._name, error)
        delay = min(FIRST_DELAY * 2.0 ** min(self._failures, 10), CEILING)
        self._failures += 1
        self._retry_at = now + delay * random.uniform(0.5, 1.0)

    def back(self) -> None:
        """Note a try that did not fail."""
        if self._failures:
            self._failures = 0
            seconds = self._clock.monotonic() - self._since
            self._logger.warning("%s is back after %.1f s", self._name, seconds)
