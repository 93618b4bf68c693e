"""A site: one deployment of the measured application, with its processes."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks import project
from benchmarks.databases import Database, PostgresDatabase, SqliteDatabase
from benchmarks.marks import STALLED_AFTER, VARIABLE, Marks
from tests.nodes import Beat, Servers, Worker, guard, wait_for
from tests.nodes.folders import new_folder
from tests.nodes.process import inherited_environment
from tests.nodes.workers import ROOT

#: Celery's own, the one that a worker takes from.
DEFAULT_QUEUE = "celery"
PROJECT = "benchmarks.project"
BrokerName = Literal["redis", "rabbitmq", "embedded"]

#: PostgreSQL and Redis as they come, where the tests' servers differ from that.
DEFAULTS: dict[str, Mapping[str, object]] = {
    "postgres": {
        "fsync": "on",
        "full_page_writes": "on",
        "shared_buffers": "128MB",
        "max_connections": 100,
    },
    "redis": {"appendonly": "no"},
}


class DriverFailed(RuntimeError):
    """The producer could not do what it was told."""


class Driver:
    """The producer process of a site (`benchmarks.driver`)."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        with (folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.driver"],
                cwd=folder,
                env={**inherited_environment(), "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        guard.watch(self._process.pid)

    def ask(self, action: str, **arguments: Any) -> Any:
        """Have something done. Raises `DriverFailed`."""
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        pipe.write(json.dumps({"action": action, "arguments": arguments}) + "\n")
        pipe.flush()
        line = answers.readline()
        answer = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise DriverFailed(f"{action}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        guard.forget(self._process.pid)


class BenchWorker(Worker):
    """A worker with Celery's own log level, ready when it says so in a file."""

    def is_ready(self) -> bool:
        return Path(self.environment()[project.READY_VARIABLE]).exists()


class Site:
    """Broker, database, producer, and whatever processes are started."""

    def __init__(
        self,
        servers: Servers,
        broker: BrokerName,
        *,
        log_statements: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.broker: BrokerName = broker
        self.folder = new_folder("bench")
        self.marks = Marks(self.folder / "marks")
        self.database: Database
        if broker == "embedded":
            self.database = SqliteDatabase(self.folder)
        else:
            self.database = PostgresDatabase(servers.postgres, log_statements=log_statements)
        self.env = self._environment(servers, settings or {})
        self.driver = Driver(self.folder, self.env)
        self.driver.ask("prepare")
        self.worker: BenchWorker | None = None
        self.beat: Beat | None = None
        #: How many sleepers a measurement has left in the table for the next one.
        self.sleepers = 0
        self._numbers = itertools.count(1)

    def _environment(self, servers: Servers, settings: Mapping[str, Any]) -> dict[str, str]:
        env = {
            VARIABLE: str(self.marks.folder),
            project.CONF_VARIABLE: json.dumps(settings),
            "CELERY_DURABLE_DATABASE_URL": self.database.url,
        }
        if self.broker == "redis":
            env["CELERY_BROKER_URL"] = servers.redis.url(servers.redis.new_database())
        elif self.broker == "rabbitmq":
            env["CELERY_BROKER_URL"] = servers.rabbit.url(servers.rabbit.new_vhost())
        return env

    @property
    def postgres(self) -> PostgresDatabase:
        assert isinstance(self.database, PostgresDatabase)
        return self.database

    # -- processes -------------------------------------------------------------------------------

    def start_worker(self, *, pool: str = "prefork", concurrency: int = 2) -> BenchWorker:
        """Start the worker."""
        number = next(self._numbers)
        ready = self.folder / f"ready{number}"
        self.worker = BenchWorker(
            f"worker{number}",
            PROJECT,
            ["--without-mingle", "--without-gossip", "-l", "WARNING"],
            folder=self.folder,
            env={**self.env, project.READY_VARIABLE: str(ready)},
            pool=pool,
            concurrency=concurrency,
        ).start()
        return self.worker

    def start_beat(self) -> Beat:
        """Start the scheduler."""
        number = next(self._numbers)
        self.beat = Beat(f"beat{number}", PROJECT, folder=self.folder, env=self.env).start()
        return self.beat

    def stop_worker(self) -> None:
        if self.worker is not None:
            self.worker.remove()
        self.worker = None

    def stop_beat(self) -> None:
        if self.beat is not None:
            self.beat.remove()
        self.beat = None

    def running(self) -> Site:
        """The site with a worker of two processes and a scheduler."""
        if self.worker is None:
            self.start_worker()
        if self.beat is None:
            self.start_beat()
        return self

    def close(self) -> None:
        """End all of it."""
        self.stop_worker()
        self.stop_beat()
        self.driver.close()
        self.database.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what measurements have in common ----------------------------------------------------------

    def new_label(self, what: str) -> str:
        return f"{what}-{next(self._numbers)}"

    def throughput(self, task: str, count: int, *args: Any) -> float:
        """Tasks per second of the running worker, from its first body to the last end.

        All messages lie in a queue before the worker may take from it. The last end is that of the last
        body, or of the last row: a durable task is done when its row says so.
        """
        assert self.worker is not None
        label = self.new_label(task)
        self.driver.ask("send", task=task, args=[label, *args], count=count, queue=label)
        self.driver.ask("consume", queue=label, worker=self.worker.hostname)
        rate = self.rate_of(label, count)
        self.driver.ask("leave", queue=label, worker=self.worker.hostname)
        return rate

    def rate_of(self, label: str, count: int) -> float:
        """Wait for so many marks, and for the end of every row: per second, from the first mark."""
        marks = self.marks.wait(label, count)
        ended = marks[-1].time
        if self.settle():
            ended = time.time()
        return count / (ended - marks[0].time)

    def settle(self) -> bool:
        """Wait until no row is being worked on. Whether there was one."""
        if not self.database.unsettled():
            return False
        wait_for(lambda: not self.database.unsettled(), STALLED_AFTER, "every row has ended")
        return True

    def parked(self, task: str, *args: Any, queue: str = DEFAULT_QUEUE) -> str:
        """Have the worker park one task; return its id.

        Its wake will go to ``queue``; the worker only takes from the default one.
        """
        assert self.worker is not None
        postgres, worker = self.postgres, self.worker
        task_id = str(self.driver.ask("send_one", task=task, args=list(args), queue=queue))
        if queue != DEFAULT_QUEUE:
            self.driver.ask("consume", queue=queue, worker=worker.hostname)
        asleep = (
            f"SELECT count(*) FROM durable_executions WHERE task_id = '{task_id}' AND status = 'sleeping'"
        )
        wait_for(lambda: postgres.ask(asleep), message=f"{task_id} sleeps", processes=[worker])
        if queue != DEFAULT_QUEUE:
            self.driver.ask("leave", queue=queue, worker=worker.hostname)
        return task_id
