"""How many connections a process needs does not depend on how many tasks it runs."""

from __future__ import annotations

import os
import time

import psutil  # type: ignore[import-untyped]
import psycopg
import pytest

from celery_durable.store.engine import POOL_SIZE
from tests.integration.leases_support import PROJECT, tokens_of
from tests.integration.support import wait_for_status
from tests.nodes import Bench, Worker, on

#: One more renews the leases.
LIMIT = POOL_SIZE + 1
SCARCE = pytest.mark.parametrize("server_options", [{"postgres": {"max_connections": 40}}], ids=["scarce"])


@pytest.fixture
def bench_module() -> str:
    return PROJECT


@pytest.mark.report("connections-per-task")
@SCARCE
@on("redis-postgres", fixture="private_bench")
@pytest.mark.parametrize(("pool", "tasks"), [("threads", 100), ("gevent", 200)])
def test_many_tasks_in_one_process_share_few_connections(private_bench: Bench, pool: str, tasks: int) -> None:
    bench = private_bench
    worker = bench.worker(pool=pool, concurrency=tasks)
    results = [bench.project.work.delay("time.sleep", 8) for _ in range(tasks)]
    most = 0

    def all_run() -> bool:
        nonlocal most
        most = max(most, connections_of(worker, bench))
        return bench.witness.count(step="body") == tasks

    bench.wait_for(all_run, 60, "all run at once")
    assert bench.witness.count(step="done") < tasks / 2
    hog = take_all_connections(bench)
    most = max(most, connections_of(worker, bench))
    time.sleep(2)
    for connection in hog:
        connection.close()
    for result in results:
        assert result.get(timeout=60) == ["time.sleep", 1]
    assert most <= LIMIT
    assert bench.witness.count(step="lease_lost") == 0
    for result in results[:5]:
        wait_for_status(bench, result.id, "succeeded")
        assert tokens_of(bench, result) == [1]


@on("redis-postgres")
def test_a_pool_process_that_is_replaced_leaves_no_connection_and_no_lease(bench: Bench) -> None:
    # Reached by every process, after its first task.
    worker = bench.worker("--max-memory-per-child=1", concurrency=1)
    results = [bench.project.eats_memory.delay(1) for _ in range(4)]
    pids = [result.get(timeout=40) for result in results]
    assert len(set(pids)) == 4
    bench.wait_for(lambda: not set(pids) & set(worker.tree()), message="the last one is replaced too")
    for result in results:
        found = wait_for_status(bench, result.id, "succeeded")
        assert (found.owner, found.crashes, found.token) == (None, 0, 1)
    assert bench.witness.count(step="lease_lost") == 0
    bench.wait_for(lambda: sessions_of(bench) <= {*worker.tree()}, message="their connections are gone")


def sessions_of(bench: Bench) -> set[int]:
    """The processes that have connections to the database; this one's own apart."""
    assert bench.store_server is not None
    port = bench.store_server.port
    return {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.raddr
        and connection.raddr.port == port
        and connection.pid not in (None, os.getpid(), *bench.store_server.tree())
    }


def connections_of(worker: Worker, bench: Bench) -> int:
    """How many connections to the database one process has open."""
    assert bench.store_server is not None
    connections = psutil.Process(worker.pid).net_connections(kind="tcp")
    return sum(1 for c in connections if c.raddr and c.raddr.port == bench.store_server.port)


def take_all_connections(bench: Bench) -> list[psycopg.Connection[tuple[object, ...]]]:
    """Leave none for anybody else."""
    url = bench.store_url.replace("+psycopg", "")
    taken: list[psycopg.Connection[tuple[object, ...]]] = []
    try:
        while True:
            taken.append(psycopg.connect(url))
    except psycopg.OperationalError:
        return taken
