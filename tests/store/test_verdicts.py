"""Verdicts from outside: written once, held against every run, and for thousands as for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import select

from celery_durable.durations import MAX_SECONDS
from celery_durable.records import Claim, Due, Kind, Outcome, OutcomeKind, Refusal, Status
from celery_durable.store import Store
from celery_durable.store import verdicts as verdicts_module
from celery_durable.store.filters import Filter
from tests.store.messages import columns, delivery, due_in, edit, schedule, take
from tests.store.rows import fill_asleep
from tests.store.states import (
    ENDED,
    PARKED,
    WORKER,
    begin_to_end,
    claim,
    end,
    fall_asleep,
    quarantine,
    replace,
    run,
    send_wake,
    set_aside,
    sleep_entry,
    wait_for_retry,
)

HOUR = 3600.0
VALUE = Outcome(OutcomeKind.VALUE, payload=b"42")

parked = pytest.mark.parametrize("park", PARKED.values(), ids=PARKED)
ended = pytest.mark.parametrize("bring", ENDED.values(), ids=ENDED)
State = Callable[[Store, str], Any]


def sleep_due_at(store: Store, task_id: str, position: int | None = None) -> datetime:
    """The journaled due time of an execution's last sleep."""
    found = store.queries.get(task_id)
    assert found is not None
    times = [e.due_at for e in found.journal if e.kind == Kind.SLEEP and position in (None, e.position)]
    assert times[-1] is not None
    return times[-1]


def kind_of_outcome(store: Store, task_id: str) -> str | None:
    found = store.queries.get(task_id)
    assert found is not None
    return None if found.outcome is None else found.outcome.kind


