"""What is stored of a beat schedule: one scheduler runs an entry, and owes its message from then on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest

from celery_durable.records import Due, Status
from celery_durable.store import Store
from celery_durable.store.schedule import UNSEEN_SECONDS, Definition, EntryState, Taken
from tests.store.messages import columns, count_rows, due_in, follower, keys, schedule, take

HOUR = timedelta(hours=1)


def define(store: Store, name: str = "report", definition: str = "v1", *, due_in: float = 0.0) -> EntryState:
    """An entry that is due in so many seconds."""
    store.schedule.define([Definition(name, definition, store.now() + timedelta(seconds=due_in))])
    return load(store, name)


def load(store: Store, name: str = "report") -> EntryState:
    return store.schedule.load([name])[0][name]


def taken(store: Store, state: EntryState | None = None, seconds: float = 10.0) -> Taken:
    """An entry that this scheduler is about to run."""
    found = store.schedule.take(state or load(store), seconds)
    assert found is not None
    return found


class TestDefinition:
    def test_a_new_entry_is_written_and_its_time_begins_now(self, store: Store) -> None:
        first = store.now() + HOUR
        store.schedule.define([Definition("report", "v1", first)])
        state = load(store)
        assert (state.definition, state.total_run_count) == ("v1", 0)
        assert state.last_run_at is not None
        assert abs(state.last_run_at - state.seen_at) <= timedelta(seconds=1)
        assert state.next_run_at is not None
        assert abs(state.next_run_at - first) <= timedelta(milliseconds=1)

    def test_an_unchanged_one_keeps_its_time(self, store: Store) -> None:
        before = define(store, due_in=60)
        assert define(store, due_in=999) == before

    def test_a_changed_one_gets_a_new_time_and_keeps_what_it_has_done(self, store: Store) -> None:
        define(store)
        store.schedule.advance(taken(store), store.now() + HOUR, has_run=True)
        ran = load(store)
        state = define(store, definition="v2", due_in=60)
        assert (state.definition, state.total_run_count) == ("v2", 1)
        assert state.last_run_at == ran.last_run_at
        assert state.next_run_at is not None
        assert state.next_run_at < store.now() + HOUR

    def test_an_entry_may_have_no_next_time(self, store: Store) -> None:
        store.schedule.define([Definition("never", "v1", None)])
        assert load(store, "never").next_run_at is None

    def test_many_are_written_and_read_at_once(self, store: Store) -> None:
        names = [f"entry {number}" for number in range(200)]
        store.schedule.define([Definition(name, "v1", store.now()) for name in names])
        found, _ = store.schedule.load([*names, "unknown"])
        assert sorted(found) == sorted(names)

    def test_two_schedulers_that_start_together_write_one_set(self, store: Store) -> None:
        now = store.now()

        def start(_: int) -> None:
            store.schedule.define([Definition(f"entry {number}", "v1", now) for number in range(20)])

        with ThreadPoolExecutor(4) as schedulers:
            list(schedulers.map(start, range(4)))
        assert len(store.schedule.load([f"entry {number}" for number in range(20)])[0]) == 20

    def test_another_namespace_has_entries_of_its_own(
        self, store: Store, open_store: Callable[..., Store]
    ) -> None:
        other = open_store(namespace="others")
        define(other)
        assert store.schedule.load(["report"])[0] == {}


class TestTake:
    def test_only_a_due_entry_can_be_taken(self, store: Store) -> None:
        assert store.schedule.take(define(store, due_in=60), 10.0) is None

    def test_one_of_many_gets_it(self, store: Store) -> None:
        state = define(store)
        with ThreadPoolExecutor(8) as schedulers:
            answers = list(schedulers.map(lambda _: store.schedule.take(state, 10.0), range(8)))
        assert len([answer for answer in answers if answer is not None]) == 1

    def test_one_that_dies_with_it_leaves_it_to_the_next_after_its_time(self, store: Store) -> None:
        define(store)
        taken(store, seconds=10)
        store.time_offset[0] += 9
        assert store.schedule.take(load(store), 10.0) is None
        store.time_offset[0] += 1.1
        assert store.schedule.take(load(store), 10.0) is not None

    def test_an_old_idea_of_when_it_is_due_is_refused(self, store: Store) -> None:
        stale = define(store)
        store.schedule.advance(taken(store), store.now() - HOUR, has_run=True)
        assert store.schedule.take(stale, 10.0) is None

    def test_an_old_definition_is_refused(self, store: Store) -> None:
        stale = define(store)
        define(store, definition="v2")
        assert store.schedule.take(stale, 10.0) is None


class TestAdvance:
    def test_the_entry_moves_on_and_its_message_is_there_to_be_sent(self, store: Store) -> None:
        define(store)
        mine = taken(store)
        plain = follower("plain", is_durable=False)
        advanced = store.schedule.advance(mine, store.now() + HOUR, has_run=True, messages=[plain])
        assert advanced is not None
        assert advanced.state == load(store)
        assert (advanced.state.total_run_count, advanced.state.last_run_at) == (1, mine.now)
        assert advanced.state.taken_until is None
        (outgoing,) = take(store)
        assert (outgoing.key, outgoing.status) == (plain.key, Status.OUTBOX)

    def test_a_run_that_is_skipped_counts_for_nothing(self, store: Store) -> None:
        before = define(store)
        advanced = store.schedule.advance(taken(store), store.now() + HOUR, has_run=False)
        assert advanced is not None
        assert (advanced.state.total_run_count, advanced.state.last_run_at) == (0, before.last_run_at)

    def test_the_message_of_a_durable_task_is_its_execution(self, store: Store) -> None:
        define(store)
        durable = follower("durable", is_durable=True)
        store.schedule.advance(taken(store), store.now() + HOUR, has_run=True, messages=[durable])
        assert columns(store, "durable").status == Status.SCHEDULED
        assert keys(take(store)) == ["durable"]

    def test_a_message_with_a_countdown_waits(self, store: Store) -> None:
        define(store)
        later = follower("durable", is_durable=True, due=Due(seconds=600))
        store.schedule.advance(taken(store), store.now() + HOUR, has_run=True, messages=[later])
        assert 590 < due_in(store, "durable") <= 600

    def test_a_task_id_that_is_in_use_refuses_the_message_and_not_the_advance(self, store: Store) -> None:
        schedule(store, "busy", due_in=60)
        define(store)
        again = follower("busy", is_durable=True, send_id="another send")
        advanced = store.schedule.advance(taken(store), store.now() + HOUR, has_run=True, messages=[again])
        assert advanced is not None
        ((refused, refusal),) = advanced.refused
        assert refused is again
        assert refusal.is_fresh_send

    def test_a_scheduler_that_was_too_slow_changes_nothing_and_sends_nothing(self, store: Store) -> None:
        define(store)
        slow = taken(store, seconds=10)
        store.time_offset[0] += 10.1
        taken(store)
        before = load(store)
        message = follower("plain", is_durable=False)
        assert store.schedule.advance(slow, store.now() + HOUR, has_run=True, messages=[message]) is None
        assert load(store) == before
        assert count_rows(store) == 0

    def test_one_that_was_slow_but_met_nobody_goes_through(self, store: Store) -> None:
        define(store)
        slow = taken(store, seconds=10)
        store.time_offset[0] += 60
        assert store.schedule.advance(slow, store.now() + HOUR, has_run=True) is not None

    def test_a_message_that_cannot_be_written_takes_the_advance_back(self, store: Store) -> None:
        define(store)
        mine = taken(store)
        plain = follower("plain", is_durable=False)
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
            # The same key twice: the second insert fails.
            store.schedule.advance(mine, store.now() + HOUR, has_run=True, messages=[plain, plain])
        assert load(store).total_run_count == 0
        assert count_rows(store) == 0


class TestHouse:
    def test_a_scheduler_that_ticks_is_seen(self, store: Store) -> None:
        assert store.schedule.seconds_since_tick() is None
        store.schedule.tick()
        store.time_offset[0] += 30
        seconds = store.schedule.seconds_since_tick()
        assert seconds is not None
        assert 30 <= seconds < 35
        store.schedule.tick()
        again = store.schedule.seconds_since_tick()
        assert again is not None
        assert again < 5

    def test_an_entry_without_a_scheduler_is_dropped_after_a_month(self, store: Store) -> None:
        define(store, "kept", "k1")
        define(store, "dropped", "d1")
        define(store, "changed", "c1")
        store.schedule.tick()
        store.time_offset[0] += UNSEEN_SECONDS - 60
        store.schedule.keep({"kept": "k1", "changed": "c2"})
        assert store.schedule.prune() == 0
        store.time_offset[0] += 120
        assert store.schedule.prune() == 2
        assert list(store.schedule.load(["kept", "dropped", "changed"])[0]) == ["kept"]
        assert store.schedule.seconds_since_tick() is not None


def test_the_clock_is_the_databases(store: Store) -> None:
    now = store.schedule.load([])[1]
    assert isinstance(now, datetime)
    assert abs(now - store.now()) < timedelta(seconds=5)
