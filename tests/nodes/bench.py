"""A test bench: one deployment of a Celery project, of which every part can be broken."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

import celery
import pytest
from celery import _state

from tests.nodes import witness
from tests.nodes.brokers import BrokerPlace, EmbeddedPlace, RabbitPlace, RedisPlace
from tests.nodes.postgres import PostgresServer
from tests.nodes.process import LocalProcess, inherited_environment
from tests.nodes.proxy import FaultProxy
from tests.nodes.rabbit import RabbitServer
from tests.nodes.redis_server import RedisServer
from tests.nodes.waiting import wait_for
from tests.nodes.witness import Witness
from tests.nodes.workers import ROOT, Beat, CeleryProcess, Worker, celery_command

T = TypeVar("T")
Process = TypeVar("Process", bound=LocalProcess)

# Its type stubs leave out what is private.
_celery_state: Any = _state

#: The environment variable with Celery settings as JSON, for the project's app to read.
CONF_VARIABLE = "TEST_CELERY_CONF"

#: Redis transport options with which the messages of a killed worker come back in some 3 s.
#: By default that takes the visibility timeout and up to 100 s more, and five minutes more if
#: the worker dies while it holds the mutex.
FAST_REDELIVERY = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}


@dataclass(frozen=True)
class Deployment:
    """Which broker and which database a project runs on."""

    broker: Literal["embedded", "redis", "rabbitmq"]
    store: Literal["sqlite", "postgres"]

    @property
    def id(self) -> str:
        return f"{self.broker}-{self.store}"


DEPLOYMENTS = {
    deployment.id: deployment
    for deployment in (
        Deployment("embedded", "sqlite"),
        Deployment("redis", "sqlite"),
        Deployment("redis", "postgres"),
        Deployment("rabbitmq", "postgres"),
    )
}


def on(*deployments: str, fixture: str = "bench") -> pytest.MarkDecorator:
    """Mark a test to run on these deployments only: `@on("redis-postgres")`."""
    return pytest.mark.parametrize(fixture, deployments, indirect=True)


class Servers:
    """The servers of one owner: made and started when first asked for.

    Whoever asks gets a server that runs: one that an earlier test has killed is started again.
    """

    def __init__(self, **options: Mapping[str, object]) -> None:
        """`postgres={"max_connections": 20}`, `redis=…`, `rabbit=…`: settings of a server."""
        self._options = options
        self._made: dict[str, LocalProcess] = {}

    @property
    def postgres(self) -> PostgresServer:
        return self._get("postgres", PostgresServer)

    @property
    def redis(self) -> RedisServer:
        return self._get("redis", RedisServer)

    @property
    def rabbit(self) -> RabbitServer:
        return self._get("rabbit", RabbitServer)

    def _get(self, name: str, kind: type[Process]) -> Process:
        if name not in self._made:
            make: Callable[..., Process] = kind
            self._made[name] = make(options=self._options.get(name))
        server = cast(Process, self._made[name])
        if not server.running:
            server.start()
        return server

    def made(self) -> list[LocalProcess]:
        """Those that there are by now."""
        return list(self._made.values())

    def remove(self) -> None:
        """Kill them and remove their folders."""
        for server in self._made.values():
            server.remove()
        self._made.clear()


class Bench:
    """One deployment with a folder, an environment, processes and a witness.

    Processes run in `folder` with `env`; the test process does the same as long as the test
    lasts, so that an app made here talks to the same places.
    """

    def __init__(
        self,
        deployment: Deployment,
        servers: Servers,
        folder: Path,
        module: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.deployment = deployment
        self.folder = folder
        self.module = module
        self.witness = Witness(folder / "witness.jsonl")
        #: Everything that runs for this test, servers of its own apart.
        self.processes: list[LocalProcess] = []
        #: The server process of the broker, None for the embedded one.
        self.broker_server: RedisServer | RabbitServer | None = None
        #: The server process of the database, None for SQLite.
        self.store_server: PostgresServer | None = None
        #: The SQLAlchemy URL of the database.
        self.store_url = self._open_store(servers)
        self.broker: BrokerPlace = self._open_broker(servers)
        self.env = self._environment(servers)
        self._monkeypatch = monkeypatch
        self._proxies: list[FaultProxy] = []
        self._conf: dict[str, Any] = {}
        self._project: ModuleType | None = None
        self._enter()

    def _open_store(self, servers: Servers) -> str:
        if self.deployment.store == "sqlite":
            # Where an embedded application keeps it when nothing is configured.
            return f"sqlite:///{self.folder}/celery-durable.db"
        self.store_server = servers.postgres
        return self.store_server.url(self.store_server.create_database())

    def _open_broker(self, servers: Servers) -> BrokerPlace:
        if self.deployment.broker == "redis":
            self.broker_server = servers.redis
            return RedisPlace(servers.redis)
        if self.deployment.broker == "rabbitmq":
            self.broker_server = servers.rabbit
            return RabbitPlace(servers.rabbit)
        return EmbeddedPlace(self.folder)

    def _environment(self, servers: Servers) -> dict[str, str]:
        env = {witness.VARIABLE: str(self.witness.path), CONF_VARIABLE: "{}"}
        if self.broker.url is None:
            return env
        if self.deployment.broker == "redis":
            results = servers.redis.url(servers.redis.new_database())
        else:
            results = f"db+{self.store_url}"
        return env | {
            "CELERY_BROKER_URL": self.broker.url,
            "CELERY_RESULT_BACKEND": results,
            "CELERY_DURABLE_DATABASE_URL": self.store_url,
        }

    def _enter(self) -> None:
        for name in set(os.environ) - set(inherited_environment()):
            if name.startswith("CELERY_"):
                self._monkeypatch.delenv(name)
        for name, value in self.env.items():
            self._monkeypatch.setenv(name, value)
        self._monkeypatch.chdir(self.folder)

    # The project.

    def configure(self, **settings: Any) -> None:
        """Set Celery settings (what JSON can say) for the processes started from now on.

        Call it before `app()`. A setting that is a dict is merged with what was set before.
        """
        for name, value in settings.items():
            old = self._conf.get(name)
            merge = isinstance(old, dict) and isinstance(value, dict)
            self._conf[name] = old | value if merge else value
        self.env[CONF_VARIABLE] = json.dumps(self._conf)
        self._monkeypatch.setenv(CONF_VARIABLE, self.env[CONF_VARIABLE])

    @property
    def project(self) -> ModuleType:
        """The project's module, imported afresh for this test: its tasks and its app."""
        if self._project is None:
            sys.modules.pop(self.module, None)
            self._celery_before = (set(_celery_state._on_app_finalizers), _celery_state._tls.current_app)
            self._project = importlib.import_module(self.module)
        return self._project

    def app(self) -> celery.Celery:
        """The project's Celery app in this process: a producer beside the workers."""
        app: celery.Celery = self.project.app
        return app

    # Processes.

    def worker(
        self,
        *options: str,
        name: str = "worker",
        pool: str = "prefork",
        concurrency: int = 2,
        queues: str | None = None,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Worker:
        """Start a worker; `options` are further arguments of `celery worker`.

        Workers do not look for each other at start (that takes a second); `"--with-mingle"` in
        `options` makes this one do what a worker does by default.
        """
        arguments = [option for option in options if option != "--with-mingle"]
        if len(arguments) == len(options):
            arguments += ["--without-mingle", "--without-gossip"]
        worker = Worker(
            self._unused(name),
            self.module,
            arguments,
            folder=self.folder,
            env={**self.env, **(env or {})},
            pool=pool,
            concurrency=concurrency,
            queues=queues,
        )
        return self._start(worker, wait)

    def beat(
        self,
        *options: str,
        name: str = "beat",
        env: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Beat:
        """Start a beat; `options` are further arguments of `celery beat`."""
        beat = Beat(
            self._unused(name),
            self.module,
            options,
            folder=self.folder,
            env={**self.env, **(env or {})},
        )
        return self._start(beat, wait)

    def process(
        self,
        *arguments: str,
        name: str,
        ready: str | None = None,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> CeleryProcess:
        """Start any other `celery -A module …` that goes on running."""
        process = CeleryProcess(
            self._unused(name),
            self.module,
            arguments,
            folder=self.folder,
            env={**self.env, **(env or {})},
            ready=ready,
        )
        return self._start(process, wait)

    def celery(
        self, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run `celery -A module …` to its end; the exit code is for the test to judge."""
        return subprocess.run(
            celery_command(self.module, *arguments),
            cwd=self.folder,
            env={**inherited_environment(), "PYTHONPATH": str(ROOT), **self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def _unused(self, name: str) -> str:
        taken = {process.name for process in self.processes}
        if name not in taken:
            return name
        return next(f"{name}{n}" for n in range(2, 1000) if f"{name}{n}" not in taken)

    def _start(self, process: Process, wait: bool) -> Process:
        self.processes.append(process)
        return process.start(wait=wait)

    # Faults and observations.

    def proxy(self, url: str) -> FaultProxy:
        """A proxy in front of `url`, such as `bench.store_url` or `bench.broker.url`.

        `bench.worker(env={"CELERY_DURABLE_DATABASE_URL": proxy.url})` then has it in between.
        """
        proxy = FaultProxy(url).start()
        self._proxies.append(proxy)
        return proxy

    def queue_is_empty(self) -> bool:
        """Whether the broker holds no task message, neither in a queue nor unacknowledged."""
        return not any(self.broker.messages())

    def wait_for(self, condition: Callable[[], T], timeout: float = 20, message: str = "") -> T:
        """Poll until `condition()` is true and return its value; a timeout shows all logs."""
        return wait_for(condition, timeout, message, self.processes)

    def report(self) -> str:
        """The state and the end of the log of every process."""
        return "".join(process.report() for process in self.processes)

    def close(self) -> None:
        """Kill the processes, drop what the test had on the servers."""
        for process in reversed(self.processes):
            process.remove()
        for proxy in self._proxies:
            proxy.close()
        for server in (self.broker_server, self.store_server):
            if server is not None and server.running:
                server.thaw()
        if self._project is not None:
            self._forget(self._project)
        self.broker.close()
        if self.store_server is not None and self.store_server.running:
            self.store_server.drop_database(self.store_url.rpartition("/")[2])

    def _forget(self, project: ModuleType) -> None:
        project.app.close()
        sys.modules.pop(self.module, None)
        # Celery would give the tasks of this import to every app that is made later.
        finalizers, current_app = self._celery_before
        _celery_state._on_app_finalizers.intersection_update(finalizers)
        _celery_state._tls.current_app = current_app
