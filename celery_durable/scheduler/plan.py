"""The entries of a beat schedule, and what the database knows about them.

The schedule itself belongs to Celery's scheduler object: anybody may add to it, replace entries, or edit
them, at any time. What is kept here is only what the last look at it found, to see what has changed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from celery.beat import ScheduleEntry
from celery.result import denied_join_result

from celery_durable.calendar import Fire, Skip, advance, definition_hash, next_run
from celery_durable.capture import capturing
from celery_durable.clock import Clock, SystemClock
from celery_durable.errors import StoreUnavailable
from celery_durable.followers import follower_of
from celery_durable.points import Point, reached
from celery_durable.records import Follower
from celery_durable.rules import DISPATCH_LEASE
from celery_durable.store.schedule import Definition, EntryState, ScheduleRows, Taken

logger = logging.getLogger(__name__)

#: Seconds between two calls of ``keep``.
REFRESH = 300.0
#: Seconds after which an entry that another scheduler has defined otherwise, and shows no more, is ours.
ABANDONED = 3 * REFRESH
#: Seconds before an entry that another scheduler is running is looked at again, and one that has failed.
BUSY = 1.0
FAILED = 60.0


@dataclass(slots=True)
class _Known:
    """One entry as it was last seen. ``parts`` are what its definition is made of."""

    parts: tuple[Any, ...]
    definition: str
    #: It was defined here just now, so what is stored gives way to it.
    is_new: bool = True
    state: EntryState | None = None
    #: On our own clock: not before then.
    held_until: float = 0.0
    #: Seconds that its message took to be built, at most.
    took: float = 0.0


class Plan:
    """Runs the due entries of one scheduler object (Celery's ``Scheduler``)."""

    def __init__(self, scheduler: Any, rows: ScheduleRows, clock: Clock | None = None) -> None:
        self._scheduler = scheduler
        self._rows = rows
        self._clock = clock or SystemClock()
        self._known: dict[str, _Known] = {}
        self._is_stale = True
        self._foreign: set[str] = set()
        self._told: tuple[datetime, float] | None = None

    def run_due(self, now: datetime) -> int:
        """Run what is due: move each entry on and write its message. Returns how many messages.

        ``now``: the database's time. One entry that fails does not stop the others. Raises
        StoreUnavailable.
        """
        self._tell(now)
        self._look()
        ours = self._clock.monotonic()
        due = [
            (known.state.next_run_at, name)
            for name, known in self._known.items()
            if known.state is not None
            and known.state.next_run_at is not None
            and known.held_until <= ours
            and known.state.next_run_at <= self._now(ours)
        ]
        return sum(self._run_safely(name) for _, name in sorted(due))

    def due_in(self) -> float | None:
        """Seconds until the next entry is due, None where none ever is."""
        ours = self._clock.monotonic()
        now = self._now(ours)
        waits = [
            max((known.state.next_run_at - now).total_seconds(), known.held_until - ours)
            for known in self._known.values()
            if known.state is not None and known.state.next_run_at is not None
        ]
        return min(waits, default=None)

    def keep(self) -> None:
        """Note that a scheduler still has these entries, and see what other schedulers did to them."""
        self._rows.keep({n: known.definition for n, known in self._known.items() if n not in self._foreign})
        self._is_stale = True

    # -- looking ---------------------------------------------------------------------------------

    def _tell(self, now: datetime) -> None:
        self._told = (now, self._clock.monotonic())

    def _now(self, ours: float) -> datetime:
        """The database's time, as far as we know it without asking."""
        assert self._told is not None
        now, then = self._told
        return now + timedelta(seconds=ours - then)

    def _look(self) -> None:
        """Bring what is known up to date with the schedule, and with the database now and then."""
        schedule: Mapping[str, ScheduleEntry] = self._scheduler.schedule
        for name in self._known.keys() - schedule.keys():
            del self._known[name]
            self._foreign.discard(name)
        for name, entry in list(schedule.items()):
            parts = (entry.task, entry.schedule, entry.args, entry.kwargs, entry.options)
            if not self._is_known(name, parts):
                self._learn(name, parts)
        ours = self._clock.monotonic()
        unknown = [n for n, known in self._known.items() if not known.state and known.held_until <= ours]
        self._load(list(self._known) if self._is_stale else unknown)
        self._is_stale = False

    def _is_known(self, name: str, parts: tuple[Any, ...]) -> bool:
        known = self._known.get(name)
        # An advanced entry is a new object with the old parts; only what was empty is made anew.
        return known is not None and all(
            a is b or not (a or b) for a, b in zip(known.parts, parts, strict=True)
        )

    def _learn(self, name: str, parts: tuple[Any, ...]) -> None:
        """Note an entry that is new or was changed."""
        known = self._known.get(name)
        try:
            task, schedule, args, kwargs, options = parts
            definition = definition_hash(task, schedule, args, kwargs, _without_mark(options))
        except Exception as error:  # noqa: BLE001 - a schedule of somebody else's class
            definition = f"unreadable: {error!r}"
        if known is not None and known.definition == definition:
            known.parts = parts
        else:
            self._known[name] = _Known(parts, definition)

    def _load(self, names: Sequence[str]) -> None:
        """Read what is stored of some entries, and define those that are new or were changed."""
        if not names:
            return
        stored, now = self._rows.load(names)
        self._tell(now)
        wanted = [name for name in names if self._is_ours_to_define(name, stored.get(name), now)]
        definitions = [found for name in wanted if (found := self._definition(name, now)) is not None]
        if definitions:
            self._rows.define(definitions)
            again, _ = self._rows.load([definition.name for definition in definitions])
            stored |= again
        failed = set(wanted).difference(definition.name for definition in definitions)
        for name in names:
            if name not in failed:
                self._adopt(name, stored.get(name))

    def _is_ours_to_define(self, name: str, state: EntryState | None, now: datetime) -> bool:
        known = self._known[name]
        if state is None:
            return True
        if state.definition == known.definition:
            return False
        # The last scheduler to start has its way. One that has been up for longer may have an older
        # configuration: it steps in only once nobody else has the newer one any more.
        return known.is_new or (now - state.seen_at).total_seconds() > ABANDONED

    def _definition(self, name: str, now: datetime) -> Definition | None:
        """What is to be written for an entry that is new or was changed: it runs at its next occurrence."""
        try:
            first = next_run(self._entry(name).schedule, now, anchor=now, ask_within=self._ask_within)
        except Exception:  # noqa: BLE001 - a schedule of somebody else's class
            self._failed(name)
            return None
        return Definition(name, self._known[name].definition, first)

    def _adopt(self, name: str, state: EntryState | None) -> None:
        known = self._known[name]
        known.is_new = False
        if state is None or state.definition != known.definition:
            known.state = None if state is None else replace(state, next_run_at=None)
            if state is not None and name not in self._foreign:
                self._foreign.add(name)
                logger.warning("Entry %r was changed by another scheduler, which runs it from now on", name)
            return
        self._foreign.discard(name)
        known.state = state
        entry = self._entry(name)
        entry.total_run_count = state.total_run_count
        if state.last_run_at is not None:
            entry.last_run_at = state.last_run_at

    def _entry(self, name: str) -> Any:
        return self._scheduler.schedule[name]

    # -- running ---------------------------------------------------------------------------------

    def _run_safely(self, name: str) -> int:
        try:
            return self._run(name)
        except StoreUnavailable:
            raise
        except Exception:  # noqa: BLE001 - one entry must not stop the others
            self._failed(name)
            return 0

    def _failed(self, name: str) -> None:
        self._known[name].held_until = self._clock.monotonic() + FAILED
        logger.error("Entry %r cannot be run, trying again in %d s", name, FAILED, exc_info=sys.exc_info())

    def _run(self, name: str) -> int:
        known = self._known[name]
        assert known.state is not None
        # Two schedulers whose builders outlast the usual time would take the entry from each other for ever.
        taken = self._rows.take(known.state, max(DISPATCH_LEASE, 2 * known.took))
        if taken is None:
            self._lost(name)
            return 0
        entry = self._entry(name)
        reached(Point.ENTRY_TAKEN)
        step = advance(
            entry.schedule,
            _due(taken),
            taken.now,
            last_run_at=taken.state.last_run_at,
            policy=getattr(entry, "misfire", "coalesce"),
            grace=getattr(entry, "misfire_grace", None),
            cron_deadline=self._scheduler.app.conf.beat_cron_starting_deadline,
            ask_within=self._ask_within,
        )
        messages: list[Follower] = []
        if isinstance(step.decision, Fire):
            messages = self._build(name, entry)
        elif isinstance(step.decision, Skip):
            logger.warning("Entry %r is skipped: it is %s late", name, step.decision.late)
        advanced = self._rows.advance(
            taken, step.next_run_at, has_run=isinstance(step.decision, Fire), messages=messages
        )
        if advanced is None:
            logger.warning("Entry %r took too long to be sent: another scheduler has it by now", name)
            self._lost(name)
            return 0
        reached(Point.ENTRY_ADVANCED)
        for follower, refusal in advanced.refused:
            logger.warning("Entry %r: %s was not sent: %s", name, follower.key, refusal.reason)
        self._adopt(name, advanced.state)
        return len(messages)

    def _build(self, name: str, entry: Any) -> list[Follower]:
        """Have Celery's own code make the message; what it would have published is caught."""
        scheduler, began = self._scheduler, self._clock.monotonic()
        scheduler.reserve(entry)
        # Nobody waits here for results: where one could, some result stores open a connection at each send
        # to be told of them, and hold the whole round up while their server is away.
        with denied_join_result(), capturing() as caught:
            # In this form, which tools that patch it rely on.
            scheduler.apply_entry(entry, producer=scheduler.producer)
        known = self._known[name]
        known.took = max(known.took, self._clock.monotonic() - began)
        return [follower_of(scheduler.app, captured) for captured in caught]

    def _lost(self, name: str) -> None:
        """Another scheduler was first: see what it made of the entry."""
        self._load([name])
        known = self._known[name]
        ours = self._clock.monotonic()
        state = known.state
        if state is not None and state.next_run_at is not None and state.next_run_at <= self._now(ours):
            known.held_until = ours + BUSY

    @property
    def _ask_within(self) -> timedelta:
        return timedelta(seconds=max(float(self._scheduler.max_interval), 1.0))


def _due(taken: Taken) -> datetime:
    assert taken.state.next_run_at is not None
    return taken.state.next_run_at


def _without_mark(options: Any) -> Any:
    # Celery puts it into the entry's own headers, in place, when it sends it for the first time.
    if not options or "celery_beat_task" not in (options.get("headers") or {}):
        return options
    headers = {name: value for name, value in options["headers"].items() if name != "celery_beat_task"}
    return {**options, "headers": headers}
