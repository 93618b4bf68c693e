"""Fixtures for every test that needs a database, a broker or a real Celery process.

Each pytest process has servers of its own, started when first asked for, and gone with it.

    sqlite_url       str: the URL of an SQLite file in `tmp_path`; nothing is in it yet
    postgres_url     str: the URL of a fresh, empty database on this run's PostgreSQL
    store_url        str: runs the test twice, on "sqlite" and on "postgres"

    bench            Bench: a deployment of the project `bench_module`; runs the test on
                     "embedded-sqlite", "redis-sqlite", "redis-postgres", "rabbitmq-postgres".
                     `@on("redis-postgres", ...)` (tests.nodes.on) chooses
                     A test may kill or freeze its servers: they keep their data, and are
                     working again for the next test
    private_bench    the same with servers of its own, for what would outlive the test.
                     `@on("redis-postgres", ..., fixture="private_bench")`. RabbitMQ takes 6 s
    bench_module     str: the project; override it in a test module or folder

    servers          Servers: `.postgres`, `.redis`, `.rabbit` of this process, shared by its tests
    private_servers  Servers: the same for one test alone
    server_options   dict: settings of private servers, `{"rabbit": {"consumer_timeout": 5000}}`;
                     override it, or parametrize it: `@pytest.mark.parametrize("server_options", …)`

A `Bench`:

    .worker(*options, name="worker", pool="prefork", concurrency=2, queues=None, env=None,
            wait=True) -> Worker
    .beat(*options, name="beat", env=None, wait=True) -> Beat
    .process(*arguments, name, ready=None, env=None, wait=True) -> CeleryProcess
    .celery(*arguments, env=None, timeout=30) -> CompletedProcess[str]
    .configure(**settings)      Celery settings for what starts from now on
    .app() -> Celery            the project's app in this process; .project: its module, with tasks
    .env, .folder, .deployment  what the processes get, and run in
    .store_url, .store_server   the database; PostgresServer, or None for SQLite
    .broker, .broker_server     .broker.url, .messages() -> (ready, unacknowledged),
                                .lose_everything(); RedisServer, RabbitServer or None
    .queue_is_empty() -> bool   no task message, neither in a queue nor unacknowledged
    .witness                    .count(task_id=None, step=None), .steps(task_id), .sightings(...);
                                in a task: Witness.here().saw(task_id, step, attempt=0)
    .proxy(url) -> FaultProxy   .url, .delay(s), .freeze(), .reset(), .refuse(), .heal(),
                                .cut_after(n, "down" | "up"), .cut_answer_to(b"COMMIT")
    .wait_for(condition, timeout=20, message="")   polls; a timeout shows the logs

A process (Worker, Beat, a server; `LocalProcess`): .start(wait=True), .restart(), .stop(),
.kill(), .freeze(pid=None), .thaw(pid=None), .signal(number, pid=None), .wait(timeout),
.running, .exit_code, .pid, .tree(), .children(), .logs(all_starts=False); a Worker also has
.hostname and .pool_pids().

When a test fails, the report shows the logs of its bench's processes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.nodes import DEPLOYMENTS, Bench, Servers, WaitTimeout
from tests.nodes.nursery import Nursery
from tests.nodes.workers import CeleryProcess


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    """Workers and beats come from a process that has Celery loaded: they start in a tenth of the time."""
    CeleryProcess.nursery = Nursery()
    yield
    CeleryProcess.nursery.close()
    CeleryProcess.nursery = None


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The servers that the tests of this process share."""
    servers = Servers()
    yield servers
    servers.remove()


@pytest.fixture
def server_options() -> dict[str, dict[str, object]]:
    """Settings of the private servers, by the server's name."""
    return {}


@pytest.fixture
def private_servers(server_options: dict[str, dict[str, object]]) -> Iterator[Servers]:
    """Servers of one test alone."""
    servers = Servers(**server_options)
    yield servers
    servers.remove()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def postgres_url(servers: Servers) -> Iterator[str]:
    """The URL of an empty PostgreSQL database, dropped after the test."""
    server = servers.postgres
    name = server.create_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, of each kind in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def bench_module() -> str:
    """The module of the Celery project that benches run."""
    return "tests.integration.proj"


@pytest.fixture(params=list(DEPLOYMENTS))
def bench(
    request: pytest.FixtureRequest,
    servers: Servers,
    tmp_path: Path,
    bench_module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    """A deployment on the shared servers."""
    deployment = DEPLOYMENTS[request.param]
    bench = Bench(deployment, servers, tmp_path, bench_module, monkeypatch)
    yield bench
    bench.close()


@pytest.fixture(params=list(DEPLOYMENTS))
def private_bench(
    request: pytest.FixtureRequest,
    private_servers: Servers,
    tmp_path: Path,
    bench_module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    """A deployment on servers of its own."""
    deployment = DEPLOYMENTS[request.param]
    bench = Bench(deployment, private_servers, tmp_path, bench_module, monkeypatch)
    yield bench
    bench.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the logs of a failed test's processes, unless the error shows them already."""
    report = yield
    shown = call.excinfo is not None and isinstance(call.excinfo.value, WaitTimeout)
    if report.failed and not shown:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Bench) and value.processes:
                report.sections.append(("processes of the bench", value.report()))
    return report
