"""What a supervisor may know of a scheduler: a file that it goes on writing, and that says how it goes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Literal

from celery_durable.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

#: Names the file for schedulers that have no option for it (``celery beat``, ``celery worker -B``).
HEALTH_VARIABLE = "CELERY_DURABLE_HEALTH_FILE"
#: Seconds between two writes that say the same.
INTERVAL = 1.0

State = Literal["ok", "database away", "broker away"]


class HealthFile:
    """One line of JSON, ``{"state": "ok", "pid": 7}``, replaced at every tick.

    A supervisor looks at the state, and at the file's age: a scheduler that hangs writes no more.
    """

    def __init__(self, path: Path | None, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._written: State | None = None
        self._written_at = 0.0

    @classmethod
    def of_environment(cls) -> HealthFile:
        """The file that ``CELERY_DURABLE_HEALTH_FILE`` names, if it does."""
        path = os.environ.get(HEALTH_VARIABLE)
        return cls(Path(path) if path else None)

    def write(self, state: State) -> None:
        """Say how it goes. A file that cannot be written is logged, and no reason to stop."""
        now = self._clock.monotonic()
        if self._path is None or (state == self._written and now - self._written_at < INTERVAL):
            return
        try:
            draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            draft.write_text(json.dumps({"state": state, "pid": os.getpid()}) + "\n")
            draft.replace(self._path)
        except OSError as error:
            if state != self._written:
                logger.error("The health file cannot be written: %s", error)
        self._written, self._written_at = state, now

    def remove(self) -> None:
        """At the end: nobody is there any more."""
        if self._path is not None and self._written is not None:
            self._path.unlink(missing_ok=True)
