"""Revoke that lasts: whatever state a durable task is in, and whatever is down."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult

from tests.integration.features_support import PROJECT, features_bench, seen
from tests.integration.support import status, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers, on

#: Seconds within which a revoked task's caller hears of it: no worker has to be asked.
PROMPTLY = 5


@pytest.fixture(scope="module")
def bench(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module but those that break something."""
    with features_bench("redis-postgres", servers, tmp_path_factory.mktemp("revoke")) as bench:
        yield bench


@pytest.fixture
def bench_module() -> str:
    return PROJECT


def assert_revoked(bench: Bench, result: AsyncResult[Any]) -> None:
    """The caller hears of it promptly, the row ends, it was told once, and it stays so."""
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PROMPTLY)
    wait_for_status(bench, result.id, "cancelled")
    seen(bench, result.id, "task_revoked")
    assert result.state == "REVOKED"


class TestOneTask:
    def test_asleep(self, bench: Bench) -> None:
        tasks = bench.project
        result = chain(tasks.nap.s(1, 600), tasks.quick.s(), tasks.plain.s()).delay()
        sleeper = result.parent.parent
        wait_until_asleep(bench, sleeper)
        sleeper.revoke()
        assert_revoked(bench, sleeper)
        assert bench.witness.count(sleeper.id, "after") == 0
        assert bench.witness.count(result.id) == bench.witness.count(result.parent.id) == 0

    def test_scheduled(self, bench: Bench) -> None:
        result = bench.project.quick.apply_async(countdown=600)
        bench.app().control.revoke(result.id)
        assert_revoked(bench, result)
        assert bench.witness.count(result.id, "body") == 0

    def test_waiting_for_a_retry(self, bench: Bench) -> None:
        result = bench.project.retries.apply_async(("anyhow",), {"countdown": 600})
        wait_for_status(bench, result.id, "retrying")
        result.revoke()
        assert_revoked(bench, result)
        assert bench.witness.count(result.id, "body 1") == 0

    def test_running(self, bench: Bench) -> None:
        """Its body goes on to the next durable call, here the return, and nothing of it counts."""
        tasks = bench.project
        result = chain(tasks.waits.s(1), tasks.plain.s()).delay()
        runner = result.parent
        seen(bench, runner.id, "body")
        runner.revoke()
        with pytest.raises(TaskRevokedError):
            runner.get(timeout=PROMPTLY)
        tasks.did(runner.id, "go")
        assert_revoked(bench, runner)
        seen(bench, runner.id, "body")
        assert bench.witness.count(result.id) == 0

    def test_running_and_to_be_stopped_at_once(self, bench: Bench) -> None:
        result = bench.project.waits.delay(1)
        seen(bench, result.id, "body")
        result.revoke(terminate=True)
        assert_revoked(bench, result)
        assert bench.project.quick.delay(7).get(timeout=20) == 7

    @pytest.mark.parametrize("how", ["revoke", "cancel"])
    def test_before_its_first_message(self, bench: Bench, how: str) -> None:
        task_id = str(uuid.uuid4())
        app = bench.app()
        if how == "revoke":
            app.control.revoke(task_id)
        else:
            assert app.durable.cancel(task_id)
        result = bench.project.nap.apply_async((1, 600), task_id=task_id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert_revoked(bench, result)
        assert bench.witness.count(task_id, "body") == 0

    def test_after_its_end(self, bench: Bench) -> None:
        result = bench.project.quick.delay(42)
        assert result.get(timeout=20) == 42
        before = wait_for_status(bench, result.id, "succeeded")
        result.revoke()
        assert (status(bench, result.id), result.state) == ("succeeded", "SUCCESS")
        assert bench.app().durable.get(result.id) == before
        assert bench.witness.count(result.id, "task_revoked") == 0

    def test_twice(self, bench: Bench) -> None:
        result = bench.project.nap.delay(1, 600)
        wait_until_asleep(bench, result)
        result.revoke()
        result.revoke()
        assert_revoked(bench, result)

    def test_one_whose_result_nobody_wants(self, bench: Bench) -> None:
        result = bench.project.forget.delay(600)
        wait_for_status(bench, result.id, "sleeping")
        result.revoke()
        wait_for_status(bench, result.id, "cancelled")
        seen(bench, result.id, "task_revoked")
        assert bench.witness.count(result.id, "after") == 0

    def test_a_plain_one(self, bench: Bench) -> None:
        """As ever: the worker that gets its message drops it."""
        task_id = str(uuid.uuid4())
        bench.app().control.revoke(task_id)
        result = bench.project.plain.apply_async((1,), task_id=task_id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert bench.witness.count(task_id, "plain") == 0

    def test_by_a_program_that_knows_nothing_of_this(self, bench: Bench) -> None:
        """The worker that obeys its broadcast writes it to the row."""
        result = bench.project.nap.delay(1, 600)
        wait_until_asleep(bench, result)
        stranger = Celery("stranger", broker=bench.broker.url, set_as_current=False)
        assert stranger.control.revoke(result.id, reply=True, timeout=5)
        bench.app().durable.wake(result.id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert_revoked(bench, result)
        assert bench.witness.count(result.id, "after") == 0


class TestMany:
    def test_a_list_of_ids_in_each_state(self, bench: Bench) -> None:
        tasks = bench.project
        sleeper, runner, done = tasks.nap.delay(1, 600), tasks.waits.delay(2), tasks.quick.delay(3)
        later = tasks.quick.apply_async((4,), countdown=600)
        wait_until_asleep(bench, sleeper)
        seen(bench, runner.id, "body")
        assert done.get(timeout=20) == 3
        bench.app().control.revoke([r.id for r in (sleeper, runner, done, later)])
        tasks.did(runner.id, "go")
        for result in (sleeper, runner, later):
            assert_revoked(bench, result)
        assert done.state == "SUCCESS"

    def test_a_group(self, bench: Bench) -> None:
        result = group(bench.project.nap.s(n, 600) for n in range(3)).delay()
        for member in result:
            wait_until_asleep(bench, member)
        result.revoke()
        for member in result:
            assert_revoked(bench, member)

    @pytest.mark.parametrize("countdown", [None, 600], ids=["asleep", "scheduled"])
    def test_a_chord_with_a_cancelled_member_fails(self, bench: Bench, countdown: int | None) -> None:
        tasks = bench.project
        member = tasks.nap.s(1, 600).set(countdown=countdown)
        errback = tasks.old_errback.s()
        result = chord([member, tasks.quick.s(2)])(tasks.total.s().on_error(errback))
        cancelled, quick = result.parent.results
        assert quick.get(timeout=20) == 2
        wait_for_status(bench, cancelled.id, "sleeping", "scheduled")
        cancelled.revoke()
        assert_revoked(bench, cancelled)
        # The error of the member, which `get()` meets on its way to that of the chord.
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        bench.wait_for(lambda: result.state == "FAILURE", message="the chord fails")
        assert isinstance(result.result, ChordError)
        seen(bench, result.id, "old errback")
        assert bench.witness.count(result.id, "total") == 0

    def test_all_that_a_filter_finds(self, bench: Bench) -> None:
        results = [bench.project.nap.apply_async((n, 600), task_id=f"filtered-{n}") for n in range(5)]
        for result in results:
            wait_until_asleep(bench, result)
        changed = bench.app().durable.cancel(status="sleeping", text="filtered-")
        assert sorted(changed.task_ids) == [r.id for r in results]
        for result in results:
            assert_revoked(bench, result)


class TestRace:
    def test_a_revoke_that_races_the_wake_ends_the_task_once(self, bench: Bench) -> None:
        """Completed, or revoked: never both, and what follows fits."""
        tasks = bench.project
        chains = [chain(tasks.nap.s(n, 2.0), tasks.plain.s()).delay() for n in range(50)]
        sleepers = [result.parent for result in chains]
        for sleeper in sleepers:
            bench.wait_for(lambda s=sleeper: s.state not in ("PENDING", "STARTED"), 60, "it sleeps")

        def revoke(number: int) -> None:
            """Some before their wake, most while they come to their end after it."""
            sleeper = sleepers[number]
            if number % 4:
                bench.wait_for(lambda: bench.witness.count(sleeper.id, "body") == 2, 90, "it is woken")
            sleeper.revoke()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(revoke, range(len(sleepers))))
        for sleeper in sleepers:
            wait_for_status(bench, sleeper.id, "succeeded", "cancelled", timeout=60)
        completed = [r for r in chains if status(bench, r.parent.id) == "succeeded"]
        cancelled = [r for r in chains if status(bench, r.parent.id) == "cancelled"]
        for result in completed:
            assert result.get(timeout=20) == result.parent.get(timeout=5)
            assert bench.witness.count(result.parent.id, "task_revoked") == 0
            assert bench.witness.count(result.parent.id, "task_success") == 1
        for result in cancelled:
            assert_revoked(bench, result.parent)
            assert bench.witness.count(result.parent.id, "task_success") == 0
            assert bench.witness.count(result.id, "plain") == 0


class TestWithoutWorkers:
    @on("redis-postgres")
    def test_it_is_written_while_all_are_down_and_told_when_one_is_back(self, bench: Bench) -> None:
        beat, worker = bench.beat(wait=False), bench.worker()
        beat.wait_until_ready()
        results = [bench.project.nap.delay(1, 600), bench.project.quick.apply_async(countdown=600)]
        wait_until_asleep(bench, results[0])
        worker.stop()
        for result in results:
            result.revoke()
            with pytest.raises(TaskRevokedError):
                result.get(timeout=PROMPTLY)
        worker.start()
        for result in results:
            assert_revoked(bench, result)
        assert bench.witness.count(results[0].id, "after") == bench.witness.count(results[1].id, "body") == 0
