"""What pytest-celery expects of a container, done with a local process.

`on_process()` derives from any of pytest-celery's container classes (or a project's own subclass)
a class in which everything that would ask Docker is answered by a process instead. Nodes,
clusters, `CeleryTestSetup` and the fixtures above them stay pytest-celery's own.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
from typing import Any
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
import psycopg
from pytest_celery import (  # type: ignore[import-untyped]
    CeleryTestBackend,
    CeleryTestContainer,
    CeleryTestWorker,
)

from tests.nodes.process import LocalProcess, inherited_environment


class ProcessContainer(CeleryTestContainer):  # type: ignore[misc]
    """A container that is a process tree on this machine, sharing its network and its files."""

    def __init__(self, process: LocalProcess, identity: str) -> None:
        """`identity`: 12 characters that play the container's id and host name."""
        # Nothing is initialised above: all that would be is the reference to a Docker object.
        self.process = process
        self._identity = identity

    @property
    def id(self) -> str:
        return self._identity

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def status(self) -> str:
        """A word of Docker's."""
        if self.process.running:
            return "running"
        return "created" if self.process.exit_code is None else "exited"

    @property
    def env(self) -> dict[str, str]:
        return self.process.environment()

    @property
    def attrs(self) -> dict[str, Any]:
        """Of what `docker inspect` would say, what has a meaning for a process."""
        return {"Config": {"Hostname": self.id, "Env": [f"{k}={v}" for k, v in self.env.items()]}}

    def reload(self) -> None:
        """Nothing to do: a process has no copy of its state that could be old."""

    def ready(self) -> bool:
        """Wait until it is ready, counting only what it has said since it was last started."""
        self.process.wait_until_ready()
        return True

    def logs(self) -> str:
        """Everything since the first start, as Docker has it."""
        return self.process.logs(all_starts=True)

    def kill(self, signal: str | int | None = None) -> None:
        """SIGKILL takes the whole tree at once, as a container's end does; any other signal goes
        to the main process."""
        number = _number(signal or "SIGKILL")
        if number == _number("SIGKILL"):
            self.process.kill()
        else:
            self.process.signal(number)

    def restart(self, timeout: float = 60) -> None:
        self.process.restart(timeout=timeout)

    def exec_run(self, command: str | list[str], **_: Any) -> tuple[int, bytes]:
        """Run a command in the folder and the environment of the process."""
        done = subprocess.run(
            shlex.split(command) if isinstance(command, str) else command,
            cwd=self.process.folder,
            env={**inherited_environment(), **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout


class ServerContainer(ProcessContainer):
    """A server; the address is the same for the tests and for the workers."""

    def __init__(self, process: LocalProcess, identity: str, url: str) -> None:
        """`url`: of the database or vhost that belongs to the test."""
        super().__init__(process, identity)
        self._url = url

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "host_url": self.host_url,
            "hostname": self.hostname,
            "port": self.port,
            "vhost": self.vhost,
        }

    @property
    def url(self) -> str:
        return self._url

    @property
    def host_url(self) -> str:
        return self._url

    @property
    def hostname(self) -> str:
        return str(urlsplit(self._url).hostname)

    @property
    def port(self) -> int:
        return int(urlsplit(self._url).port or 0)

    @property
    def vhost(self) -> str:
        return urlsplit(self._url).path.removeprefix("/")


class PostgresContainer(CeleryTestContainer):  # type: ignore[misc]
    """PostgreSQL as a result store: a vendor that pytest-celery does not have."""

    @property
    def client(self) -> Any:
        """A connection to the test's database."""
        url: str = self.celeryconfig["host_url"]
        return psycopg.connect("postgresql" + url[url.index("://") :], autocommit=True)

    @property
    def ready_prompt(self) -> str:
        return "database system is ready to accept connections"


class PostgresTestBackend(CeleryTestBackend):  # type: ignore[misc]
    """The node of a PostgreSQL result store."""


class ProcessTestWorker(CeleryTestWorker):  # type: ignore[misc]
    """A worker node whose process list is that of its own tree, not of the whole machine."""

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        default = ["pid", "name", "username", "cmdline", "create_time"]
        found = [psutil.Process(pid).as_dict(columns or default) for pid in self._pids()]
        wanted = (filters or {}).items()
        return [info for info in found if all(info.get(key) == value for key, value in wanted)]

    def _pids(self) -> list[int]:
        process: LocalProcess = self.container.process
        return process.tree()


def on_process(container: type[CeleryTestContainer], process_container: type[ProcessContainer]) -> type[Any]:
    """The class `container` on a process: its configuration, the other's life cycle."""
    return type(f"Process{container.__name__}", (process_container, container), {})


def _number(name: str | int) -> int:
    return signal.Signals[name] if isinstance(name, str) else name