class TestCancel:
    @parked
    def test_what_waits_is_due_at_once_to_be_told_its_end(self, store: Store, park: State) -> None:
        park(store, "a")
        assert list(store.verdicts.cancel(["a"])) == ["a"]
        row = columns(store, "a")
        assert (row.status, row.owner, row.sends, row.crashes) == (Status.ENDING, None, 0, 0)
        assert [item.key for item in take(store)] == ["a"]

    def test_the_next_claim_finds_the_verdict_and_no_journal(self, store: Store) -> None:
        fall_asleep(store, "a")
        store.verdicts.cancel(["a"], "not wanted")
        granted = claim(store, "a", is_wake=True)
        assert granted.outcome == Outcome(OutcomeKind.CANCELLED, "not wanted")
        assert granted.journal == ()

    def test_a_run_that_was_cancelled_can_write_nothing_more(self, store: Store) -> None:
        key = run(store, "a")
        assert store.verdicts.cancel(["a"])
        assert not store.runs.record(key, [])
        assert store.runs.park(key, Due(), entries=[sleep_entry(1)]) is None
        assert store.runs.end(key, VALUE, 60.0) is None
        assert not store.runs.finish(key, Status.SUCCEEDED)
        assert store.leases.renew([key], 60.0) == set()
        assert store.leases.lost_to(key) == Outcome(OutcomeKind.CANCELLED)

    @ended
    def test_what_has_its_outcome_keeps_it(self, store: Store, bring: State) -> None:
        bring(store, "a")
        before = columns(store, "a")
        assert store.verdicts.cancel(["a"]) == {}
        assert columns(store, "a") == before

    def test_a_second_cancel_changes_nothing(self, store: Store) -> None:
        fall_asleep(store, "a")
        store.verdicts.cancel(["a"], "first")
        assert store.verdicts.cancel(["a"], "second") == {}
        found = store.queries.get("a")
        assert found is not None
        assert found.outcome == Outcome(OutcomeKind.CANCELLED, "first")

    @pytest.mark.parametrize("bring", [set_aside, replace])
    def test_what_was_set_aside_or_replaced_can_be_cancelled(self, store: Store, bring: State) -> None:
        bring(store, "a")
        assert store.verdicts.cancel(["a"])
        assert claim(store, "a", is_wake=True).outcome == Outcome(OutcomeKind.CANCELLED)

    def test_a_successor_of_a_cancelled_replacement_does_not_start(self, store: Store) -> None:
        replace(store, "a")
        store.verdicts.cancel(["a"])
        successor = dataclasses.replace(delivery("a"), nesting=1)
        assert isinstance(store.claims.claim(successor, WORKER, 60.0, 3), Refusal)

    def test_it_tells_what_the_message_said_and_that_of_the_unknown_nothing_is_known(
        self, store: Store
    ) -> None:
        fall_asleep(store, "a")
        accepted = store.verdicts.cancel(["a", "unknown"])
        assert '"id": "a"' in (accepted["a"].headers or "")
        assert accepted["a"].task_name == "proj.tasks.onboard"
        assert accepted["unknown"].headers is None

    def test_an_unknown_id_is_remembered_until_its_first_message(self, store: Store) -> None:
        assert list(store.verdicts.cancel(["a"])) == ["a"]
        row = columns(store, "a")
        assert (row.status, row.wake_at, row.body) == (Status.CANCELLED, None, None)
        granted = claim(store, "a")
        assert granted.outcome == Outcome(OutcomeKind.CANCELLED)
        assert store.runs.finish(granted.key, Status.CANCELLED)

    def test_what_was_pruned_is_not_cancelled(self, store: Store) -> None:
        end(store, "a")
        store.queries.prune(0.0, 0.0, 100)
        assert store.verdicts.cancel(["a"]) == {}

    def test_of_many_each_gets_its_own_answer(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verdicts_module, "CHUNK", 2)
        fall_asleep(store, "asleep")
        run(store, "running")
        end(store, "ended")
        ids = ["asleep", "ended", "running", "unknown", "asleep"]
        assert set(store.verdicts.cancel(ids)) == {"asleep", "running", "unknown"}
        assert kind_of_outcome(store, "ended") == OutcomeKind.VALUE

    def test_with_a_filter_only_what_it_still_finds_is_cancelled(self, store: Store) -> None:
        schedule(store, "a", "b", due_in=HOUR)
        only = Filter(statuses=(Status.SCHEDULED,))
        page = next(iter(store.queries.id_pages(only)))
        edit(store, "b", status=Status.RUNNING, owner=WORKER)
        assert set(store.verdicts.cancel([*page, "unknown"], only=only)) == {"a"}
        assert store.queries.get("unknown") is None

    def test_another_namespace_has_tasks_of_its_own(
        self, store: Store, open_store: Callable[..., Store]
    ) -> None:
        fall_asleep(store, "a")
        assert open_store(namespace="other").verdicts.cancel(["a"])["a"].headers is None
        assert columns(store, "a").status == Status.SLEEPING

    def test_a_cancel_racing_the_wake_ends_a_task_once(self, store: Store) -> None:
        """Completed or cancelled, never both, never neither."""
        fill_asleep(store, 200, store.now() - timedelta(minutes=1), spread=0.0)
        ids = [e.task_id for e in store.queries.find(Filter())]
        wins = _race(ids, lambda i: _wake_and_end(store, i), lambda i: bool(store.verdicts.cancel([i])))
        assert [completed + cancelled for completed, cancelled in wins] == [1] * len(ids)
        told = [OutcomeKind.VALUE if completed else OutcomeKind.CANCELLED for completed, _ in wins]
        assert [kind_of_outcome(store, task_id) for task_id in ids] == told

    def test_a_cancel_racing_the_first_message_ends_a_task_once(self, store: Store) -> None:
        ids = [f"task-{n}" for n in range(50)]
        wins = _race(ids, lambda i: _start_and_end(store, i), lambda i: bool(store.verdicts.cancel([i])))
        assert [completed + cancelled for completed, cancelled in wins] == [1] * len(ids)


def _race(
    ids: list[str], first: Callable[[str], bool], second: Callable[[str], bool]
) -> list[tuple[bool, bool]]:
    """Both on each id at the same moment; what each answered."""
    start = Barrier(2, timeout=30)

    def all_of(work: Callable[[str], bool]) -> list[bool]:
        answers = []
        for task_id in ids:
            start.wait()
            answers.append(work(task_id))
        return answers

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(all_of, first), pool.submit(all_of, second)
        return list(zip(one.result(), other.result(), strict=True))


def _wake_and_end(store: Store, task_id: str) -> bool:
    return _end(store, store.claims.claim(delivery(task_id, is_wake=True), WORKER, 60.0, 3))


def _start_and_end(store: Store, task_id: str) -> bool:
    return _end(store, store.claims.claim(delivery(task_id), WORKER, 60.0, 3))


def _end(store: Store, granted: Any) -> bool:
    """Come to the end with a value, unless there is a verdict already."""
    assert isinstance(granted, Claim)
    return granted.outcome is None and store.runs.end(granted.key, VALUE, 60.0) is not None


