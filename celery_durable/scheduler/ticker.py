"""One round of a scheduler: run due entries, dispatch due rows, keep house; then wait for the next thing.

There is no leader and nothing is kept in memory that matters: any number of these share the work, and each
may die at any point.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_durable.clock import Clock, SystemClock
from celery_durable.dispatch import Dispatcher
from celery_durable.errors import ConfigurationError, StoreUnavailable, WrongTables
from celery_durable.reach import Reach
from celery_durable.scheduler.plan import REFRESH, Plan
from celery_durable.scheduler.state import HealthFile, State
from celery_durable.store.due import Outlook

logger = logging.getLogger(__name__)

#: Seconds between two notes of a scheduler that it is alive.
TICK_INTERVAL = 20.0
#: Seconds between two looks for what can be pruned; while there is more, the shorter one.
PRUNE_INTERVAL = 60.0
PRUNE_PAUSE = 1.0
PRUNE_BATCH = 500
#: Seconds between two reminders of tables that do not fit.
REMIND_INTERVAL = 60.0
#: The longest wait, whatever the poll interval: somebody may be watching whether we still tick.
LONGEST_WAIT = 20.0
#: Seconds before rows that are due, but held by somebody, are tried again: doubled up to a poll interval.
HELD_PAUSE = 0.02
#: Seconds before the next round after one that failed for no known reason.
FAILED_PAUSE = 5.0


class Ticker:
    """The rounds of one scheduler process.

    ``durable`` is the app's extension object. ``plan`` runs the beat schedule, where there is one.
    """

    def __init__(
        self,
        durable: Any,
        dispatcher: Dispatcher,
        *,
        plan: Plan | None = None,
        health: HealthFile | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._durable = durable
        self._store = durable.store
        self._runtime = durable.runtime
        self._settings = durable.settings
        self._dispatcher = dispatcher
        self._plan = plan
        self._health = health or HealthFile.of_environment()
        self._clock = clock or SystemClock()
        self._database = Reach("The database", logger, self._clock)
        self._hints = self._store.hints()
        self._is_prepared = False
        self._held = 0
        self._noted_at: float | None = None
        self._kept_at: float | None = None
        self._prune_at = 0.0
        self._remind_at = 0.0

    @property
    def state(self) -> State:
        """How it goes."""
        if self._database.is_away:
            return "database away"
        return "broker away" if self._dispatcher.broker.is_away else "ok"

    def run_once(self) -> float:
        """One round. Returns the seconds after which the next one makes sense; 0: at once.

        Raises:
            ConfigurationError: at the first round that reaches the database: its tables do not fit, and
                must not be touched. Nothing else is raised: what fails is logged and tried again.
        """
        try:
            delay = self._round()
        except StoreUnavailable as error:
            self._database.lost(error.reason if type(error) is StoreUnavailable else error)
            self._remind(error)
            delay = self._database.retry_in
        except ConfigurationError:
            raise
        except Exception:
            logger.exception("This round of the scheduler failed, trying again in %d s", FAILED_PAUSE)
            delay = FAILED_PAUSE
        self._health.write(self.state)
        return delay

    def _remind(self, error: StoreUnavailable) -> None:
        """An outage ends by itself, and is told of once; this needs somebody."""
        now = self._clock.monotonic()
        if isinstance(error, WrongTables) and now >= self._remind_at:
            self._remind_at = now + REMIND_INTERVAL
            logger.error("%s", error)

    def wait(self, seconds: float) -> None:
        """Wait so long, or until there is a hint of something nearer."""
        if seconds <= 0:
            return
        if self._database.is_away:
            self._clock.pause(seconds)
        else:
            self._hints.wait(seconds)

    def close(self) -> None:
        """Let go of broker and hints. Not called from within a round."""
        self._dispatcher.close()
        self._hints.close()
        self._health.remove()

    # -- the round -------------------------------------------------------------------------------

    def _round(self) -> float:
        self._hints.arm()
        outlook = self._poll()
        self._database.back()
        messages = self._plan.run_due(outlook.now) if self._plan is not None else 0
        is_due = messages > 0 or (outlook.due_in is not None and outlook.due_in <= 0)
        rest = self._dispatch() if is_due else self._until(outlook)
        self._keep_house()
        waits: list[float] = [rest, self._settings.poll_interval, LONGEST_WAIT]
        entry_in = self._plan.due_in() if self._plan is not None else None
        if entry_in is not None:
            waits.append(entry_in)
        return max(min(waits), 0.0)

    def _poll(self) -> Outlook:
        if not self._is_prepared:
            self._durable.prepare_tables()
            self._is_prepared = True
        try:
            return self._watched_poll()
        except StoreUnavailable:
            # A connection that lay in the pool through a restart of the database fails once.
            if self._database.is_away:
                raise
            return self._watched_poll()

    def _watched_poll(self) -> Outlook:
        outlook: Outlook = self._runtime.health.watch(self._store.due.poll)
        return outlook

    def _until(self, outlook: Outlook) -> float:
        self._held = 0
        return LONGEST_WAIT if outlook.due_in is None else outlook.due_in

    def _dispatch(self) -> float:
        """A pass. Returns when the next one makes sense."""
        found = self._dispatcher.run()
        if self._dispatcher.broker.is_away:
            return self._dispatcher.broker.retry_in
        if found:
            self._held = 0
            return 0.0
        self._held += 1
        pause: float = HELD_PAUSE * 2.0 ** min(self._held, 10)
        return pause

    # -- the house -------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        now = self._clock.monotonic()
        if self._noted_at is None or now - self._noted_at >= TICK_INTERVAL:
            self._store.schedule.tick()
            self._noted_at = now
        if self._kept_at is None or now - self._kept_at >= REFRESH:
            if self._plan is not None:
                self._plan.keep()
            self._store.schedule.prune()
            self._kept_at = now
        if now >= self._prune_at:
            self._prune_at = now + self._prune()

    def _prune(self) -> float:
        """Prune one batch. Returns the pause before the next."""
        settings = self._settings
        pruned = self._store.queries.prune(settings.retention, settings.retention_failed, PRUNE_BATCH)
        return PRUNE_PAUSE if pruned >= PRUNE_BATCH else PRUNE_INTERVAL
