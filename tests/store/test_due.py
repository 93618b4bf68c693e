"""Due rows: taken once, oldest first, and moved after the publish only where nobody else has them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text

from celery_durable.records import Claim, Outcome, OutcomeKind, Status
from celery_durable.rules import Outage
from celery_durable.store import Store
from celery_durable.store.due import SET_ASIDE
from tests.store.messages import (
    columns,
    count_rows,
    delivery,
    due_in,
    edit,
    keys,
    put_into_outbox,
    schedule,
    take,
)
from tests.store.rows import fill_asleep


def claim(store: Store, task_id: str, *, is_wake: bool = True, ttl: float = 60.0) -> Claim:
    """What a worker does that gets the message."""
    granted = store.claims.claim(delivery(task_id, is_wake=is_wake), "worker", ttl, 3)
    assert isinstance(granted, Claim)
    return granted


class TestTake:
    @pytest.mark.report("due-is-inclusive")
    def test_it_finds_what_is_due_and_nothing_else(self, store: Store) -> None:
        schedule(store, "past", due_in=-60)
        schedule(store, "now")
        schedule(store, "soon", due_in=60)
        assert keys(take(store)) == ["past", "now"]

    @pytest.mark.report("missed-runs", "backlog")
    def test_a_backlog_drains_in_batches_from_the_oldest_on(self, store: Store) -> None:
        for age in (3, 5, 1, 4, 2):
            schedule(store, f"{age} s old", due_in=-age)
        batches = [keys(take(store, 2)), keys(take(store, 2)), keys(take(store, 2)), keys(take(store, 2))]
        assert batches == [["5 s old", "4 s old"], ["3 s old", "2 s old"], ["1 s old"], []]

    def test_what_is_taken_is_not_due_for_ten_seconds_and_then_it_is(self, store: Store) -> None:
        schedule(store, "a")
        take(store)
        assert take(store) == ()
        assert 9 < due_in(store, "a") <= 10
        store.time_offset[0] += 10.1
        (again,) = take(store)
        assert again.sends == 2, "it knows that it was sent before"

    @pytest.mark.report("one-dispatcher")
    def test_many_schedulers_at_once_take_each_row_once(self, store: Store) -> None:
        fill_asleep(store, 300, store.now() - timedelta(hours=6))

        def drain(_: int) -> list[str]:
            found: list[str] = []
            while batch := take(store, 10):
                found += keys(batch)
            return found

        with ThreadPoolExecutor(4) as schedulers:
            taken = [key for found in schedulers.map(drain, range(4)) for key in found]
        assert len(taken) == 300
        assert len(set(taken)) == 300

    def test_another_namespace_is_another_world(self, store: Store, open_store: Callable[..., Store]) -> None:
        other = open_store(namespace="others")
        schedule(other, "theirs", due_in=-60)
        assert take(store) == ()
        assert store.due.poll().wake_at is None
        assert keys(take(other)) == ["theirs"]

    @pytest.mark.report("ended-never-wakes")
    def test_an_ended_execution_is_never_due(self, store: Store) -> None:
        schedule(store, "a")
        take(store)
        key = claim(store, "a").key
        store.runs.end(key, Outcome(OutcomeKind.VALUE), 60.0)
        assert store.runs.finish(key, Status.SUCCEEDED)
        store.time_offset[0] += 86400
        assert take(store) == ()

    @pytest.mark.report("unreadable-row")
    def test_a_row_that_cannot_be_read_is_set_aside_and_holds_up_nobody(self, store: Store) -> None:
        schedule(store, "empty", "garbled", "good", due_in=-1)
        edit(store, "empty", body=None)
        edit(store, "garbled", outcome="{", owner="somebody")
        batch = store.due.take(100, lambda _name: (3, 60.0))
        assert keys(batch.outgoing) == ["good"]
        assert sorted(batch.unreadable) == ["empty", "garbled"]
        assert SET_ASIDE - 5 < due_in(store, "empty") <= SET_ASIDE
        assert store.due.take(100, lambda _name: (3, 60.0)).found == 0


class TestExpiredLeases:
    def crash(self, store: Store, task_id: str, **take_arguments: Any) -> Any:
        """The lease of a task runs out, and a scheduler finds it."""
        store.time_offset[0] += 61
        batch = store.due.take(100, lambda _name: (3, 60.0), **take_arguments)
        (crashed,) = batch.crashed
        assert crashed.task_id == task_id
        return batch, crashed

    @pytest.mark.report("crash-limit")
    def test_the_first_crash_is_sent_again_at_once_the_second_waits_the_third_is_quarantined(
        self, store: Store
    ) -> None:
        claim(store, "a", is_wake=False)
        batch, crashed = self.crash(store, "a")
        assert (crashed.crashes, crashed.counted, keys(batch.outgoing)) == (1, True, ["a"])
        assert columns(store, "a").owner is None

        claim(store, "a")
        batch, crashed = self.crash(store, "a")
        assert (crashed.crashes, batch.outgoing) == (2, ())
        assert 0 < due_in(store, "a") <= 2

        store.time_offset[0] += 2.1
        assert keys(take(store)) == ["a"]
        claim(store, "a")
        batch, crashed = self.crash(store, "a")
        assert crashed.outcome.kind == OutcomeKind.QUARANTINED
        assert keys(batch.outgoing) == ["a"], "somebody has to be told"
        row = columns(store, "a")
        assert (row.status, row.crashes, row.sends) == (Status.ENDING, 0, 1)

    def test_a_worker_that_said_it_was_stopping_has_not_crashed(self, store: Store) -> None:
        store.leases.mark_draining([claim(store, "a", is_wake=False).key])
        batch, crashed = self.crash(store, "a")
        assert (crashed.counted, crashed.crashes, keys(batch.outgoing)) == (False, 0, ["a"])

    def test_what_ran_out_while_the_database_was_away_has_not_crashed(self, store: Store) -> None:
        claim(store, "a", is_wake=False)
        began = store.now()
        _, crashed = self.crash(store, "a", outage=Outage(began, began + timedelta(seconds=60)))
        assert (crashed.counted, crashed.crashes) == (False, 0)

    def test_a_live_lease_is_left_alone(self, store: Store) -> None:
        claim(store, "a", is_wake=False)
        store.time_offset[0] += 59
        assert store.due.take(100, lambda _name: (3, 60.0)).found == 0
        assert columns(store, "a").owner == "worker"


class TestAfterThePublish:
    @pytest.mark.report("lost-and-doubled-wakes")
    def test_a_confirmed_wake_is_due_again_if_nobody_claims_it_ever_later(self, store: Store) -> None:
        schedule(store, "a")
        waits = []
        for _ in range(8):
            sent = take(store)
            store.due.confirm(sent, 120.0)
            waits.append(round(due_in(store, "a")))
            store.time_offset[0] += waits[-1] + 1
        assert waits == [120, 240, 480, 960, 1920, 3600, 3600, 3600]

    def test_a_batch_of_old_and_new_wakes_gives_each_its_own_time(self, store: Store) -> None:
        schedule(store, "old")
        take(store)
        store.time_offset[0] += 11
        schedule(store, "new")
        store.due.confirm(take(store), 120.0)
        assert (round(due_in(store, "old")), round(due_in(store, "new"))) == (240, 120)

    def test_a_plain_message_is_gone_once_it_is_confirmed(self, store: Store) -> None:
        put_into_outbox(store, "plain")
        schedule(store, "durable")
        sent = take(store)
        assert {item.status for item in sent} == {Status.OUTBOX, Status.SCHEDULED}
        store.due.confirm(sent, 120.0)
        assert count_rows(store) == 1
        assert columns(store, "durable") is not None

    def test_what_was_not_confirmed_is_due_again_after_a_growing_pause(self, store: Store) -> None:
        schedule(store, "a")
        put_into_outbox(store, "plain")
        waits = []
        for _ in range(9):
            unsent = take(store)
            assert len(unsent) == 2, "nothing is lost"
            store.due.give_back(unsent)
            waits.append(round(due_in(store, "a"), 1))
            store.time_offset[0] += waits[-1] + 0.1
        assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]

    def test_what_was_not_confirmed_does_not_count_as_sent(self, store: Store) -> None:
        """A broker that was away for long leads to no long pause afterwards, and to no verdict."""
        schedule(store, "new", "old")
        store.due.confirm(take(store), 120.0)
        edit(store, "new", sends=0, wake_at=store.now())
        for _ in range(40):
            store.time_offset[0] += 3600
            unsent = take(store)
            assert {item.key: item.sends for item in unsent} == {"new": 1, "old": 2}
            store.due.give_back(unsent)
            assert due_in(store, "new") <= 30
        store.time_offset[0] += 31
        store.due.confirm(take(store), 120.0)
        assert (round(due_in(store, "new")), round(due_in(store, "old"))) == (120, 240)
        store.time_offset[0] += 241
        assert {item.key: item.sends for item in take(store)} == {"new": 2, "old": 3}

    def test_what_was_not_confirmed_may_have_arrived_all_the_same(self, store: Store) -> None:
        schedule(store, "a")
        store.due.give_back(take(store))
        assert claim(store, "a").key.token == 1

    def test_the_failures_of_one_wait_do_not_count_for_the_next(self, store: Store) -> None:
        schedule(store, "a")
        for _ in range(3):
            store.due.give_back(take(store))
            store.time_offset[0] += 31
        key = claim(store, "a").key
        assert store.leases.hand_back(key)
        (again,) = take(store)
        store.due.give_back([again])
        assert (again.sends, again.failures, due_in(store, "a") <= 0.5) == (1, 0, True)

    def test_what_cannot_be_sent_waits_for_an_hour(self, store: Store) -> None:
        schedule(store, "a")
        store.due.set_aside(take(store))
        assert SET_ASIDE - 5 < due_in(store, "a") <= SET_ASIDE

    def test_nothing_to_note_is_no_statement(self, store: Store) -> None:
        with counted_statements(store) as statements:
            store.due.confirm([], 120.0)
            store.due.give_back([])
            store.due.set_aside([])
        assert statements == []

    @pytest.mark.parametrize("note", ["confirm", "give_back", "set_aside"])
    def test_a_lease_that_was_claimed_meanwhile_is_not_touched(self, store: Store, note: str) -> None:
        schedule(store, "a")
        batch = take(store)
        claim(store, "a")
        lease = columns(store, "a")
        self.say(store, note, batch)
        assert columns(store, "a") == lease

    @pytest.mark.parametrize("note", ["confirm", "give_back", "set_aside"])
    def test_a_late_note_does_not_undo_what_another_scheduler_did(self, store: Store, note: str) -> None:
        schedule(store, "a")
        put_into_outbox(store, "plain")
        late = take(store)
        store.time_offset[0] += 10.1
        store.due.give_back(take(store))
        before = columns(store, "a")
        self.say(store, note, late)
        assert columns(store, "a") == before
        assert count_rows(store) == 2, "the plain message is still to be sent"

    @pytest.mark.parametrize("note", ["confirm", "give_back"])
    def test_a_note_may_come_late_where_nobody_else_has_been(self, store: Store, note: str) -> None:
        """After an outage of the database what was published is noted, however long it took."""
        schedule(store, "a")
        batch = take(store)
        store.time_offset[0] += 600
        self.say(store, note, batch)
        assert due_in(store, "a") > 0

    def say(self, store: Store, note: str, batch: Any) -> None:
        arguments = (batch, 120.0) if note == "confirm" else (batch,)
        getattr(store.due, note)(*arguments)


class TestPoll:
    def test_it_tells_when_the_next_row_is_due(self, store: Store) -> None:
        assert store.due.poll().due_in is None
        schedule(store, "later", due_in=600)
        schedule(store, "sooner", due_in=60)
        outlook = store.due.poll()
        assert outlook.due_in is not None
        assert 59 < outlook.due_in <= 60
        store.time_offset[0] += 61
        again = store.due.poll().due_in
        assert again is not None
        assert -2 < again < 0

    def test_it_is_one_statement(self, store: Store) -> None:
        with counted_statements(store) as statements:
            store.due.poll()
        assert len(statements) == 1


class TestPlans:
    """A hundred thousand rows wait, and the statistics of the database do not know it yet."""

    def fill(self, store: Store) -> None:
        if not store.database.is_sqlite:
            self.run(store, "ALTER TABLE durable_executions SET (autovacuum_enabled = off)")
        fill_asleep(store, 100_000, store.now() - timedelta(minutes=1000), spread=0.6)

    def run(self, store: Store, statement: str) -> list[Any]:
        with store.database.statements() as connection:
            answer = connection.execute(text(statement))
            return list(answer) if answer.returns_rows else []

    def plan(self, store: Store, statement: str, parameters: Any) -> str:
        explain = "EXPLAIN QUERY PLAN" if store.database.is_sqlite else "EXPLAIN (ANALYZE, FORMAT TEXT)"
        with store.database.transaction() as connection:
            store.due.walk_the_index(connection)
            lines = connection.exec_driver_sql(f"{explain} {statement}", parameters)
            return "\n".join(str(line[-1]) for line in lines)

    @pytest.mark.report("many-timers")
    def test_take_and_poll_walk_the_index_and_sort_nothing(self, store: Store) -> None:
        self.fill(store)
        with counted_statements(store) as statements:
            assert len(take(store)) == 100
            store.due.poll()
        queries = [(sql, given) for sql, given in statements if "wake_at" in sql and sql.startswith("SELECT")]
        assert len(queries) == 2
        for statement, parameters in queries:
            plan = self.plan(store, statement, parameters)
            assert "durable_executions_due" in plan
            assert "Sort" not in plan
            assert "TEMP B-TREE" not in plan
            assert "SCAN durable_executions" not in plan.replace("SCAN durable_executions USING", "")


class counted_statements:  # noqa: N801 - reads as a function
    """The statements that a store makes within the block, with their parameters."""

    def __init__(self, store: Store) -> None:
        self._database = store.database
        self._execute = store.database.execute
        self._statements: list[tuple[str, Any]] = []

    def __enter__(self) -> list[tuple[str, Any]]:
        event.listen(self._database.engine, "before_cursor_execute", self._note)
        # What goes past SQLAlchemy's connections.
        self._database.execute = self._note_and_execute  # type: ignore[method-assign]
        return self._statements

    def __exit__(self, *_: object) -> None:
        event.remove(self._database.engine, "before_cursor_execute", self._note)
        self._database.execute = self._execute  # type: ignore[method-assign]

    def _note_and_execute(self, text: str, parameters: Any, **options: Any) -> Any:
        self._statements.append((text, parameters))
        return self._execute(text, parameters, **options)

    def _note(self, _connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        self._statements.append((statement, parameters))
