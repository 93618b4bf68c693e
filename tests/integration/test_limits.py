"""Time limits: a hard one is a failure and no crash, a soft one hits the body only, and none counts sleep."""

from __future__ import annotations

import pytest
from celery.exceptions import TimeLimitExceeded

from tests.integration.leases_support import PROJECT, tokens_of, wait_for_step
from tests.integration.support import assert_no_traceback, start_worker_and_beat, wait_for_status
from tests.nodes import Bench, on

on_both_databases = on("redis-postgres", "embedded-sqlite")


@pytest.fixture
def bench_module() -> str:
    return PROJECT


class TestHardLimits:
    @pytest.mark.report("time-limits")
    @on_both_databases
    def test_a_hard_limit_is_one_failure_and_no_crash(self, bench: Bench) -> None:
        worker, _ = start_worker_and_beat(bench)
        result = bench.project.work.apply_async(
            ("tick", 120), time_limit=2, link_error=bench.project.failed.s()
        )
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=20)
        ended = wait_for_status(bench, result.id, "failed")
        assert (ended.token, ended.crashes, ended.wake_at) == (2, 0, None)
        wait_for_step(bench, result, "errback TimeLimitExceeded")
        bench.wait_for(lambda: len(worker.pool_pids()) == 2, message="the pool is whole again")
        bench.wait_for(bench.queue_is_empty)
        assert tokens_of(bench, result) == [1]
        assert bench.witness.count(result.id, "errback TimeLimitExceeded") == 1
        assert bench.witness.count(result.id, "failure") == 1
        assert bench.witness.count(result.id, "lease_lost") == 0
        assert bench.project.healthy.delay(7).get(timeout=20) == 7

    @pytest.mark.report("time-limits")
    @on("redis-postgres")
    def test_it_runs_again_where_a_failure_is_not_to_be_acknowledged(self, bench: Bench) -> None:
        bench.configure(task_acks_on_failure_or_timeout=False)
        start_worker_and_beat(bench)
        result = bench.project.work.apply_async(("tick", 120, 0.1), time_limit=2)
        assert result.get(timeout=30) == ["tick", 2]
        assert tokens_of(bench, result) == [1, 2]
        assert bench.witness.count(result.id, "failure") == 0
        assert wait_for_status(bench, result.id, "succeeded").crashes == 0

    @on("redis-postgres")
    def test_gevent_s_hard_limit_is_one_failure_too(self, bench: Bench) -> None:
        start_worker_and_beat(bench, pool="gevent")
        result = bench.project.work.apply_async(("tick", 120), time_limit=2)
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=20)
        assert wait_for_status(bench, result.id, "failed").crashes == 0
        assert tokens_of(bench, result) == [1]
        assert bench.project.healthy.delay(7).get(timeout=20) == 7


class TestSoftLimits:
    @on("redis-postgres")
    def test_a_soft_limit_is_raised_in_the_body(self, bench: Bench) -> None:
        bench.worker()
        result = bench.project.heeds_soft_limit.apply_async((120,), soft_time_limit=1)
        assert result.get(timeout=20) == "limited"
        assert bench.witness.count(result.id, "soft limit") == 1
        wait_for_status(bench, result.id, "succeeded")
        assert_no_traceback(bench)

    @on("redis-postgres")
    def test_a_soft_limit_never_hits_a_claim(self, bench: Bench) -> None:
        """The database stands still while the limit passes."""
        proxy = bench.proxy(bench.store_url)
        worker = bench.worker(env={"CELERY_DURABLE_DATABASE_URL": proxy.url}, concurrency=2)
        proxy.freeze()
        results = [
            bench.project.heeds_soft_limit.apply_async((seconds,), soft_time_limit=1)
            for seconds in (0.5, 120)
        ]
        bench.wait_for(lambda: worker.logs().count("Soft time limit") == 2, message="the limits have passed")
        proxy.heal()
        # It counts again for the body.
        assert [result.get(timeout=20) for result in results] == ["done", "limited"]
        for result in results:
            assert tokens_of(bench, result) == [1]
        assert_no_traceback(bench)


@pytest.mark.report("time-limits")
@on("redis-postgres")
def test_limits_count_one_run_and_no_sleep(bench: Bench) -> None:
    start_worker_and_beat(bench)
    options = {"soft_time_limit": 3, "time_limit": 4}
    result = bench.project.two_steps_and_a_nap.apply_async((2, 2), **options)
    assert result.get(timeout=30) == "done"
    assert wait_for_status(bench, result.id, "succeeded").token == 2
