"""A sleeping task is a row: it holds no worker, no memory and no message."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from celery import group

from celery_durable.replay import timer_id
from tests.integration.support import (
    assert_no_traceback,
    start_worker_and_beat,
    status,
    wait_for_status,
    wait_until_asleep,
)
from tests.nodes import Bench, Worker, on

MEGABYTE = 2**20


class TestOneSleep:
    """The same on every deployment."""

    @pytest.mark.report("redelivery-window", "consumer-timeout")
    def test_a_sleeping_task_is_a_row_and_nothing_else(self, bench: Bench) -> None:
        start_worker_and_beat(bench)
        result = bench.project.nap.delay(3, name="rest")
        row = wait_until_asleep(bench, result)
        meta = result.info
        assert (meta["name"], meta["timer_id"]) == ("rest", timer_id(result.id, 2))
        # SQLite keeps milliseconds.
        assert abs(datetime.fromisoformat(meta["due_at"]) - row.wake_at) <= timedelta(milliseconds=1)
        (asleep,) = bench.witness.sightings(result.id, "before")
        assert 2.9 < row.wake_at.timestamp() - asleep.time < 4.5
        assert row.owner is None
        bench.wait_for(bench.queue_is_empty, message="the broker holds no message for it")
        assert not result.ready()
        assert result.get(timeout=20) == ["first", "second", 2]
        (after,) = bench.witness.sightings(result.id, "after")
        assert 0 <= after.time - row.wake_at.timestamp() < 2, "it wakes neither early nor late"
        assert wait_for_status(bench, result.id, "succeeded").wake_at is None
        assert bench.witness.steps(result.id) == ["body", "before", "body", "after", "on_success"]
        bench.wait_for(bench.queue_is_empty)
        assert_no_traceback(bench)


class TestManySleeps:
    @pytest.mark.report("sleepers-fill-worker")
    @on("rabbitmq-postgres")
    @pytest.mark.timeout(180)
    def test_300_sleeping_tasks_need_no_more_than_none(self, bench: Bench) -> None:
        worker, _ = start_worker_and_beat(bench, concurrency=2)
        doze = bench.project.doze
        group(doze.s(number, 0) for number in range(30)).delay().get(timeout=30)
        memory, prefetch = memory_of(worker), prefetch_of(bench, worker)

        results = [doze.delay(number, 3600) for number in range(300)]
        bench.wait_for(lambda: asleep_in(bench) == 300, 60, "all of them sleep")
        bench.wait_for(bench.queue_is_empty, message="the broker holds none of them")
        assert memory_of(worker) - memory < 10 * MEGABYTE
        assert prefetch_of(bench, worker) == prefetch

        bench.app().durable.wake([result.id for result in results])
        assert [result.get(timeout=60) for result in results] == list(range(300))
        assert {bench.witness.count(result.id, "body") for result in results} == {2}
        assert {bench.witness.count(result.id, "woken") for result in results} == {1}
        bench.wait_for(bench.queue_is_empty, message="every message is acknowledged")
        assert_no_traceback(bench)


class TestShortSleeps:
    @pytest.mark.report("short-sleep-alone")
    @on("redis-sqlite", "redis-postgres")
    def test_a_sleep_of_less_than_a_second_is_slept_in_place(self, bench: Bench) -> None:
        bench.worker()
        result = bench.project.nap.delay(0.4)
        assert result.get(timeout=20) == ["first", "second", 1]
        before, after = (bench.witness.sightings(result.id, step)[0] for step in ("before", "after"))
        assert after.time - before.time >= 0.4
        assert bench.witness.count(result.id, "body") == 1


class TestWorkers:
    @pytest.mark.report("recycled-children")
    @on("redis-postgres", "rabbitmq-postgres")
    def test_a_worker_whose_children_live_for_one_task_does_it_all(self, bench: Bench) -> None:
        worker = bench.worker("--max-tasks-per-child=1", wait=False)
        bench.beat()
        worker.wait_until_ready()
        results = [bench.project.doze.delay(number, 1.2) for number in range(6)]
        assert [result.get(timeout=30) for result in results] == list(range(6))
        for result in results:
            wait_for_status(bench, result.id, "succeeded")
            first, second = bench.witness.sightings(result.id, "body")
            assert first.pid != second.pid
        bench.wait_for(bench.queue_is_empty)
        assert_no_traceback(bench)

    @pytest.mark.report("sleepers-fill-worker")
    @on("redis-postgres")
    def test_two_workers_and_two_beats_share_the_work(self, bench: Bench) -> None:
        start_worker_and_beat(bench)
        bench.worker(name="other", wait=False)
        bench.beat(name="second", wait=False)
        results = [bench.project.doze.delay(number, 2) for number in range(20)]
        assert [result.get(timeout=30) for result in results] == list(range(20))
        for result in results:
            assert bench.witness.steps(result.id) == ["body", "body", "woken"]
        assert_no_traceback(bench)

    @on("redis-postgres")
    def test_the_worker_stops_in_good_order_while_a_task_sleeps(self, bench: Bench) -> None:
        worker, beat = start_worker_and_beat(bench)
        result = bench.project.nap.delay(4)
        wait_until_asleep(bench, result)
        assert worker.stop() == 0
        assert beat.stop() == 0
        assert status(bench, result.id) == "sleeping"
        assert_no_traceback(bench)
        worker.start(wait=False)
        beat.start()
        assert result.get(timeout=20) == ["first", "second", 2]


class TestPools:
    @on("redis-postgres")
    @pytest.mark.parametrize("pool", ["solo", "threads", "gevent"])
    def test_tasks_sleep_on_every_pool(self, bench: Bench, pool: str) -> None:
        start_worker_and_beat(bench, pool=pool, concurrency=4)
        results = [bench.project.nap.delay(2) for _ in range(6)]
        for result in results:
            assert result.get(timeout=30) == ["first", "second", 2]
            wait_for_status(bench, result.id, "succeeded")
            assert bench.witness.steps(result.id) == ["body", "before", "body", "after", "on_success"]
        bench.wait_for(bench.queue_is_empty)
        assert_no_traceback(bench)


class TestAnotherScheduler:
    @on("redis-postgres")
    def test_dispatch_due_wakes_without_beat(self, bench: Bench) -> None:
        bench.worker()
        result = bench.project.nap.delay(1.5)
        wait_until_asleep(bench, result)
        durable = bench.app().durable
        assert durable.dispatch_due() == 0
        bench.wait_for(durable.dispatch_due, message="something is due")
        assert result.get(timeout=20) == ["first", "second", 2]
        assert durable.dispatch_due() == 0

    @on("redis-sqlite")
    def test_a_beat_embedded_in_the_worker_wakes(self, bench: Bench, tmp_path: Path) -> None:
        bench.worker("-B", "-s", str(tmp_path / "embedded-beat"))
        result = bench.project.nap.delay(1.5)
        assert result.get(timeout=20) == ["first", "second", 2]


def asleep_in(bench: Bench) -> int:
    """How many tasks sleep."""
    count: int = bench.app().durable.count(status="sleeping")
    return count


def memory_of(worker: Worker) -> int:
    """The resident memory of a worker with its pool, in bytes."""
    return sum(psutil.Process(pid).memory_info().rss for pid in worker.tree())


def prefetch_of(bench: Bench, worker: Worker) -> int:
    """How many messages the worker may hold."""
    stats = bench.app().control.inspect([worker.hostname], timeout=3).stats()
    return int(stats[worker.hostname]["prefetch_count"])
