"""What people look at: one execution, many, numbers; and what is thrown away."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import case, literal, select

from celery_durable.records import Due, Execution, Kind, Outcome, OutcomeKind, Status
from celery_durable.store import Store
from celery_durable.store import queries as queries_module
from celery_durable.store.dialect import shifted
from celery_durable.store.filters import Filter
from tests.store.messages import columns, count_rows, edit, put_into_outbox, schedule
from tests.store.rows import fill_asleep
from tests.store.states import (
    WORKER,
    begin_to_end,
    claim,
    end,
    fall_asleep,
    quarantine,
    run,
    send_wake,
    set_aside,
    wait_for_retry,
)
from tests.store.tables import Statements

HOUR, DAY = 3600.0, 86400.0


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries_module, "PAGE", 2)


def get(store: Store, task_id: str) -> Execution:
    found = store.queries.get(task_id)
    assert found is not None
    return found


def find(store: Store, chosen: Filter | None = None, **options: int) -> list[str]:
    return [e.task_id for e in store.queries.find(chosen or Filter(), **options)]


class TestGet:
    def test_one_execution_with_its_message_and_journal(self, store: Store) -> None:
        before = store.now()
        fall_asleep(store, "a", position=2)
        found = get(store, "a")
        assert (found.task_name, found.status, found.token) == ("proj.tasks.onboard", Status.SLEEPING, 1)
        assert found.message is not None
        assert found.message.routing_key == "celery"
        assert [(e.position, e.kind, e.name, e.is_over) for e in found.journal] == [
            (1, Kind.STEP, "step 1", False),
            (2, Kind.SLEEP, "sleep 2", False),
        ]
        recorded = [e.recorded_at for e in found.journal]
        assert all(at is not None and before <= at <= store.now() for at in recorded)

    def test_an_unknown_id_is_nothing(self, store: Store) -> None:
        assert store.queries.get("unknown") is None

    def test_a_message_of_a_plain_task_is_no_execution(self, store: Store) -> None:
        put_into_outbox(store, "plain")
        assert find(store) == []
        assert store.queries.count(Filter()) == 0

    def test_the_outcome_is_shown(self, store: Store) -> None:
        begin_to_end(store, "a")
        assert get(store, "a").outcome == Outcome(OutcomeKind.VALUE, payload=b"42")

    def test_a_sleep_keeps_its_due_time_while_its_wake_is_on_its_way(self, store: Store) -> None:
        fall_asleep(store, "a", seconds=0.0)
        due_at = get(store, "a").due_at
        send_wake(store, "a")
        assert get(store, "a").due_at == due_at != columns(store, "a").wake_at

    def test_what_runs_is_not_due(self, store: Store) -> None:
        run(store, "a")
        assert get(store, "a").due_at is None


class TestFind:
    @pytest.mark.usefixtures("small_pages")
    def test_what_is_due_first_is_at_the_head_and_what_has_ended_at_the_foot(self, store: Store) -> None:
        end(store, "ended 1")
        end(store, "ended 2")
        for hours in (3, 1, 5, 2, 4):
            schedule(store, f"in {hours} h", due_in=hours * HOUR)
        expected = [f"in {hours} h" for hours in (1, 2, 3, 4, 5)] + ["ended 1", "ended 2"]
        assert find(store) == expected

    @pytest.mark.usefixtures("small_pages")
    def test_any_part_of_the_order_can_be_had(self, store: Store) -> None:
        for hours in (1, 2, 3):
            schedule(store, f"in {hours} h", due_in=hours * HOUR)
        for task_id in ("x", "y", "z"):
            end(store, task_id)
        everything = find(store)
        for offset in range(8):
            for limit in range(1, 8):
                assert find(store, limit=limit, offset=offset) == everything[offset : offset + limit]

    @pytest.mark.parametrize(
        ("statuses", "reads"), [((Status.SLEEPING, Status.RUNNING), 1), ((Status.SUCCEEDED,), 2), ((), 2)]
    )
    def test_those_that_have_ended_are_not_read_for_one_that_lives(
        self, store: Store, statuses: tuple[str, ...], reads: int
    ) -> None:
        end(store, "ended")
        chosen = Filter(statuses=statuses)
        assert Statements(store).during(lambda: find(store, chosen, limit=20)) == ["SELECT"] * reads

    @pytest.mark.usefixtures("small_pages")
    def test_rows_of_one_due_time_are_each_seen_once(self, store: Store) -> None:
        fill_asleep(store, 7, store.now(), spread=0.0)
        assert len(set(find(store))) == len(find(store)) == 7

    def test_a_list_is_light(self, store: Store) -> None:
        end(store, "a")
        (found,) = store.queries.find(Filter())
        assert (found.message, found.outcome, found.journal) == (None, None, ())


class TestFilter:
    @pytest.fixture(autouse=True)
    def bring(self, store: Store) -> None:
        fall_asleep(store, "asleep", seconds=HOUR)
        wait_for_retry(store, "retrying", seconds=3 * HOUR)
        run(store, "running")
        quarantine(store, "Quarantined_100%")
        schedule(store, "other", due_in=2 * HOUR)
        edit(store, "other", task_name="proj.tasks.Bill")

    def test_by_state(self, store: Store) -> None:
        assert find(store, Filter(statuses=(Status.SLEEPING, Status.RUNNING))) == ["running", "asleep"]

    def test_by_the_name_of_the_task(self, store: Store) -> None:
        assert find(store, Filter(task_name="proj.tasks.Bill")) == ["other"]

    def test_by_the_due_time_of_what_waits(self, store: Store) -> None:
        now = store.now()
        before = Filter(due_before=now + timedelta(hours=2.5))
        between = Filter(due_after=now + timedelta(hours=1.5), due_before=now + timedelta(hours=2.5))
        assert find(store, before) == ["asleep", "other"]
        assert find(store, between) == ["other"]

    def test_by_the_beginning_of_the_owner(self, store: Store) -> None:
        assert find(store, Filter(owner="celery@one")) == ["running"]
        assert find(store, Filter(owner="celery@on%")) == []

    @pytest.mark.parametrize("text", ["Quarantined", "quaranTINED_", "_100%"])
    def test_by_a_text_in_the_id(self, store: Store, text: str) -> None:
        assert find(store, Filter(text=text)) == ["Quarantined_100%"]

    def test_by_a_text_in_the_name(self, store: Store) -> None:
        assert find(store, Filter(text="bill")) == ["other"]

    def test_all_conditions_hold_at_once(self, store: Store) -> None:
        chosen = Filter(statuses=(Status.SLEEPING,), text="other")
        assert find(store, chosen) == []
        assert store.queries.count(chosen) == 0

    def test_the_count_is_that_of_the_list(self, store: Store) -> None:
        assert store.queries.count(Filter()) == len(find(store)) == 5

    def test_another_namespace_has_its_own(self, open_store: Callable[..., Store]) -> None:
        other = open_store(namespace="other")
        assert find(other) == []
        assert other.queries.get("asleep") is None
        assert other.statistics.read(20.0, 120.0).counts == {}


class TestIdPages:
    def test_each_id_comes_once_whatever_is_done_to_the_rows_meanwhile(self, store: Store) -> None:
        fill_asleep(store, 7, store.now())
        seen: list[str] = []
        for page in store.queries.id_pages(Filter(statuses=(Status.SLEEPING,)), size=3):
            seen += page
            store.verdicts.move(page, Due(seconds=DAY), relative=True)
        assert seen == sorted(find(store))


class TestStatistics:
    def test_an_empty_namespace(self, store: Store) -> None:
        stats = store.statistics.read(20.0, 120.0)
        assert (stats.counts, stats.live, stats.overdue, stats.leases) == ({}, 0, 0, 0)
        assert (stats.oldest_due_at, stats.next_due_at, stats.scheduler_seen) == (None, None, None)
        assert stats.lateness == 0.0

    def test_each_state_is_counted_and_the_outbox_by_itself(self, store: Store) -> None:
        fall_asleep(store, "a")
        fall_asleep(store, "b")
        end(store, "c")
        put_into_outbox(store, "plain")
        stats = store.statistics.read(20.0, 120.0)
        assert stats.counts == {Status.SLEEPING: 2, Status.SUCCEEDED: 1}
        assert (stats.live, stats.outbox) == (2, 1)

    def test_what_is_due_and_since_when(self, store: Store) -> None:
        schedule(store, "old", due_in=-300)
        schedule(store, "new", due_in=-5)
        schedule(store, "later", due_in=HOUR)
        stats = store.statistics.read(20.0, 120.0)
        assert stats.overdue == 2
        assert stats.lateness == pytest.approx(300, abs=30)
        assert stats.next_due_at == columns(store, "later").wake_at

    def test_a_sleep_stays_late_while_nobody_claims_its_wake(self, store: Store) -> None:
        fall_asleep(store, "a")
        at = store.now() - timedelta(minutes=10)
        store.verdicts.move(["a"], Due(at=at))
        send_wake(store, "a")
        stats = store.statistics.read(20.0, 120.0)
        assert (stats.overdue, stats.unclaimed, stats.most_sends) == (1, 1, 1)
        assert stats.lateness == pytest.approx(600, abs=30)

    @pytest.mark.parametrize(
        ("sends", "failures", "next_send", "late"),
        [
            (1, 0, 60.0, 60.0),  # sent a minute ago
            (1, 0, 9.0, 0.0),  # taken a moment ago, and on its way
            (2, 0, 200.0, 160.0),  # sent 160 s ago, and again 40 s ago
            (1, 2, 0.5, 1.0),  # the broker confirms nothing: two tries, half a second and one apart
        ],
    )
    def test_what_is_no_sleep_stays_late_too_while_nobody_claims_it(
        self, store: Store, sends: int, failures: int, next_send: float, late: float
    ) -> None:
        schedule(store, "a", due_in=-5)
        edit(store, "a", sends=sends, failures=failures, wake_at=store.context.now(next_send))
        stats = store.statistics.read(20.0, 120.0)
        assert stats.lateness == pytest.approx(late, abs=0.5)

    def test_leases_and_what_is_left_of_them(self, store: Store) -> None:
        for task_id, left in (("fresh", 50.0), ("near", 10.0), ("out", -10.0)):
            run(store, task_id)
            edit(store, task_id, wake_at=store.context.now(left))
        stats = store.statistics.read(20.0, 120.0)
        assert (stats.leases, stats.leases_near_end, stats.leases_expired) == (3, 1, 1)
        assert stats.overdue == 0


class TestPrune:
    @pytest.mark.report("pruning")
    def test_what_ended_well_and_badly_has_a_retention_each(self, store: Store) -> None:
        end(store, "well")
        end(store, "badly", Status.FAILED)
        ago = store.context.now(-10 * DAY)
        for task_id in ("well", "badly"):
            edit(store, task_id, finished_at=ago)
        assert store.queries.prunable(7 * DAY, 30 * DAY) == 1
        assert store.queries.prune(7 * DAY, 30 * DAY, 100) == 1
        assert (columns(store, "well").body, columns(store, "badly").body is None) == (None, False)

    def test_a_tombstone_is_emptied_but_for_what_tells_a_copy(self, store: Store) -> None:
        end(store, "a")
        before = columns(store, "a")
        store.queries.prune(0.0, 0.0, 100)
        row = columns(store, "a")
        assert (row.token, row.send_id, row.nesting) == (before.token, before.send_id, before.nesting)
        assert (row.headers, row.outcome, get(store, "a").journal) == (None, None, ())

    def test_a_tombstone_goes_when_no_broker_can_hold_a_copy(self, store: Store) -> None:
        end(store, "a")
        store.queries.prune(0.0, 0.0, 100)
        assert count_rows(store) == 1
        edit(store, "a", finished_at=store.context.now(-31 * DAY))
        assert store.queries.prune(0.0, 0.0, 100) == 1
        assert count_rows(store) == 0

    def test_a_cancel_whose_first_message_never_came_goes_with_the_tombstones(self, store: Store) -> None:
        store.verdicts.cancel(["a", "b"])
        edit(store, "a", finished_at=store.context.now(-31 * DAY))
        store.queries.prune(0.0, 0.0, 100)
        assert find(store) == ["b"]

    @pytest.mark.report("pruning")
    def test_what_is_live_or_set_aside_stays_for_ever(self, store: Store) -> None:
        set_aside(store, "set aside")
        fall_asleep(store, "asleep")
        put_into_outbox(store, "plain")
        long_ago = store.context.now(-1000 * DAY)
        for task_id in ("set aside", "asleep"):
            edit(store, task_id, created_at=long_ago, updated_at=long_ago)
        assert store.queries.prune(0.0, 0.0, 100) == 0
        assert count_rows(store) == 3

    @pytest.mark.report("many-timers", "pruning")
    def test_a_backlog_goes_a_batch_at_a_time_the_oldest_first(self, store: Store) -> None:
        for number in range(5):
            end(store, f"{number}")
            edit(store, f"{number}", finished_at=store.context.now(-DAY - number))
        assert [store.queries.prune(0.0, 0.0, 2) for _ in range(4)] == [2, 2, 1, 0]

    def test_a_copy_of_a_pruned_message_is_known(self, store: Store) -> None:
        end(store, "a")
        store.queries.prune(0.0, 0.0, 100)
        with pytest.raises(AssertionError):
            claim(store, "a")


class TestTimes:
    """The database's arithmetic, where the two dialects differ most."""

    def test_now_plus_a_computed_delay(self, store: Store) -> None:
        delay = case((literal(1) == 1, 90.0), else_=5.0)
        with store.database.statements() as connection:
            later = connection.execute(select(store.context.now(delay))).scalar_one()
        assert later - store.now() == pytest.approx(timedelta(seconds=90), abs=timedelta(seconds=10))

    @pytest.mark.parametrize("seconds", [0.0, 1.5, -1.5, 3600.0, 1e-3])
    def test_a_stored_instant_is_shifted(self, store: Store, seconds: float) -> None:
        at = datetime(2031, 5, 6, 7, 8, 9, 250_000, tzinfo=timezone.utc)
        schedule(store, "a")
        edit(store, "a", wake_at=at)
        edit(store, "a", wake_at=shifted(store.context.schema.executions.c.wake_at, seconds))
        assert columns(store, "a").wake_at == at + timedelta(seconds=seconds)


@pytest.mark.report("running-for-ever")
def test_an_owner_is_shown_with_its_lease(store: Store) -> None:
    run(store, "a")
    (found,) = store.queries.find(Filter(owner=WORKER))
    assert found.owner == WORKER
    assert found.wake_at is not None
