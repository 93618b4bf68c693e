"""Dispatch: due rows become wake messages. The whole of the scheduler's work on executions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from celery_durable import metrics, signals
from celery_durable.clock import Clock, SystemClock
from celery_durable.logs import about
from celery_durable.points import Point, reached
from celery_durable.publisher import Published, Publisher
from celery_durable.reach import Reach
from celery_durable.records import OutcomeKind
from celery_durable.runtime import Runtime
from celery_durable.store.due import Batch, Crashed

logger = logging.getLogger(__name__)

#: Seconds for which one pass goes on finding full batches before it lets others have their turn.
PASS_SECONDS = 1.0


class Dispatcher:
    """Takes due rows, publishes them, notes what the broker confirmed.

    ``limits(task_name)`` gives a task's crash limit and lease ttl. ``taking()`` is entered for the
    time between taking a batch and the note of what became of it, and ``sending()`` within it from its
    publish on.
    """

    def __init__(
        self,
        app: Any,
        runtime: Runtime,
        limits: Callable[[str], tuple[int | None, float]],
        *,
        publisher: Publisher | None = None,
        taking: Callable[[], AbstractContextManager[None]] = nullcontext,
        sending: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._runtime = runtime
        self._limits = limits
        self._taking = taking
        self._sending = sending
        self._clock = clock or SystemClock()
        self._publisher = publisher or Publisher(app, clock=self._clock)
        # Published, but not noted yet: the database went away in between.
        self._owed: list[Published] = []

    @property
    def broker(self) -> Reach:
        """Whether the broker can be reached."""
        return self._publisher.broker

    def run_once(self) -> int:
        """One batch. Returns how many rows were due, 0 while the broker is away.

        Nothing is taken from the database that could not be sent. What is overdue then stays the first.

        Raises:
            StoreUnavailable: the database is away. What was published is noted by the next call.
        """
        self._settle()
        if not self._publisher.connect():
            return 0
        with self._taking():
            began = self._clock.monotonic()
            batch = self._take()
            if batch.outgoing:
                reached(Point.DUE_TAKEN)
                published = self._send(batch)
                resent = sum(item.sends > 1 for item in published.sent)
                metrics.dispatched(len(published.sent), resent, self._clock.monotonic() - began)
        self._report(batch)
        return batch.found

    def _send(self, batch: Batch) -> Published:
        with self._sending():
            published = self._publisher.publish(batch.outgoing)
            self._owed.append(published)
            reached(Point.WAKES_SENT)
            self._settle()
            reached(Point.WAKES_NOTED)
        return published

    def _take(self) -> Batch:
        runtime = self._runtime
        return runtime.health.watch(
            lambda: runtime.store.due.take(runtime.settings.batch_size, self._limits, runtime.health.outage)
        )

    def run(self) -> int:
        """Batches until nothing is due, for a second at most. Returns how many rows were due."""
        until = self._clock.monotonic() + PASS_SECONDS
        total = 0
        while True:
            count = self.run_once()
            total += count
            if count < self._runtime.settings.batch_size or self._clock.monotonic() >= until:
                return total

    def close(self) -> None:
        """Let go of the broker connection."""
        self._publisher.close()

    def _settle(self) -> None:
        """Note what became of what was published. Until then its rows stay as the take wrote them, so a
        note may come as late as it must: it finds them so, or it finds that others have gone on."""
        due = self._runtime.store.due
        while self._owed:
            published = self._owed[0]
            due.confirm(published.sent, self._runtime.settings.resend_delay)
            due.give_back(published.unsent)
            due.set_aside(published.broken)
            self._owed.pop(0)

    def _report(self, batch: Batch) -> None:
        for key in batch.unreadable:
            logger.error("Row %s cannot be read and is set aside for an hour", key)
        for crashed in batch.crashed:
            self._report_crash(crashed)

    def _report_crash(self, crashed: Crashed) -> None:
        outcome, fields = crashed.outcome, about(crashed.task_name, crashed.task_id)
        if outcome is not None and outcome.kind == OutcomeKind.QUARANTINED:
            logger.error(
                "%s[%s] is quarantined: %s", crashed.task_name, crashed.task_id, outcome.reason, extra=fields
            )
            signals.task_quarantined.send(
                sender=self._app.tasks.get(crashed.task_name) or crashed.task_name,
                task_id=crashed.task_id,
                token=None,
                reason=outcome.reason,
            )
        else:
            logger.warning(
                "The lease of %s[%s] ran out: its worker is gone (%s)",
                crashed.task_name,
                crashed.task_id,
                f"crash {crashed.crashes}" if crashed.counted else "not counted as a crash",
                extra=fields,
            )
