"""pytest-celery's fixtures, with local processes where pytest-celery would start containers.

A conftest that imports these names replaces what pytest-celery makes with Docker, and only that:
`celery_setup`, the clusters and their configuration, the nodes and the `default_worker_*`
fixtures (command, environment, content, tasks, signals, app) remain as documented there.

Servers are shared by the tests of one pytest process, each test having a database or vhost of
its own; one that a test has killed or frozen is working again for the next test.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import (  # type: ignore[import-untyped]
    CELERY_RABBITMQ_BROKER,
    CELERY_REDIS_BACKEND,
    CELERY_REDIS_BROKER,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestWorker,
    CeleryWorkerContainer,
    RabbitMQContainer,
    RedisContainer,
)

from tests.nodes.bench import Servers
from tests.nodes.containers import (
    PostgresContainer,
    PostgresTestBackend,
    ProcessContainer,
    ProcessTestWorker,
    ServerContainer,
    on_process,
)
from tests.nodes.process import LocalProcess
from tests.nodes.workers import ROOT

CELERY_POSTGRES_BACKEND = "celery_postgres_backend"


# pytest-celery has these two in sets, whose order differs between the processes of pytest-xdist.
@pytest.fixture(params=[CELERY_REDIS_BROKER, CELERY_RABBITMQ_BROKER])
def celery_broker(request: pytest.FixtureRequest) -> Iterator[CeleryTestBroker]:
    """The broker node of the test, of each kind in turn."""
    broker = request.getfixturevalue(request.param)
    yield broker
    broker.teardown()


@pytest.fixture(params=[CELERY_REDIS_BACKEND, CELERY_POSTGRES_BACKEND])
def celery_backend(request: pytest.FixtureRequest) -> Iterator[CeleryTestBackend]:
    """The result store node of the test, of each kind in turn."""
    backend = request.getfixturevalue(request.param)
    yield backend
    backend.teardown()


@pytest.fixture
def default_redis_broker(servers: Servers, default_redis_broker_cls: type[RedisContainer]) -> Iterator[Any]:
    """A Redis database as a broker."""
    server = servers.redis
    url = server.url(server.new_database())
    yield _server_container(default_redis_broker_cls, server, url)
    server.thaw()


@pytest.fixture
def default_redis_backend(servers: Servers, default_redis_backend_cls: type[RedisContainer]) -> Iterator[Any]:
    """A Redis database as a result store."""
    server = servers.redis
    url = server.url(server.new_database())
    yield _server_container(default_redis_backend_cls, server, url)
    server.thaw()


@pytest.fixture
def default_rabbitmq_broker(
    servers: Servers, default_rabbitmq_broker_cls: type[RabbitMQContainer]
) -> Iterator[Any]:
    """A RabbitMQ vhost as a broker."""
    server = servers.rabbit
    vhost = server.new_vhost()
    yield _server_container(default_rabbitmq_broker_cls, server, server.url(vhost))
    server.thaw()
    if server.running:
        server.delete_vhost(vhost)


@pytest.fixture
def default_postgres_backend_cls() -> type[PostgresContainer]:
    """The container class of PostgreSQL; override it to configure it."""
    return PostgresContainer


@pytest.fixture
def default_postgres_backend(
    servers: Servers, default_postgres_backend_cls: type[PostgresContainer]
) -> Iterator[Any]:
    """A PostgreSQL database as a result store."""
    server = servers.postgres
    database = server.create_database()
    url = server.url(database, "db+postgresql+psycopg")
    yield _server_container(default_postgres_backend_cls, server, url)
    server.thaw()
    if server.running:
        server.drop_database(database)


@pytest.fixture
def celery_postgres_backend(default_postgres_backend: Any) -> Iterator[PostgresTestBackend]:
    """The PostgreSQL result store node."""
    backend = PostgresTestBackend(default_postgres_backend)
    yield backend
    backend.teardown()


@pytest.fixture
def default_worker_cls() -> type[CeleryTestWorker]:
    """The worker node's class; override it with a subclass of `ProcessTestWorker`."""
    return ProcessTestWorker


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: type[CeleryWorkerContainer],
    default_worker_command: list[str],
    default_worker_env: dict[str, str],
    default_worker_initial_content: dict[str, bytes],
    tmp_path: Path,
) -> Iterator[Any]:
    """A worker process; what would be mounted as /app is written to its folder."""
    identity = uuid.uuid4().hex[:12]
    process = LocalProcess(
        f"worker-{identity}",
        # On a machine of its own %h would be unique.
        [part.replace("%h", identity) for part in default_worker_command],
        folder=_written(default_worker_initial_content, tmp_path / identity),
        env=_worker_environment(default_worker_env, tmp_path / identity),
        ready=lambda: container.ready_prompt in process.logs(),
    )
    container = on_process(default_worker_container_cls, ProcessContainer)(process, identity)
    process.start()
    yield container
    process.remove()


def _server_container(container: type[Any], server: LocalProcess, url: str) -> Any:
    return on_process(container, ServerContainer)(server, uuid.uuid4().hex[:12], url)


def _written(content: dict[str, bytes], folder: Path) -> Path:
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def _worker_environment(env: dict[str, str], folder: Path) -> dict[str, str]:
    programs = str(Path(sys.executable).parent)
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
    }
