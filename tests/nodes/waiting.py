"""Waiting for a condition, and a timeout that says what the processes were doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tests.nodes.process import LocalProcess

T = TypeVar("T")

POLL_INTERVAL = 0.02


class WaitTimeout(AssertionError):
    """A condition that a test waited for did not come true in time."""


def wait_for(
    condition: Callable[[], T],
    timeout: float = 20,
    message: str = "",
    processes: Iterable[LocalProcess] = (),
) -> T:
    """Call `condition` every 20 ms until its value is true, and return that value.

    Raises `WaitTimeout` after `timeout` seconds, with `message`, the last value, and the end of
    the log of each of the `processes`. What `condition` raises is passed on.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            what = message or getattr(condition, "__qualname__", repr(condition))
            report = "".join(process.report() for process in processes)
            raise WaitTimeout(f"not within {timeout} s: {what} (last value: {value!r}){report}")
        time.sleep(POLL_INTERVAL)
