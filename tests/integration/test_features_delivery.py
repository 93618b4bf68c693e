"""What a broker and a worker do with the messages of a task that sleeps: copies, windows, rates, revokes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from celery.exceptions import TaskRevokedError

from celery_durable import NotDurable
from tests.integration.features_support import Copies, dropped, features_bench, seen
from tests.integration.support import body_runs, row, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers

#: Seconds after which the broker sends a message again that it holds for a worker, and looks for such.
WINDOW = {"visibility_timeout": 1, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
COPIES = 50


@pytest.fixture(scope="module")
def bench(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module."""
    folder = tmp_path_factory.mktemp("delivery")
    with features_bench("redis-postgres", servers, folder, broker_transport_options=WINDOW) as bench:
        yield bench


def sends(bench: Bench, task_id: str) -> int:
    """How many wakes are on their way."""
    found = row(bench, task_id)
    return 0 if found is None else found.sends


def wait_until_dropped(bench: Bench, task_id: str, count: int) -> list[str]:
    """Wait until the worker has dropped so many messages of a task; the lines that say so.

    On a slow machine it may be more: the broker sends again what waits in the worker.
    """
    bench.wait_for(lambda: len(dropped(bench, task_id)) >= count, message=f"{count} messages are dropped")
    bench.wait_for(bench.queue_is_empty)
    return dropped(bench, task_id)


