"""Revoke that lasts: whatever state a durable task is in, and whatever is down."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult

from tests.integration.features_support import BOTH, features_bench, seen
from tests.integration.support import status, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers, on
from tests.nodes.tree import is_alive

pytestmark = pytest.mark.timeout(180)

#: Seconds within which a revoked task's caller hears of it: no worker has to be asked.
PROMPTLY = 5


@pytest.fixture(scope="module", params=BOTH)
def live(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module but those that break something."""
    with features_bench(request.param, servers, tmp_path_factory.mktemp("revoke")) as live:
        yield live


def assert_revoked(bench: Bench, result: AsyncResult[Any]) -> None:
    """The caller hears of it promptly, the row ends, it was told once, and it stays so."""
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PROMPTLY)
    wait_for_status(bench, result.id, "cancelled")
    seen(bench, result.id, "task_revoked")
    assert result.state == "REVOKED"


class TestOneTask:
    def test_asleep(self, live: Bench) -> None:
        tasks = live.project
        result = chain(tasks.nap.s(1, 600), tasks.quick.s(), tasks.plain.s()).delay()
        sleeper = result.parent.parent
        wait_until_asleep(live, sleeper)
        sleeper.revoke()
        assert_revoked(live, sleeper)
        assert live.witness.count(sleeper.id, "after") == 0
        assert live.witness.count(result.id) == live.witness.count(result.parent.id) == 0

    def test_scheduled(self, live: Bench) -> None:
        result = live.project.quick.apply_async(countdown=600)
        live.app().control.revoke(result.id)
        assert_revoked(live, result)
        assert live.witness.count(result.id, "body") == 0

    def test_waiting_for_a_retry(self, live: Bench) -> None:
        result = live.project.retries.apply_async(("exhausted",), {"countdown": 600})
        wait_for_status(live, result.id, "retrying")
        result.revoke()
        assert_revoked(live, result)
        assert live.witness.count(result.id, "body 1") == 0

    def test_running(self, live: Bench) -> None:
        """Its body goes on to the next durable call, here the return, and nothing of it counts."""
        tasks = live.project
        result = chain(tasks.waits.s(1), tasks.plain.s()).delay()
        runner = result.parent
        seen(live, runner.id, "body")
        runner.revoke()
        with pytest.raises(TaskRevokedError):
            runner.get(timeout=PROMPTLY)
        tasks.did(runner.id, "go")
        assert_revoked(live, runner)
        seen(live, runner.id, "body")
        assert live.witness.count(result.id) == 0

    def test_running_and_to_be_stopped_at_once(self, live: Bench) -> None:
        result = live.project.waits.delay(1)
        seen(live, result.id, "body")
        result.revoke(terminate=True)
        assert_revoked(live, result)
        assert live.project.quick.delay(7).get(timeout=20) == 7

    def test_waiting_behind_others_and_to_be_stopped_at_once(self, live: Bench) -> None:
        """There is nothing to stop: it is told when its turn comes."""
        others = [live.project.waits.delay(1) for _ in range(2)]
        for other in others:
            seen(live, other.id, "body")
        result = live.project.waits.delay(1)
        inspect = live.app().control.inspect(timeout=1)
        live.wait_for(lambda: result.id in str(inspect.reserved()), message="the worker holds it")
        result.revoke(terminate=True)
        for other in others:
            live.project.did(other.id, "go")
        assert_revoked(live, result)
        assert live.witness.count(result.id, "body") == 0

    def test_running_and_to_be_stopped_after_all(self, live: Bench) -> None:
        """The first revoke lets the body go on; its claim has come and gone when the second one comes."""
        result = live.project.waits.delay(1)
        seen(live, result.id, "body")
        (body,) = live.witness.sightings(result.id, "body")
        result.revoke()
        assert_revoked(live, result)
        assert is_alive(body.pid)
        result.revoke(terminate=True)
        live.wait_for(lambda: not is_alive(body.pid), PROMPTLY)
        assert live.project.quick.delay(7).get(timeout=20) == 7

    @pytest.mark.parametrize("how", ["revoke", "cancel"])
    def test_before_its_first_message(self, live: Bench, how: str) -> None:
        task_id = str(uuid.uuid4())
        app = live.app()
        if how == "revoke":
            app.control.revoke(task_id)
        else:
            assert app.durable.cancel(task_id)
        result = live.project.nap.apply_async((1, 600), task_id=task_id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert_revoked(live, result)
        assert live.witness.count(task_id, "body") == 0

    def test_after_its_end(self, live: Bench) -> None:
        result = live.project.quick.delay(42)
        assert result.get(timeout=20) == 42
        before = wait_for_status(live, result.id, "succeeded")
        result.revoke()
        assert (status(live, result.id), result.state) == ("succeeded", "SUCCESS")
        assert live.app().durable.get(result.id) == before
        assert live.witness.count(result.id, "task_revoked") == 0

    def test_twice(self, live: Bench) -> None:
        result = live.project.nap.delay(1, 600)
        wait_until_asleep(live, result)
        result.revoke()
        result.revoke()
        assert_revoked(live, result)

    def test_one_whose_result_nobody_wants(self, live: Bench) -> None:
        result = live.project.forget.delay(600)
        wait_for_status(live, result.id, "sleeping")
        result.revoke()
        wait_for_status(live, result.id, "cancelled")
        seen(live, result.id, "task_revoked")
        assert live.witness.count(result.id, "after") == 0

    def test_a_plain_one(self, live: Bench) -> None:
        """As ever: the worker that gets its message drops it."""
        task_id = str(uuid.uuid4())
        assert live.app().control.revoke(task_id, reply=True, timeout=5)
        result = live.project.plain.apply_async((1,), task_id=task_id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert live.witness.count(task_id, "plain") == 0

    def test_by_a_program_that_knows_nothing_of_this(self, live: Bench) -> None:
        """The worker that obeys its broadcast writes it to the row."""
        result = live.project.nap.delay(1, 600)
        wait_until_asleep(live, result)
        stranger = Celery("stranger", broker=live.broker.url, set_as_current=False)
        assert stranger.control.revoke(result.id, reply=True, timeout=5)
        live.app().durable.wake(result.id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        assert_revoked(live, result)
        assert live.witness.count(result.id, "after") == 0


class TestMany:
    def test_a_list_of_ids_in_each_state(self, live: Bench) -> None:
        tasks = live.project
        sleeper, runner, done = tasks.nap.delay(1, 600), tasks.waits.delay(2), tasks.quick.delay(3)
        later = tasks.quick.apply_async((4,), countdown=600)
        wait_until_asleep(live, sleeper)
        seen(live, runner.id, "body")
        assert done.get(timeout=20) == 3
        live.app().control.revoke([r.id for r in (sleeper, runner, done, later)])
        tasks.did(runner.id, "go")
        for result in (sleeper, runner, later):
            assert_revoked(live, result)
        assert done.state == "SUCCESS"

    def test_a_group(self, live: Bench) -> None:
        result = group(live.project.nap.s(n, 600) for n in range(3)).delay()
        for member in result:
            wait_until_asleep(live, member)
        result.revoke()
        for member in result:
            assert_revoked(live, member)

    @pytest.mark.parametrize("countdown", [None, 600], ids=["asleep", "scheduled"])
    def test_a_chord_with_a_cancelled_member_fails(self, live: Bench, countdown: int | None) -> None:
        tasks = live.project
        member = tasks.nap.s(1, 600).set(countdown=countdown)
        errback = tasks.old_errback.s()
        result = chord([member, tasks.quick.s(2)])(tasks.total.s().on_error(errback))
        cancelled, quick = result.parent.results
        assert quick.get(timeout=20) == 2
        wait_for_status(live, cancelled.id, "sleeping", "scheduled")
        cancelled.revoke()
        assert_revoked(live, cancelled)
        # The error of the member, which `get()` meets on its way to that of the chord.
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        live.wait_for(lambda: result.state == "FAILURE", message="the chord fails")
        assert isinstance(result.result, ChordError)
        seen(live, result.id, "old errback")
        assert live.witness.count(result.id, "total") == 0

    def test_all_that_a_filter_finds(self, live: Bench) -> None:
        results = [live.project.nap.apply_async((n, 600), task_id=f"filtered-{n}") for n in range(5)]
        for result in results:
            wait_until_asleep(live, result)
        changed = live.app().durable.cancel(status="sleeping", text="filtered-")
        assert sorted(changed.task_ids) == [r.id for r in results]
        for result in results:
            assert_revoked(live, result)


class TestRace:
    @pytest.mark.report("one-outcome")
    def test_a_revoke_that_races_the_wake_ends_the_task_once(self, live: Bench) -> None:
        """Completed, or revoked: never both, and what follows fits. Two hundred times."""
        tasks = live.project
        chains = [chain(tasks.nap.s(n, 4.0), tasks.plain.s()).delay() for n in range(200)]
        sleepers = {result.parent.id: result.parent for result in chains}
        # Some before their wake, most while they come to their end after it.
        early = set(list(sleepers)[::4])
        waiting = set(sleepers) - early
        with ThreadPoolExecutor(4) as pool:
            for task_id in early:
                pool.submit(revoke_asleep, live, sleepers[task_id])
            while waiting:
                live.wait_for(lambda: woken(live) & waiting, 60, "another one is woken")
                for task_id in woken(live) & waiting:
                    waiting.remove(task_id)
                    pool.submit(sleepers[task_id].revoke)
        ends = {id_: wait_for_status(live, id_, "succeeded", "cancelled", timeout=60) for id_ in sleepers}
        cancelled = [result for result in chains if ends[result.parent.id].status == "cancelled"]
        completed = [result for result in chains if ends[result.parent.id].status == "succeeded"]
        for result in completed:
            assert result.get(timeout=20) == result.parent.get(timeout=5)
        for result in cancelled:
            with pytest.raises(TaskRevokedError):
                result.parent.get(timeout=PROMPTLY)
            assert result.parent.state == "REVOKED"
        live.wait_for(lambda: set(told(live)["task_revoked"]) >= {r.parent.id for r in cancelled})
        counts = told(live)
        for result in completed:
            assert counts["task_revoked"][result.parent.id] == 0
            assert counts["task_success"][result.parent.id] == 1
            assert counts["plain"][result.id] == 1
        for result in cancelled:
            assert counts["task_revoked"][result.parent.id] == 1
            assert counts["task_success"][result.parent.id] == 0
            assert counts["plain"][result.id] == 0


def revoke_asleep(bench: Bench, sleeper: AsyncResult[Any]) -> None:
    """Revoke a task once it has gone to sleep."""
    bench.wait_for(lambda: sleeper.state not in ("PENDING", "STARTED"), 60, "it sleeps")
    sleeper.revoke()


def told(bench: Bench) -> dict[str, Counter[str]]:
    """How often the witness has been told of each step, by step and task; one look for all tasks."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for sighting in bench.witness.sightings():
        counts[sighting.step][sighting.task_id] += 1
    return counts


def woken(bench: Bench) -> set[str]:
    """The tasks whose body has been entered twice."""
    return {task_id for task_id, count in told(bench)["body"].items() if count == 2}


class TestWithoutWorkers:
    @on("redis-postgres")
    def test_it_is_written_while_all_are_down_and_told_when_one_is_back(self, bench: Bench) -> None:
        beat, worker = bench.beat(wait=False), bench.worker()
        beat.wait_until_ready()
        tasks = bench.project
        results = [tasks.nap.delay(600), tasks.end_as.apply_async(("value",), countdown=600)]
        wait_until_asleep(bench, results[0])
        worker.stop()
        for result in results:
            result.revoke()
            with pytest.raises(TaskRevokedError):
                result.get(timeout=PROMPTLY)
            assert status(bench, result.id) == "ending"
        worker.start()
        for result in results:
            wait_for_status(bench, result.id, "cancelled")
            assert result.state == "REVOKED"
        assert bench.witness.steps(results[0].id) == ["body", "before"]
        assert bench.witness.steps(results[1].id) == []
