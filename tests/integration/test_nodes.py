"""The nodes themselves: servers, workers and faults do what the other tests rely on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import create_engine, inspect, text

from tests.nodes import (
    Bench,
    FaultProxy,
    LocalProcess,
    ProcessEnded,
    Servers,
    WaitTimeout,
    Witness,
    on,
    tree,
    wait_for,
)
from tests.nodes.workers import ROOT

# A parent with two children, one of them with a child, and another process group among them.
FAMILY = """
import os, subprocess, sys, time
child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
subprocess.Popen(["sleep", "600"], process_group=0) if sys.version_info > (3, 11) else (
    subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp))
print("born", flush=True)
time.sleep(600)
"""


@pytest.fixture
def bench_module() -> str:
    return "tests.nodes.sample"


@pytest.fixture
def family(tmp_path: Path) -> Iterator[LocalProcess]:
    """A running process with three descendants."""
    process = LocalProcess("family", [sys.executable, "-c", FAMILY], folder=tmp_path, ready="born")
    process.start()
    wait_for(lambda: len(process.tree()) == 4, message="all four are there")
    yield process
    process.remove()


class TestProcess:
    def test_kill_takes_the_whole_tree(self, family: LocalProcess) -> None:
        pids = family.tree()
        family.kill()
        assert not any(map(tree.is_alive, pids))
        assert family.exit_code == -signal.SIGKILL

    def test_children_of_a_dead_parent_are_still_found_and_killed(self, family: LocalProcess) -> None:
        orphans = family.tree()[1:]
        family.signal(signal.SIGKILL)
        family.wait()
        assert family.tree() == orphans
        family.kill()
        assert not any(map(tree.is_alive, orphans))

    def test_a_frozen_tree_stands_still_until_it_is_thawed(self, family: LocalProcess) -> None:
        family.freeze()
        assert {psutil.Process(pid).status() for pid in family.tree()} == {psutil.STATUS_STOPPED}
        family.thaw()
        wait_for(lambda: psutil.Process(family.pid).status() != psutil.STATUS_STOPPED)

    def test_one_child_can_be_frozen_alone(self, family: LocalProcess) -> None:
        child = family.children()[0]
        family.freeze(child)
        assert psutil.Process(child).status() == psutil.STATUS_STOPPED
        assert psutil.Process(family.pid).status() != psutil.STATUS_STOPPED

    def test_a_frozen_tree_can_be_killed(self, family: LocalProcess) -> None:
        family.freeze()
        family.kill()
        assert family.tree() == []

    def test_the_log_is_that_of_the_last_start(self, tmp_path: Path) -> None:
        process = LocalProcess("echo", ["sh", "-c", "echo $$"], folder=tmp_path)
        process.start().wait()
        first = process.logs()
        process.start().wait()
        assert process.logs() not in ("", first)
        assert process.logs(all_starts=True) == first + process.logs()

    def test_a_process_that_ends_before_it_is_ready_is_an_error_with_its_log(self, tmp_path: Path) -> None:
        process = LocalProcess("broken", ["sh", "-c", "echo no luck; exit 3"], folder=tmp_path, ready="ready")
        with pytest.raises(ProcessEnded, match="no luck"):
            process.start()
        assert process.exit_code == 3

    def test_a_timeout_shows_the_log(self, family: LocalProcess) -> None:
        with pytest.raises(WaitTimeout, match=r"(?s)pigs fly.*family.*born"):
            wait_for(lambda: False, 0.05, "pigs fly", [family])

    def test_everything_dies_with_the_tests(self, tmp_path: Path) -> None:
        """The process that plays pytest is killed and has no chance to clean up."""
        tests = subprocess.Popen(
            [sys.executable, "-c", KILLED_TESTS, str(tmp_path), FAMILY],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert tests.stdout is not None
        root, folder = tests.stdout.readline().split()
        wait_for(lambda: len(tree.members(int(root))) == 4)
        tests.kill()
        tests.wait()
        tests.stdout.close()
        wait_for(lambda: not tree.members(int(root)), message="the family has died")
        wait_for(lambda: not Path(folder).exists(), message="the folder is gone")


KILLED_TESTS = """
import sys, time
from pathlib import Path
from tests.nodes.process import LocalProcess
from tests.nodes.folders import new_folder
folder, family = sys.argv[1:]
process = LocalProcess("family", [sys.executable, "-c", family], folder=Path(folder), ready="born")
print(process.start().pid, new_folder("left"), flush=True)
time.sleep(600)
"""


class TestPostgres:
    def test_every_test_gets_an_empty_database_of_its_own(self, servers: Servers, postgres_url: str) -> None:
        name = postgres_url.rpartition("/")[2]
        servers.postgres.execute("CREATE TABLE t (n int)", database=name)
        other = servers.postgres.create_database()
        count = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        assert servers.postgres.execute(count, database=name) == [(1,)]
        assert servers.postgres.execute(count, database=other) == [(0,)]

    def test_a_template_is_copied(self, servers: Servers) -> None:
        template = servers.postgres.create_database()
        servers.postgres.execute("CREATE TABLE t AS SELECT 7 AS n", database=template)
        copy = servers.postgres.create_database(template)
        assert servers.postgres.execute("SELECT n FROM t", database=copy) == [(7,)]

    def test_committed_data_survives_kill_and_restart(self, private_servers: Servers) -> None:
        server = private_servers.postgres
        server.execute("CREATE TABLE t AS SELECT 7 AS n")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            server.execute("SELECT 1")
        server.start()
        assert server.execute("SELECT n FROM t") == [(7,)]

    def test_a_frozen_server_does_not_answer(self, private_servers: Servers) -> None:
        server = private_servers.postgres
        server.freeze()
        assert not server.is_ready()
        server.thaw()
        wait_for(server.is_ready)

    def test_it_stops_in_good_order(self, private_servers: Servers) -> None:
        assert private_servers.postgres.stop() == 0


class TestRedis:
    def test_confirmed_data_survives_kill_and_restart(self, private_servers: Servers) -> None:
        server = private_servers.redis
        with server.client() as client:
            client.set("k", "v")
        server.kill()
        with server.client() as client, pytest.raises(redis.ConnectionError):
            client.get("k")
        server.start()
        with server.client() as client:
            assert client.get("k") == "v"


class TestSQLite:
    def test_both_stores_are_empty_databases(self, store_url: str) -> None:
        engine = create_engine(store_url)
        assert inspect(engine).get_table_names() == []
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE t (n int)"))
        assert inspect(engine).get_table_names() == ["t"]
        engine.dispose()


class TestWitness:
    def test_it_counts_what_processes_saw(self, tmp_path: Path) -> None:
        witness = Witness(tmp_path / "witness.jsonl")
        assert witness.count() == 0
        for step in ("pack", "send", "send"):
            witness.saw("a", step)
        witness.saw("b", "send", attempt=2)
        assert witness.count("a", "send") == 2
        assert witness.count(step="send") == 3
        assert witness.steps("a") == ["pack", "send", "send"]
        assert [(seen.attempt, seen.pid) for seen in witness.sightings("b")] == [(2, os.getpid())]


class TestBench:
    """The same on every deployment."""

    def test_a_task_runs_and_its_result_arrives(self, bench: Bench) -> None:
        bench.worker()
        assert bench.project.add.delay(2, 3).get(timeout=20) == 5
        bench.wait_for(bench.queue_is_empty, message="the message is acknowledged")

    def test_a_waiting_message_is_seen_and_lost_at_will(self, bench: Bench) -> None:
        assert bench.queue_is_empty()
        bench.project.add.delay(2, 3)
        bench.wait_for(lambda: tuple(bench.broker.messages()) == (1, 0))
        assert not bench.queue_is_empty()
        bench.broker.lose_everything()
        assert bench.queue_is_empty()


class TestWorkerFaults:
    @on("redis-postgres")
    def test_a_frozen_worker_takes_nothing_until_it_is_thawed(self, bench: Bench) -> None:
        worker = bench.worker()
        worker.freeze()
        result = bench.project.add.delay(1, 1)
        assert not bench.app().control.ping([worker.hostname], timeout=0.3)
        assert not result.ready()
        worker.thaw()
        assert result.get(timeout=20) == 2

    @on("redis-postgres")
    def test_one_pool_child_is_killed_and_replaced(self, bench: Bench) -> None:
        worker = bench.worker(concurrency=1)
        (child,) = worker.pool_pids()
        assert bench.project.pid.delay().get(timeout=20) == child
        worker.signal(signal.SIGKILL, child)
        successor = bench.project.pid.delay().get(timeout=20)
        assert successor in worker.pool_pids()
        assert successor != child

    @on("redis-sqlite")
    def test_settings_reach_the_worker_and_the_test(self, bench: Bench) -> None:
        bench.configure(task_default_queue="elsewhere", broker_transport_options={"a": 1})
        bench.configure(broker_transport_options={"b": 2})
        worker = bench.worker()
        assert "elsewhere" in worker.logs()
        assert bench.app().conf.broker_transport_options == {"a": 1, "b": 2}
        assert bench.project.add.delay(2, 3).get(timeout=20) == 5


class TestServerFaults:
    @on("rabbitmq-postgres")
    def test_a_broker_is_killed_and_started_and_loses_nothing(self, bench: Bench) -> None:
        # RabbitMQ keeps what it has confirmed; without this nobody waits for it to do so.
        bench.configure(broker_transport_options={"confirm_publish": True})
        result = bench.project.add.delay(2, 3)
        assert bench.broker_server is not None
        bench.broker_server.kill()
        bench.broker_server.start()
        assert bench.broker.messages().ready == 1
        bench.worker()
        assert result.get(timeout=30) == 5

    def test_a_server_that_a_test_killed_runs_for_the_next(self, private_servers: Servers) -> None:
        private_servers.redis.kill()
        assert private_servers.redis.is_ready()

    @on("redis-postgres", fixture="private_bench")
    @pytest.mark.parametrize("server_options", [{"postgres": {"max_connections": 7}}])
    def test_private_servers_can_have_settings(self, private_bench: Bench, servers: Servers) -> None:
        server = private_bench.store_server
        assert server not in (None, servers.postgres)
        assert server is not None
        assert server.execute("SHOW max_connections") == [("7",)]


class TestProxy:
    @pytest.fixture
    def proxy(self, servers: Servers) -> Iterator[FaultProxy]:
        with FaultProxy(servers.redis.url()) as proxy:
            yield proxy

    @pytest.fixture
    def client(self, proxy: FaultProxy) -> Iterator[redis.Redis]:
        client = redis.Redis.from_url(proxy.url, socket_timeout=0.5, retry=Retry(NoBackoff(), 0))
        client.ping()
        yield client
        client.close()

    def test_it_passes_on_what_it_gets(self, client: redis.Redis, proxy: FaultProxy) -> None:
        client.set("big", b"x" * 1_000_000)
        assert client.get("big") == b"x" * 1_000_000
        assert proxy.connections == 1

    def test_it_delays(self, client: redis.Redis, proxy: FaultProxy) -> None:
        proxy.delay(0.1)
        began = time.monotonic()
        client.ping()
        assert time.monotonic() - began >= 0.2

    def test_it_freezes_open_and_new_connections(self, client: redis.Redis, proxy: FaultProxy) -> None:
        proxy.freeze()
        for _ in "open", "new":
            with pytest.raises(redis.TimeoutError):
                client.ping()
        proxy.heal()
        assert client.ping()

    def test_it_resets_connections_and_takes_new_ones(self, proxy: FaultProxy) -> None:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
            wait_for(lambda: proxy.connections == 1)
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(100) == b"+PONG\r\n"

    def test_it_refuses_until_it_is_healed(self, client: redis.Redis, proxy: FaultProxy) -> None:
        proxy.refuse()
        for _ in "reset", "refused":
            with pytest.raises(redis.ConnectionError):
                client.ping()
        proxy.heal()
        assert client.ping()

    def test_a_connection_that_is_being_made_is_refused_too(
        self, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect, is_asked, may_go_on = asyncio.open_connection, threading.Event(), threading.Event()

        async def connect_slowly(*target: object) -> object:
            is_asked.set()
            while not may_go_on.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.001)
            return await connect(*target)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "open_connection", connect_slowly)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
            assert is_asked.wait(5)
            proxy.refuse()
            may_go_on.set()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)

    def test_it_cuts_after_some_bytes(self, client: redis.Redis, proxy: FaultProxy) -> None:
        client.set("big", b"x" * 1000)
        proxy.cut_after(500)
        with pytest.raises(redis.ConnectionError):
            client.get("big")
        proxy.heal()
        assert client.get("big") == b"x" * 1000

    def test_it_makes_a_commit_ambiguous(self, servers: Servers, postgres_url: str) -> None:
        with FaultProxy(postgres_url.replace("+psycopg", "")) as proxy:
            with psycopg.connect(proxy.url) as connection:
                connection.execute("CREATE TABLE t AS SELECT 7 AS n")
                proxy.cut_answer_to(b"COMMIT")
                with pytest.raises(psycopg.OperationalError):
                    connection.commit()
            assert proxy.cuts_left == 0
        name = postgres_url.rpartition("/")[2]
        assert servers.postgres.execute("SELECT n FROM t", database=name) == [(7,)]

    @on("redis-postgres")
    @pytest.mark.parametrize("fault", ["freeze"])
    def test_a_worker_alone_loses_its_broker_for_a_while(self, bench: Bench, fault: str) -> None:
        assert bench.broker.url is not None
        proxy = bench.proxy(bench.broker.url)
        bench.worker(env={"CELERY_BROKER_URL": proxy.url})
        getattr(proxy, fault)()
        result = bench.project.add.delay(2, 3)
        if fault == "freeze":
            assert not result.ready()
        proxy.heal()
        assert result.get(timeout=40) == 5
