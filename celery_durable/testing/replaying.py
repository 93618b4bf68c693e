"""Replay in a test: the body of a task runs against an old journal, and nothing beyond it is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_durable.capture import capturing
from celery_durable.context import current_run
from celery_durable.errors import ReplayDivergence
from celery_durable.execution import step_name
from celery_durable.lease import EternalLease, Lease
from celery_durable.records import Kind
from celery_durable.replay import Journal as Recorded
from celery_durable.replay import describe, fits
from celery_durable.testing.journal import Entry, Journal


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far a replay has come.

    ``next_call`` is the durable call that the code makes after the journal's last one (it was not made), None
    where the body has ended; ``value`` what it returned.
    """

    next_call: str | None = None
    value: Any = None


class _Beyond(BaseException):
    """The code has come to a durable call that the journal does not have."""


class ReplayRun:
    """The durable calls of a body that is replayed. A sleep that is in the journal is over."""

    def __init__(self, journal: Journal) -> None:
        self.lease: Lease = EternalLease(journal.task_id)
        self.divergence: ReplayDivergence | None = None
        self.next_call: str | None = None
        self._source = journal
        self._entries: dict[int, Entry] = {entry.position: entry for entry in journal}
        self._recorded = Recorded([entry.stored for entry in journal if entry.stored is not None])

    @property
    def replayed(self) -> int:
        """How many durable calls were made."""
        return self._recorded.position

    def step(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self._next(Kind.STEP, step_name(fn))
        if entry.kind == Kind.ERROR:
            raise entry.value
        return entry.value

    def sleep(self, seconds: float, name: str | None) -> None:
        self._next(Kind.SLEEP, name or "")

    def sleep_until(self, when: datetime, name: str | None) -> None:
        self._next(Kind.SLEEP, name or "")

    def _next(self, kind: str, name: str) -> Entry:
        # What a body swallows comes again at its next durable call.
        if self.next_call is not None:
            raise _Beyond
        if self.divergence is not None:
            raise self.divergence
        position = self._recorded.advance()
        recorded = self._recorded.recorded()
        if recorded is None:
            self.next_call = describe(kind, name)
            raise _Beyond
        if not fits(recorded, kind, name):
            self.divergence = ReplayDivergence(
                self._source.task,
                self._source.task_id,
                position,
                describe(recorded.kind, recorded.name),
                describe(kind, name),
            )
            raise self.divergence
        return self._entries[position]


def replay(task: Any, journal: Journal) -> Replayed:
    """Run the body of ``task`` against a journal.

    Raises:
        TypeError: it is no durable task.
        ReplayDivergence: the code makes another durable call than the journal says.
        AssertionError: the body ends before the journal does.
        whatever the body raises.
    """
    if not getattr(task, "is_durable", False):
        raise TypeError(f"{getattr(task, 'name', task)!r} is no durable task: it has no journal to replay")
    run = ReplayRun(journal)
    value = None
    with suppress(_Beyond):
        value = _called(task, journal, run)
    if run.divergence is not None:
        raise run.divergence
    if run.next_call is None and run.replayed < len(journal):
        missed = journal[run.replayed]
        raise AssertionError(
            f"{journal.task}: the body ends after {run.replayed} durable calls; the journal goes on with"
            f" {describe(missed.kind, missed.name)} at position {missed.position}"
        )
    return Replayed(run.next_call, value)


def _called(task: Any, journal: Journal, run: ReplayRun) -> Any:
    body: Callable[..., Any] = task.run
    task.push_request(id=journal.task_id, args=journal.args, kwargs=journal.kwargs, is_eager=True)
    token = current_run.set(run)
    try:
        with capturing():
            return body(*journal.args, **journal.kwargs)
    finally:
        current_run.reset(token)
        task.pop_request()
