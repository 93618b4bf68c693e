"""The witness of a chaos run: one line for each thing that a task did, in a file that survives every fault.

A line is appended by a single write, so a writer that is killed or frozen can neither spoil the record nor
hold up another one. Times are the machine's, whatever clock a process has been given.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import time_machine

VARIABLE = "CHAOS_RECORD"
#: Seconds by which the clock of this process is wrong.
OFFSET_VARIABLE = "CHAOS_CLOCK_OFFSET"


@dataclass(frozen=True)
class Line:
    """One thing that one run of a task did."""

    #: The place in the file.
    number: int
    task_id: str
    what: str
    #: The fencing token of the run; 0 where there is none.
    token: int
    #: The place in the task's program; -1 where it belongs to no place.
    place: int
    #: Made anew by each run of a step: what tells one run of it from another.
    nonce: str
    time: float
    pid: int
    value: Any = None


def write(task_id: str, what: str, **facts: Any) -> None:
    """Append a line, now."""
    line = {"task_id": task_id, "what": what, "time": _machine_time(), "pid": os.getpid(), **facts}
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def _machine_time() -> float:
    hatch = time_machine.escape_hatch
    return hatch.time.time() if hatch.is_travelling() else time.time()


def read(path: Path) -> dict[str, list[Line]]:
    """Every line by its task, in the order of the file."""
    lines: dict[str, list[Line]] = defaultdict(list)
    if path.exists():
        defaults = {"token": 0, "place": -1, "nonce": ""}
        for number, text in enumerate(path.read_text().splitlines()):
            line = Line(**{**defaults, **json.loads(text), "number": number})
            lines[line.task_id].append(line)
    return lines