class TestRelease:
    @pytest.mark.parametrize("bring", [quarantine, set_aside])
    def test_what_is_quarantined_runs_again_at_once(self, store: Store, bring: State) -> None:
        bring(store, "a")
        assert store.verdicts.release(["a"]) == {"a"}
        row = columns(store, "a")
        assert (row.status, row.outcome, row.owner, row.crashes) == (Status.RUNNING, None, None, 0)
        assert [item.key for item in take(store)] == ["a"]
        assert claim(store, "a", is_wake=True).outcome is None

    @pytest.mark.parametrize("bring", [fall_asleep, run, begin_to_end, end])
    def test_nothing_else_is_released(self, store: Store, bring: State) -> None:
        bring(store, "a")
        before = columns(store, "a")
        assert store.verdicts.release(["a", "unknown"]) == set()
        assert columns(store, "a") == before

    def test_of_many_those_that_the_filter_finds(self, store: Store) -> None:
        for task_id in ("a", "b", "c"):
            quarantine(store, task_id)
        edit(store, "b", task_name="other")
        only = Filter(task_name="proj.tasks.onboard")
        assert store.verdicts.release(["a", "b", "c"], only=only) == {"a", "c"}


class TestMove:
    @parked
    def test_what_waits_is_due_at_the_new_time(self, store: Store, park: State) -> None:
        park(store, "a")
        at = datetime(2031, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
        assert store.verdicts.move(["a"], Due(at=at)) == {"a": at}
        assert columns(store, "a").wake_at == at

    @parked
    def test_what_waits_is_postponed_from_its_own_time(self, store: Store, park: State) -> None:
        park(store, "a")
        before = columns(store, "a").wake_at
        moved = store.verdicts.move(["a"], Due(seconds=HOUR), relative=True)
        assert moved["a"] - before == timedelta(hours=1)
        assert columns(store, "a").wake_at == moved["a"]

    def test_the_open_sleep_moves_along(self, store: Store) -> None:
        fall_asleep(store, "a", position=3)
        before = sleep_due_at(store, "a")
        moved = store.verdicts.move(["a"], Due(seconds=-60), relative=True)
        assert sleep_due_at(store, "a") == moved["a"] == before - timedelta(minutes=1)

    def test_a_sleep_that_is_over_keeps_its_time(self, store: Store) -> None:
        fall_asleep(store, "a", seconds=0.0)
        first = sleep_due_at(store, "a")
        key = claim(store, "a", is_wake=True).key
        store.runs.park(key, Due(seconds=HOUR), entries=[sleep_entry(2)])
        store.verdicts.move(["a"], Due(seconds=HOUR), relative=True)
        assert sleep_due_at(store, "a", position=1) == first
        assert due_in(store, "a") == pytest.approx(2 * HOUR, abs=60)

    def test_a_retry_moves_no_sleep(self, store: Store) -> None:
        wait_for_retry(store, "a")
        before = sleep_due_at(store, "a")
        store.verdicts.move(["a"], Due(seconds=HOUR), relative=True)
        assert sleep_due_at(store, "a") == before

    def test_what_is_woken_finds_its_sleep_over(self, store: Store) -> None:
        fall_asleep(store, "a")
        store.verdicts.move(["a"], Due())
        assert [item.key for item in take(store)] == ["a"]
        assert [entry.is_over for entry in claim(store, "a", is_wake=True).journal] == [True]

    def test_a_wake_message_that_was_sent_before_finds_nothing_to_do(self, store: Store) -> None:
        fall_asleep(store, "a", seconds=0.0)
        assert take(store)
        store.verdicts.move(["a"], Due(seconds=HOUR), relative=True)
        answer = store.claims.claim(delivery("a", is_wake=True), WORKER, 60.0, 3)
        assert isinstance(answer, Refusal)

    def test_a_sleep_is_postponed_from_its_own_time_also_once_its_wake_is_sent(self, store: Store) -> None:
        fall_asleep(store, "a", seconds=0.0)
        before = sleep_due_at(store, "a")
        send_wake(store, "a")
        moved = store.verdicts.move(["a"], Due(seconds=HOUR), relative=True)
        assert moved["a"] - before == timedelta(hours=1)
        assert columns(store, "a").sends == 0

    def test_a_countdown_whose_message_is_sent_is_postponed_from_now(self, store: Store) -> None:
        schedule(store, "a")
        send_wake(store, "a")
        store.verdicts.move(["a"], Due(seconds=HOUR), relative=True)
        assert due_in(store, "a") == pytest.approx(HOUR, abs=60)

    @pytest.mark.parametrize("bring", [run, begin_to_end, end, quarantine])
    def test_what_runs_or_has_ended_is_left_alone(self, store: Store, bring: State) -> None:
        bring(store, "a")
        before = columns(store, "a")
        assert store.verdicts.move(["a", "unknown"], Due()) == {}
        assert columns(store, "a") == before

    @pytest.mark.parametrize(("year", "sign", "bound"), [(9500, 1, 9999), (500, -1, 1)])
    def test_no_time_leaves_the_calendar(self, store: Store, year: int, sign: int, bound: int) -> None:
        fall_asleep(store, "a")
        store.verdicts.move(["a"], Due(at=datetime(year, 1, 1, tzinfo=timezone.utc)))
        moved = store.verdicts.move(["a"], Due(seconds=sign * MAX_SECONDS), relative=True)
        assert moved["a"].year == bound
        assert sleep_due_at(store, "a") == columns(store, "a").wake_at == moved["a"]

    def test_thousands_move_by_the_same_span(self, store: Store) -> None:
        now = store.now()
        fill_asleep(store, 2500, now)
        fill_asleep(store, 5, now, prefix="other", task_name="other")
        only = Filter(task_name="proj.tasks.onboard")
        before = _times(store, only)
        moved: dict[str, datetime] = {}
        for page in store.queries.id_pages(only):
            moved |= store.verdicts.move(page, Due(seconds=HOUR), relative=True, only=only)
        assert len(moved) == 2500
        assert moved == {i: at + timedelta(hours=1) for i, at in before.items()} == _times(store, only)
        assert moved == _journaled(store, "sleeper-")

    @pytest.mark.parametrize("relative", [True, False])
    def test_of_many_each_moves_by_its_own_kind_of_time(self, store: Store, relative: bool) -> None:
        fall_asleep(store, "asleep", seconds=600.0)
        fall_asleep(store, "sent", seconds=0.0)
        send_wake(store, "sent")
        wait_for_retry(store, "retrying")
        schedule(store, "scheduled", due_in=600.0)
        run(store, "running")
        before = {key: sleep_due_at(store, key) for key in ("asleep", "sent", "retrying")}
        waits = {key: columns(store, key).wake_at for key in ("retrying", "scheduled", "running")}
        at = datetime(2031, 5, 6, tzinfo=timezone.utc)
        due = Due(seconds=HOUR) if relative else Due(at=at)
        moved = store.verdicts.move(
            ["asleep", "sent", "retrying", "scheduled", "running", "unknown"], due, relative=relative
        )
        hour = timedelta(hours=1)
        own = {
            "asleep": before["asleep"] + hour,
            "sent": before["sent"] + hour,
            "retrying": waits["retrying"] + hour,
            "scheduled": waits["scheduled"] + hour,
        }
        assert moved == (own if relative else dict.fromkeys(own, at))
        assert {key: columns(store, key).wake_at for key in own} == moved
        assert {key: columns(store, key).sends for key in own} == dict.fromkeys(own, 0)
        assert {key: sleep_due_at(store, key) for key in ("asleep", "sent")} == {
            key: moved[key] for key in ("asleep", "sent")
        }
        assert sleep_due_at(store, "retrying") == before["retrying"]
        assert columns(store, "running").wake_at == waits["running"]

    @pytest.mark.report("lock-out")
    def test_a_row_that_somebody_holds_keeps_nobody_else_waiting(
        self, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Store(postgres_url, namespace="proj")
        fill_asleep(store, 3, store.now())
        ids = list(_times(store, Filter()))
        executions = store.context.schema.executions
        with ThreadPoolExecutor(1) as pool, store.database.transaction() as connection:
            connection.execute(select(executions).where(executions.c.task_id == ids[0]).with_for_update())
            moving = pool.submit(store.verdicts.move, ids, Due(seconds=HOUR), relative=True)
            before = store.now() + timedelta(minutes=30)
            while any(columns(store, task_id).wake_at < before for task_id in ids[1:]):
                assert not moving.done()
            assert columns(store, ids[0]).wake_at < before
            connection.rollback()
            assert set(moving.result(timeout=10)) == set(ids)
        store.dispose()


def _times(store: Store, chosen: Filter) -> dict[str, datetime]:
    return {e.task_id: e.wake_at for e in store.queries.find(chosen) if e.wake_at is not None}


def _journaled(store: Store, prefix: str) -> dict[str, datetime]:
    journal = store.context.schema.journal
    with store.database.statements() as connection:
        found = connection.execute(
            select(journal.c.task_id, journal.c.due_at).where(
                journal.c.kind == Kind.SLEEP, journal.c.task_id.startswith(prefix)
            )
        )
        return {row.task_id: row.due_at for row in found}
