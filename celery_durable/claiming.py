"""Claiming what arrives, and telling the worker's main process what became of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from celery_durable.clock import Clock, SystemClock
from celery_durable.errors import StoreUnavailable
from celery_durable.logs import about
from celery_durable.points import Point, reached
from celery_durable.records import Claim, Delivery, LeaseKey, Outcome, OutcomeKind, Refusal, Scheduled
from celery_durable.runtime import Runtime
from celery_durable.settings import TaskSettings

logger = logging.getLogger(__name__)

#: Seconds between two tries of a claim that the database did not answer: the first, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
#: Seconds for which a wake is held while the database is away. Its row sends another, but not at once.
HOLD_WAKE = 10.0


class Verdict:
    """What the worker's main process is told of a delivery."""

    CLAIMED = 1
    DECLINED = 2
    CANCELLED = 3
    EXPIRED = 4
    PUT_BACK = 5
    LOST = 6


class Reporter(Protocol):
    """The way to the worker's main process."""

    def report(self, number: int, verdict: int, key: LeaseKey | None) -> None: ...

    @property
    def is_stopping(self) -> bool: ...


class Claiming:
    """Claims deliveries for one process."""

    def __init__(
        self, runtime: Callable[[], Runtime], reporter: Reporter, clock: Clock | None = None
    ) -> None:
        self._runtime = runtime
        self._reporter = reporter
        self._clock = clock or SystemClock()
        #: Since when this process has been claiming in vain.
        self._away_since: float | None = None

    def claim(self, delivery: Delivery, limits: TaskSettings) -> Claim | Refusal | Scheduled | None:
        """Claim a delivery.

        While the database is away a first delivery is held, and tried again: its message is the only
        thing that there is of it. A wake is dropped after a while: its row will send another. None: the
        worker stops, and the message has to go back to the broker.
        """
        pause = FIRST_PAUSE
        level = logging.WARNING
        fields = about(delivery.task_name, delivery.task_id)
        give_up_at = self._clock.monotonic() + HOLD_WAKE
        while not self._reporter.is_stopping:
            try:
                claim = self._claim(delivery, limits)
            except StoreUnavailable as error:
                if delivery.is_wake and self._clock.monotonic() >= give_up_at:
                    return Refusal(f"its row will send another: {error.reason}")
                # The sentence in full once for a process and an outage, and a line once for a delivery.
                reason = error if self._away_since is None else "the durable database is still away"
                self._away_since = self._away_since or self._clock.monotonic()
                logger.log(
                    level, "%s[%s] is held: %s", delivery.task_name, delivery.task_id, reason, extra=fields
                )
                level = logging.DEBUG
            except Exception as error:
                if delivery.is_wake and self._clock.monotonic() >= give_up_at:
                    # With a row that is to blame, each wake of it would hold a process for ever.
                    return Refusal(f"its row will send another: {error!r:.200}")
                # Whatever is wrong with the database (tables that are not there, a lack of rights): told as
                # an error of the task it would be the end of its only message.
                logger.exception("%s[%s] is held", delivery.task_name, delivery.task_id, extra=fields)
            else:
                self._note_return()
                return claim
            self._clock.pause(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        return None

    def _note_return(self) -> None:
        since, self._away_since = self._away_since, None
        if since is not None:
            logger.info("The durable database is back after %.1f s", self._clock.monotonic() - since)

    def _claim(self, delivery: Delivery, limits: TaskSettings) -> Claim | Refusal | Scheduled:
        runtime = self._runtime()
        return runtime.health.watch(
            lambda: runtime.store.claims.claim(
                delivery, runtime.owner, limits.lease_ttl, limits.max_crashes, runtime.health.outage
            )
        )

    def accept(self, number: int, key: LeaseKey) -> None:
        """The claim has committed: the message belongs to the lease now, and can be acknowledged."""
        reached(Point.CLAIM_COMMITTED)
        self._reporter.report(number, Verdict.CLAIMED, key)
        reached(Point.CLAIM_REPORTED)

    def decline(self, number: int) -> None:
        """There is nothing to run: the message can be acknowledged."""
        reached(Point.CLAIM_REFUSED)
        self._reporter.report(number, Verdict.DECLINED, None)

    def put_back(self, number: int) -> None:
        """The message could not be claimed: the broker gets it back."""
        self._reporter.report(number, Verdict.PUT_BACK, None)

    def revoke(self, number: int, key: LeaseKey, outcome: Outcome) -> None:
        """A cancel or an expiry is to be told by the main process, which then ends the row."""
        kind = Verdict.CANCELLED if outcome.kind == OutcomeKind.CANCELLED else Verdict.EXPIRED
        reached(Point.VERDICT_CLAIMED)
        self._reporter.report(number, kind, key)

    def lose(self, number: int) -> None:
        """The lease is lost, and its run is being stopped: if that takes its process, it is no crash."""
        self._reporter.report(number, Verdict.LOST, None)