class TestCopies:
    @pytest.mark.report("received-twice")
    def test_of_a_wake_one_runs_the_task_whether_they_come_before_its_claim_or_after(
        self, bench: Bench
    ) -> None:
        result = bench.project.nap.delay(1, 600)
        wait_until_asleep(bench, result)
        busy = [bench.project.waits.delay() for _ in range(2)]
        for runner in busy:
            seen(bench, runner.id, "body")
        bench.app().durable.wake(result.id)
        bench.wait_for(lambda: sends(bench, result.id) == 1, message="its wake is sent")
        copies = Copies(bench, result.id)
        copies.send(COPIES // 2, wake=1)
        for runner in busy:
            bench.witness.saw(runner.id, "go")
        assert result.get(timeout=20) == 1
        copies.send(COPIES // 2, wake=1)
        wait_until_dropped(bench, result.id, COPIES)
        assert body_runs(bench, result) == 2
        seen(bench, result.id, "after")
        seen(bench, result.id, "task_success")
        assert bench.store_server is not None
        log = bench.store_server.logs()
        assert "deadlock" not in log
        assert "could not serialize" not in log

    @pytest.mark.report("received-twice")
    def test_of_a_retry_too(self, bench: Bench) -> None:
        """Those of the message before the retry are old by then."""
        result = bench.project.retries.apply_async(("once",), {"countdown": 600})
        wait_for_status(bench, result.id, "retrying")
        bench.wait_for(lambda: result.state == "RETRY")
        copies = Copies(bench, result.id)
        before = row(bench, result.id)
        copies.send(5)
        copies.send(5, wake=1)
        wait_until_dropped(bench, result.id, 10)
        assert row(bench, result.id) == before
        bench.app().durable.wake(result.id)
        assert result.get(timeout=20) == ["once", 1]
        seen(bench, result.id, "body 1")

    def test_a_second_send_of_a_live_an_ended_and_a_pruned_id(self, bench: Bench) -> None:
        nap, task_id, durable = bench.project.nap, "of-my-own", bench.app().durable
        result = nap.apply_async((1, 600), task_id=task_id)
        before = wait_until_asleep(bench, result)
        copies = Copies(bench, task_id)

        for number in range(COPIES):
            nap.apply_async((number, 600), task_id=task_id)
        lines = wait_until_dropped(bench, task_id, COPIES)
        assert all(" WARNING" in line for line in lines)
        assert row(bench, task_id) == before

        durable.wake(task_id)
        assert result.get(timeout=20) == 1
        wait_for_status(bench, task_id, "succeeded")
        copies.send(COPIES)
        wait_until_dropped(bench, task_id, 2 * COPIES)
        nap.apply_async((2, 0), task_id=task_id)
        seen(bench, task_id, "after", 2)
        ended = wait_for_status(bench, task_id, "succeeded")

        copies = Copies(bench, task_id)
        durable.prune(older_than=timedelta(0))
        assert durable.get(task_id).message is None
        copies.send(COPIES)
        wait_until_dropped(bench, task_id, 3 * COPIES)
        nap.apply_async((3, 0), task_id=task_id)
        seen(bench, task_id, "after", 3)
        assert wait_for_status(bench, task_id, "succeeded").token == ended.token + 1


class TestWindows:
    @pytest.mark.report("redelivery-window", "second-copy")
    def test_a_sleep_and_a_run_that_outlive_them_happen_once(self, bench: Bench) -> None:
        sleeper, runner = bench.project.nap.delay(1, 4), bench.project.waits.delay(2)
        seen(bench, runner.id, "body")
        wait_until_asleep(bench, sleeper)
        assert bench.queue_is_empty()
        assert sleeper.get(timeout=20) == 1
        bench.project.did(runner.id, "go")
        assert runner.get(timeout=20) == 2
        for result, bodies in ((sleeper, 2), (runner, 1)):
            assert body_runs(bench, result) == bodies
            assert not dropped(bench, result.id)
            seen(bench, result.id, "task_received", bodies)

    def test_a_countdown_that_operators_move_runs_once(self, bench: Bench) -> None:
        durable = bench.app().durable
        result = bench.project.quick.apply_async((7,), countdown=3600)
        assert bench.queue_is_empty()
        durable.postpone(result.id, by=timedelta(hours=-1, seconds=2))
        assert result.get(timeout=20) == 7
        wait_for_status(bench, result.id, "succeeded")
        seen(bench, result.id, "task_received")
        assert body_runs(bench, result) == 1


class TestRateLimit:
    def test_every_wake_counts(self, bench: Bench) -> None:
        """Two a second: five that are woken at the same time take two seconds to start."""
        results = [bench.project.limited.delay(about="limited") for _ in range(5)]
        for result in results:
            wait_until_asleep(bench, result)
        bench.app().durable.wake([result.id for result in results])
        for result in results:
            assert result.get(timeout=20) == "limited"
        woken = [sighting.time for sighting in bench.witness.sightings("limited", "body")][5:]
        assert len(woken) == 5
        assert max(woken) - min(woken) >= 1.9


class TestRevokedByStamp:
    def test_the_worker_that_meets_it_cancels_the_row(self, bench: Bench) -> None:
        signatures = [bench.project.nap.s(tenant, 600) for tenant in ("acme", "other")]
        for tenant, signature in zip(("acme", "other"), signatures, strict=True):
            signature.stamp(tenant=tenant)
        revoked, kept = (signature.apply_async() for signature in signatures)
        for result in (revoked, kept):
            wait_until_asleep(bench, result)
        answers = bench.app().control.revoke_by_stamped_headers(
            {"tenant": ["acme"]}, reply=True, timeout=5, limit=1
        )
        assert answers
        bench.app().durable.wake([revoked.id, kept.id])
        assert kept.get(timeout=20) == "other"
        with pytest.raises(TaskRevokedError):
            revoked.get(timeout=20)
        wait_for_status(bench, revoked.id, "cancelled")
        seen(bench, revoked.id, "task_revoked")
        assert bench.witness.count(revoked.id, "after") == 0


class TestCalledAsAFunction:
    def test_map_starmap_and_chunks_are_told_that_nothing_in_them_is_durable(self, bench: Bench) -> None:
        nap = bench.project.nap
        for canvas in (nap.map([1]), nap.starmap([(1, 1)]), nap.chunks([(1, 1)], 1)):
            with pytest.raises(NotDurable):
                canvas.apply_async().get(timeout=20)


class TestLanes:
    @pytest.mark.report("wrong-lane")
    def test_a_wake_lands_where_a_plain_message_of_its_priority_does(self, bench: Bench) -> None:
        t, control = bench.project, bench.app().control
        results: list[Any] = []
        for priority in (0, 4, 9):
            waiting = t.quick.apply_async((priority,), countdown=600, queue="durable-lane", priority=priority)
            bench.app().durable.wake(waiting.id)
            results += [waiting, t.plain.apply_async((priority,), queue="plain-lane", priority=priority)]
        with redis.Redis.from_url(bench.broker.url or "", decode_responses=True) as client:

            def lanes(queue: str) -> dict[str, int]:
                keys = client.scan_iter(f"{queue}*", _type="list")
                return {key.removeprefix(queue): client.llen(key) for key in keys}

            assert len(lanes("plain-lane")) == 3
            bench.wait_for(lambda: lanes("durable-lane") == lanes("plain-lane"))
        for queue in ("durable-lane", "plain-lane"):
            control.add_consumer(
                queue, destination=[bench.processes[0].hostname], reply=True, timeout=5, limit=1
            )
        assert [result.get(timeout=20) for result in results] == [0, 0, 4, 4, 9, 9]
