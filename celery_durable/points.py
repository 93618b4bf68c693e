"""Crash points: the places between two effects at which a process may die, each with a name.

The fault tests kill a process, or freeze it, at each of them. Otherwise ``reached`` does nothing:

    CELERY_DURABLE_CRASH_AT     points at which the process kills itself with SIGKILL, separated by commas;
                                ``step-ran:2`` is the second time that it gets there
    CELERY_DURABLE_FREEZE_AT    the same with SIGSTOP: it goes on at a SIGCONT
    CELERY_DURABLE_CRASH_MARKS  a folder. Of all processes that share it one alone is struck at a point, the
                                first one to leave a file of that name there
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

CRASH_VARIABLE = "CELERY_DURABLE_CRASH_AT"
FREEZE_VARIABLE = "CELERY_DURABLE_FREEZE_AT"
MARKS_VARIABLE = "CELERY_DURABLE_CRASH_MARKS"


class Point:
    """The names. Each says what has just been done."""

    # A message in the process that runs tasks, and in the worker's main process.
    MESSAGE_ARRIVED = "message-arrived"
    CLAIM_COMMITTED = "claim-committed"
    CLAIM_HEARD = "claim-heard"
    CLAIM_REPORTED = "claim-reported"
    CLAIM_REFUSED = "claim-refused"
    MESSAGE_ADOPTED = "message-adopted"
    MESSAGE_KEPT = "message-kept"

    # The body.
    BODY_ENTERED = "body-entered"
    STEP_RAN = "step-ran"
    STEP_JOURNALED = "step-journaled"
    SHORT_SLEEP_JOURNALED = "short-sleep-journaled"
    SLEEPING_STORED = "sleeping-stored"
    SLEEP_PARKED = "sleep-parked"
    QUARANTINED_STORED = "quarantined-stored"
    SET_ASIDE = "set-aside"

    # Its end.
    BODY_LEFT = "body-left"
    END_WRITTEN = "end-written"
    FOLLOWERS_SENT = "followers-sent"
    FOLLOWERS_NOTED = "followers-noted"
    RESULT_STORED = "result-stored"
    OUTCOME_TOLD = "outcome-told"
    ROW_ENDED = "row-ended"
    RUN_HANDED_BACK = "run-handed-back"
    UNTOLD_STORED = "untold-stored"

    # A retry, a replacement.
    RETRY_BUILT = "retry-built"
    RETRY_STORED = "retry-stored"
    RETRY_PARKED = "retry-parked"
    REPLACEMENT_SENT = "replacement-sent"

    # What the worker's main process does about its children.
    CHILD_LOST = "child-lost"
    CHILD_RECOVERED = "child-recovered"
    LIMIT_HIT = "limit-hit"
    LIMIT_WRITTEN = "limit-written"
    LIMIT_TOLD = "limit-told"
    LEASES_MARKED = "leases-marked"
    LEASES_HANDED_BACK = "leases-handed-back"

    # Verdicts.
    VERDICT_WRITTEN = "verdict-written"
    VERDICT_STORED = "verdict-stored"
    VERDICT_CLAIMED = "verdict-claimed"
    VERDICT_TOLD = "verdict-told"

    # A message that no worker understands.
    UNKNOWN_FAILED = "unknown-failed"
    UNKNOWN_TOLD = "unknown-told"

    # Sending.
    SEND_SCHEDULED = "send-scheduled"
    DUE_TAKEN = "due-taken"
    WAKES_SENT = "wakes-sent"
    WAKES_NOTED = "wakes-noted"
    ENTRY_TAKEN = "entry-taken"
    ENTRY_ADVANCED = "entry-advanced"

    @classmethod
    def names(cls) -> frozenset[str]:
        """Every point there is."""
        return frozenset(value for name, value in vars(cls).items() if name.isupper())


class _Striker:
    """Strikes this process at its points."""

    def __init__(self, strikes: Mapping[str, tuple[int, int]], marks: Path | None) -> None:
        unknown = strikes.keys() - Point.names()
        if unknown:
            raise ValueError(f"there are no such crash points: {', '.join(sorted(unknown))}")
        self._strikes = strikes
        self._marks = marks
        self._reached: Counter[str] = Counter()

    def __call__(self, point: str) -> None:
        if point not in self._strikes:
            return
        self._reached[point] += 1
        turn, number = self._strikes[point]
        if self._reached[point] == turn and self._leave_mark(point):
            os.kill(os.getpid(), number)

    def _leave_mark(self, point: str) -> bool:
        """Whether nobody was here before."""
        if self._marks is None:
            return True
        with suppress(FileExistsError):
            (self._marks / point).touch(exist_ok=False)
            return True
        return False


def _nothing(point: str) -> None:
    """What happens at a point outside of the fault tests."""


def striker_for(environment: Mapping[str, str]) -> Callable[[str], None]:
    """What is to happen at each point in a process with this environment.

    Raises ValueError for a point that there is not.
    """
    strikes = {
        **_strikes(environment.get(FREEZE_VARIABLE), "SIGSTOP"),
        **_strikes(environment.get(CRASH_VARIABLE), "SIGKILL"),
    }
    if not strikes:
        return _nothing
    marks = environment.get(MARKS_VARIABLE)
    return _Striker(strikes, Path(marks) if marks else None)


def _strikes(plan: str | None, name: str) -> dict[str, tuple[int, int]]:
    strikes = {}
    for item in (plan or "").split(","):
        point, _, turn = item.strip().partition(":")
        if point:
            # Not every system has them, and every process comes here.
            strikes[point] = (int(turn or 1), getattr(signal, name))
    return strikes


# The last one counts.
_strikers: list[Callable[[str], None]] = [striker_for(os.environ)]


def reached(point: str) -> None:
    """Called with its name at each point."""
    _strikers[-1](point)


@contextmanager
def striking(striker: Callable[[str], None]) -> Iterator[None]:
    """Within this block ``striker`` is called at each point of this process: for tests that run in it."""
    _strikers.append(striker)
    try:
        yield
    finally:
        _strikers.remove(striker)
