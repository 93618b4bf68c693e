"""Marks: the instants at which task bodies ran, in one file per label.

A mark is sixteen bytes, appended with one ``write`` on an open file, so it costs a microsecond and the
same on every side of a comparison. Only the standard library: peers use it from their own environments.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

#: The environment variable that names the folder of the marks.
VARIABLE = "BENCH_MARKS"
#: Seconds without a single new mark after which nothing more is expected.
STALLED_AFTER = 60.0

_RECORD = struct.Struct("=dd")


class Mark(NamedTuple):
    """One mark: seconds since the epoch, and a number that the body had to say."""

    time: float
    value: float


class Stalled(AssertionError):
    """Marks that were waited for did not come."""


def mark(label: str, value: float = 0.0) -> None:
    """Note that this body runs now."""
    os.write(_file(label), _RECORD.pack(time.time(), value))


@cache
def _file(label: str) -> int:
    # Inherited by children without harm: every write is appended as a whole.
    return os.open(Path(os.environ[VARIABLE]) / label, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


class Marks:
    """The marks of one folder, as the benchmark reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def count(self, label: str) -> int:
        """How many there are."""
        path = self.folder / label
        return path.stat().st_size // _RECORD.size if path.exists() else 0

    def read(self, label: str) -> list[Mark]:
        """All of them, in the order of time."""
        path = self.folder / label
        data = path.read_bytes() if path.exists() else b""
        return sorted(Mark(*record) for record in _RECORD.iter_unpack(data))

    def wait(self, label: str, count: int) -> list[Mark]:
        """Wait until there are ``count`` of them; raises `Stalled` when no more come for a minute."""
        seen, since = 0, time.monotonic()
        while seen < count:
            time.sleep(0.02)
            now = self.count(label)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > STALLED_AFTER:
                raise Stalled(f"{label}: {seen} of {count} marks, and no more for {STALLED_AFTER:.0f} s")
        return self.read(label)


def rate(marks: Sequence[Mark]) -> float:
    """Bodies per second, from the first to the last."""
    return (len(marks) - 1) / (marks[-1].time - marks[0].time)
