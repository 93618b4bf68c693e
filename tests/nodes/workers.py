"""Celery's own programs as processes: a worker, a beat, any other subcommand."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from tests.nodes.nursery import Nursery
from tests.nodes.process import LocalProcess, inherited_environment

ROOT = Path(__file__).resolve().parents[2]
#: Pools that patch the standard library, which has to come before everything else.
_PATCHING = {"gevent", "eventlet"}


def celery_command(module: str, *arguments: str) -> list[str]:
    """The command line of `celery -A module …` with the Python that runs the tests."""
    return [sys.executable, "-m", "celery", "-A", module, *arguments]


class CeleryProcess(LocalProcess):
    """`celery -A module …`, ready when `ready` is in its log."""

    #: Where these processes come from. None: each is an interpreter of its own.
    nursery: ClassVar[Nursery | None] = None

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str],
        ready: str | None = None,
    ) -> None:
        # The project's own folder first: the process runs in a temporary one.
        environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **env}
        command = celery_command(module, *arguments)
        super().__init__(name, command, folder=folder, env=environment, ready=ready)

    def _spawn(self, log: IO[bytes]) -> Any:
        _, _, _, *arguments = self.command()
        if self.nursery is None or _PATCHING.intersection(arguments):
            return super()._spawn(log)
        env = {**inherited_environment(), **self.environment()}
        return self.nursery.spawn(arguments, folder=self.folder, env=env, log=self.log_file)


class Worker(CeleryProcess):
    """`celery worker`, ready when it says so: it is connected and consumes."""

    def __init__(
        self,
        name: str,
        module: str,
        options: Sequence[str] = (),
        *,
        folder: Path,
        env: Mapping[str, str],
        pool: str = "prefork",
        concurrency: int = 2,
        queues: str | None = None,
    ) -> None:
        #: The node name, as `app.control` and `inspect` know it.
        self.hostname = f"{name}@{folder.name}"
        arguments = ["worker", "-n", self.hostname, "-P", pool, "-c", str(concurrency)]
        arguments += ["-l", "INFO", *(["-Q", queues] if queues else []), *options]
        super().__init__(name, module, arguments, folder=folder, env=env, ready=" ready.")

    def pool_pids(self) -> list[int]:
        """The living pool processes of a prefork worker."""
        return self.children()


class Beat(CeleryProcess):
    """`celery beat`, ready when it has made its first round: it has looked for what is due.

    A durable scheduler says so in its health file. Celery's own is ready when it starts.
    """

    def __init__(
        self,
        name: str,
        module: str,
        options: Sequence[str] = (),
        *,
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        #: It holds the pid of who wrote it: that of an earlier start says nothing.
        self.health_file = folder / f"{name}.health"
        # No pid file: after a kill -9 it would be a stale one.
        files = ["--pidfile=", "-s", str(folder / f"{name}-schedule")]
        arguments = ["beat", "-l", "INFO", *files, *options]
        env = {"CELERY_DURABLE_HEALTH_FILE": str(self.health_file), **env}
        super().__init__(name, module, arguments, folder=folder, env=env, ready="beat: Starting")

    def is_ready(self) -> bool:
        if not super().is_ready():
            return False
        if "celery.beat.PersistentScheduler" in self.logs():
            return True
        # It is gone when the beat has ended, which may be at any moment.
        with suppress(FileNotFoundError):
            return bool(json.loads(self.health_file.read_text())["pid"] == self.pid)
        return False
