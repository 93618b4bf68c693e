"""Tasks that take their process along: brought back at once, a few times, then a failure that says why."""

from __future__ import annotations

import re
import signal
import time
from functools import partial
from typing import Any

import pytest

from celery_durable import TaskQuarantined
from tests.integration.leases_support import PROJECT, crashes_of, tokens_of, wait_for_step
from tests.integration.support import start_worker_and_beat, wait_for_status
from tests.nodes import Bench, Worker, on
from tests.nodes.tree import is_alive

#: Runs that a task is given which makes no progress: the default of durable_max_crashes.
RUNS = 3


@pytest.fixture
def bench_module() -> str:
    return PROJECT


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("bench", "deadly_ones", "healthy_ones"),
    [("redis-postgres", 20, 200), ("embedded-sqlite", 1, 12)],
    indirect=["bench"],
)
def test_what_kills_its_process_is_taken_out_and_harms_nobody_else(
    bench: Bench, deadly_ones: int, healthy_ones: int
) -> None:
    # Nobody waits for a lease to run out. A job that Celery's pool has written to a process just as that died
    # may be lost there: it is adopted after ten seconds, and then sent again.
    bench.configure(durable_lease_ttl=120, durable_heartbeat_interval=10, durable_resend_delay=5)
    worker, _ = start_worker_and_beat(bench, concurrency=3)
    project = bench.project
    once = project.dies.delay(1)
    exits = project.dies.delay(1, "exit")
    at_most_once = project.dies_at_most_once.delay()
    progresses = project.progresses_and_dies.delay(RUNS)
    deadly, healthy = [], []
    for number in range(healthy_ones):
        healthy.append(project.healthy.delay(number))
        if number % (healthy_ones // deadly_ones) == 0:
            deadly.append(project.dies.apply_async(link_error=project.failed.s()))

    assert [result.get(timeout=50) for result in healthy] == list(range(healthy_ones))
    for result in deadly:
        with pytest.raises(TaskQuarantined, match=f"died {RUNS} times in a row"):
            result.get(timeout=30)
        assert_taken_out(bench, result, RUNS)
        wait_for_step(bench, result, "errback TaskQuarantined")
    with pytest.raises(TaskQuarantined, match="died once"):
        at_most_once.get(timeout=20)
    assert_taken_out(bench, at_most_once, 1)

    # Who made progress, or died once, is none of them.
    for result in (once, exits):
        assert result.get(timeout=20) == 2
        assert tokens_of(bench, result) == [1, 2]
        assert tokens_of(bench, result, "recovered") == [2]
    assert progresses.get(timeout=20) == RUNS + 1
    assert tokens_of(bench, progresses) == list(range(1, RUNS + 1))
    for result in healthy:
        assert tokens_of(bench, result) == [1]
        assert crashes_of(bench, result) == 0
    assert_told_once(bench, failures=[*deadly, at_most_once], successes=[*healthy, once, exits, progresses])

    # A main process that dies alone leaves no process behind that would go on with its tasks or sockets.
    children = worker.pool_pids()
    worker.signal(signal.SIGKILL)
    bench.wait_for(lambda: not any(is_alive(pid) for pid in children), 2, "its pool processes are gone")


@on("redis-postgres")
def test_a_dead_process_is_noticed_as_soon_after_the_broker_was_away(bench: Bench) -> None:
    """Celery forgets what its event loop had to do when the connection is lost."""
    assert bench.broker.url is not None
    bench.configure(durable_lease_ttl=120, durable_heartbeat_interval=10)
    proxy = bench.proxy(bench.broker.url)
    worker = bench.worker(env={"CELERY_BROKER_URL": proxy.url}, concurrency=1, wait=False)
    bench.beat()
    worker.wait_until_ready()
    for losses in (1, 2):
        assert bench.project.healthy.delay(losses).get(timeout=20) == losses
        proxy.reset()
        bench.wait_for(partial(has_lost_broker, worker, losses), message="it has noticed")
    result = bench.project.progresses_and_dies.delay(3)
    assert result.get(timeout=30) == 4
    # Celery itself looks every 5 s: one death may come just before that, but not the next one too.
    died = [seen.time for seen in bench.witness.sightings(result.id, "body")]
    noticed = times_of("exited with", worker)
    assert len(died) == len(noticed) == 3
    assert all(then - before < 2 for before, then in zip(died, noticed, strict=True)), (died, noticed)


def times_of(text: str, worker: Worker) -> list[float]:
    """When a worker has logged something."""
    lines = re.findall(rf"^\[(.+?),(\d+): .*{text}", worker.logs(), re.MULTILINE)
    return [time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1000 for at, ms in lines]


def has_lost_broker(worker: Worker, times: int) -> bool:
    return worker.logs().count("Connection to broker lost") == times


def assert_taken_out(bench: Bench, result: Any, runs: int) -> None:
    """It has run so many times, and somebody who does not run it has told that it failed."""
    found = wait_for_status(bench, result.id, "quarantined")
    assert (found.owner, found.wake_at) == (None, None)
    assert result.state == "FAILURE"
    assert tokens_of(bench, result) == list(range(1, runs + 1))


def assert_told_once(bench: Bench, *, failures: list[Any], successes: list[Any]) -> None:
    """Of each task its end was told once, and of none that it was stopped."""
    for result in failures:
        assert bench.witness.count(result.id, "failure") == 1
        assert bench.witness.count(result.id, "quarantined") == 1
        assert bench.witness.count(result.id, "errback TaskQuarantined") <= 1
    for result in successes:
        wait_for_step(bench, result, "success")
        assert bench.witness.count(result.id, "success") == 1
    assert bench.witness.count(step="failure") == len(failures)
    for what in ("lease_lost", "revoked"):
        assert bench.witness.count(step=what) == 0
    bench.wait_for(bench.queue_is_empty)
