"""What really ran: a record that is no part of what is tested.

A test's tasks write one line for each thing they do; the test counts the lines. The file is only
ever appended to, by one `write` per line, so that a writer that is killed or frozen can neither
spoil the record nor hold up another writer, as it could with a database.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import Self

#: The environment variable by which worker processes find the file.
VARIABLE = "TEST_WITNESS"


@dataclass(frozen=True)
class Sighting:
    """One thing that one run of a task did."""

    task_id: str
    step: str
    attempt: int
    pid: int
    #: Seconds since the epoch, by the clock of the process.
    time: float


class Witness:
    """The record of one test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def here(cls) -> Self:
        """The witness of the environment: for the tasks of a test."""
        return cls(Path(os.environ[VARIABLE]))

    def saw(self, task_id: str, step: str, attempt: int = 0) -> None:
        """Record that `step` of a task is being done by this process, now."""
        sighting = Sighting(task_id, step, attempt, os.getpid(), time.time())
        line = json.dumps(asdict(sighting)) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def sightings(self, task_id: str | None = None, step: str | None = None) -> list[Sighting]:
        """What was recorded, oldest first; of one task, of one step."""
        if not self.path.exists():
            return []
        everything = [Sighting(**json.loads(line)) for line in self.path.read_text().splitlines()]
        return [seen for seen in everything if task_id in (None, seen.task_id) and step in (None, seen.step)]

    def count(self, task_id: str | None = None, step: str | None = None) -> int:
        """How often it was recorded."""
        return len(self.sightings(task_id, step))

    def steps(self, task_id: str) -> list[str]:
        """The steps of a task in the order in which they were done, repetitions included."""
        return [seen.step for seen in self.sightings(task_id)]
