"""A peer as the benchmark sees it: installed, filled with jobs, worked by two processes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.databases import PostgresDatabase
from benchmarks.marks import STALLED_AFTER, VARIABLE, Mark, Marks
from tests.nodes import LocalProcess, PostgresServer, wait_for
from tests.nodes.folders import new_folder
from tests.nodes.process import inherited_environment
from tests.nodes.workers import ROOT

#: Where the environments of the peers are made; an existing one is used again.
ENVIRONMENTS = Path(__file__).resolve().parents[1] / ".environments"
#: Jobs by which a peer is timed before it has to create many in time.
SAMPLE = 400
WORKERS = 2
#: Processes that create jobs side by side, where there are many of one due time.
FILLERS = 2


@dataclass(frozen=True)
class Kind:
    """A peer: the module that runs it, and what is installed for it."""

    module: str
    packages: tuple[str, ...]
    #: Counts the jobs that have not ended and do not sleep.
    unsettled: str = "SELECT 0"

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.module

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def install(self) -> None:
        """Make the environment. Raises CalledProcessError with pip's last words."""
        done = self.environment / ".installed"
        wanted = "\n".join(self.packages)
        if done.exists() and done.read_text() == wanted:
            return
        shutil.rmtree(self.environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.environment)], check=True)
        pip = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
        ]
        installed = subprocess.run([*pip, *self.packages], capture_output=True, text=True, check=False)
        if installed.returncode:
            raise RuntimeError(f"pip: {installed.stderr.strip().splitlines()[-1]}")
        done.write_text(wanted)

    def versions(self) -> dict[str, str]:
        """What was installed, by name."""
        code = (
            "import sys; from importlib.metadata import version;"
            "print('\\n'.join(version(name) for name in sys.argv[1:]))"
        )
        names = [package.partition("[")[0] for package in self.packages]
        said = subprocess.run(
            [str(self.python), "-c", code, *names], capture_output=True, text=True, check=True
        )
        return dict(zip(names, said.stdout.split(), strict=True))


DBOS = Kind(
    "with_dbos",
    ("dbos", "psycopg[binary]"),
    "SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'",
)
ABSURD = Kind(
    "with_absurd",
    ("absurd-sdk", "absurdctl", "psycopg[binary]"),
    "SELECT count(*) FROM absurd.t_bench WHERE state IN ('pending', 'running')",
)
PROCRASTINATE = Kind(
    "with_procrastinate",
    ("procrastinate", "psycopg[binary]"),
    "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
)
PGQUEUER = Kind("with_pgqueuer", ("pgqueuer", "asyncpg"), "SELECT count(*) FROM pgqueuer")
DJANGO_BEAT = Kind(
    "with_django_beat",
    # kombu's Redis transport needs `packaging` and does not say so.
    ("django-celery-beat", "django", "celery", "redis", "packaging", "sqlalchemy", "psycopg[binary]"),
)


class Peer:
    """A peer with a database of its own."""

    def __init__(self, kind: Kind, server: PostgresServer) -> None:
        kind.install()
        self.kind = kind
        self.folder = new_folder(kind.module)
        self.marks = Marks(self.folder / "marks")
        self.database = PostgresDatabase(server)
        self.url = server.url(self.database.name, "postgresql")
        self._numbers = itertools.count(1)
        self._pace: tuple[float, float] | None = None
        self.run("prepare")

    def close(self) -> None:
        self.database.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, action: str, **arguments: Any) -> float:
        """Have something done to its end. Returns the seconds that it took once all was imported."""
        done = subprocess.run(
            self._command(action, arguments),
            cwd=self.folder,
            env={**inherited_environment(), **self._environment()},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
            raise RuntimeError(f"{self.kind.module} {action}: {said[-1]}")
        return float(done.stdout.splitlines()[-1])

    @contextmanager
    def working(self, *, tuned: bool) -> Iterator[None]:
        """Two worker processes; tuned: with the settings that are best for it."""
        processes = [
            LocalProcess(
                f"worker{next(self._numbers)}",
                self._command("work", {"tuned": tuned}),
                folder=self.folder,
                env=self._environment(),
            )
            for _ in range(WORKERS)
        ]
        try:
            for process in processes:
                process.start()
            yield
        finally:
            for process in processes:
                process.remove()

    def new_label(self, what: str) -> str:
        return f"{what}-{next(self._numbers)}"

    def throughput(self, what: str, count: int, *, tuned: bool = False) -> float:
        """Jobs per second, all created before the workers start; from the first body to the last end."""
        label = self.new_label(what)
        self.fill(what, label, count)
        with self.working(tuned=tuned):
            return self._rate_of(label, count)[0]

    def burst(self, count: int, *, tuned: bool = False, parks: float = 0.0) -> float:
        """Jobs that are all due at one instant: finished per second, from the first body to the last end.

        ``parks``: how many of them can go to sleep per second, where they have to run for that.
        """
        label = self.new_label("burst")
        start, per_job = self._measure_fill()
        with self.working(tuned=tuned):
            asleep = count / parks if parks else 2.0
            # Twice as long as it took with no worker beside it.
            due = time.time() + 2 * (start + count * per_job) + asleep + 2
            self.fill("sleep", label, count, first=due)
            if time.time() > due - asleep:
                raise TimeoutError("the jobs were not made before they were due")
            per_second, first = self._rate_of(label, count)
        if first < due:
            raise AssertionError("a job has run before it was due")
        return per_second

    def _rate_of(self, label: str, count: int) -> tuple[float, float]:
        """Per second, from the first mark to the end of the last job; and when the first mark was made."""
        marks = self.marks.wait(label, count)
        ended = marks[-1].time
        if self.database.ask(self.kind.unsettled):
            wait_for(lambda: not self.database.ask(self.kind.unsettled), STALLED_AFTER, "every job has ended")
            ended = time.time()
        return count / (ended - marks[0].time), marks[0].time

    def _measure_fill(self) -> tuple[float, float]:
        """Seconds to start, and to create one job."""
        if self._pace is None:
            began = time.monotonic()
            label = self.new_label("sample")
            filling = self.fill("noop", label, SAMPLE)
            self._pace = time.monotonic() - began - filling, filling / SAMPLE
            with self.working(tuned=True):
                # To their ends: what a worker leaves behind when it is killed would never be settled.
                self._rate_of(label, SAMPLE)
        return self._pace

    def lateness(self, count: int, seconds: float, *, tuned: bool = False) -> list[float]:
        """Milliseconds from the due times to the bodies."""
        label = self.new_label("late")
        with self.working(tuned=tuned):
            self.fill("sleep", label, count, first=time.time() + 5, gap=seconds / count)
            marks = self.marks.wait(label, count)
        return [_late(mark) for mark in marks]

    def fill(self, what: str, label: str, count: int, *, first: float = 0.0, gap: float = 0.0) -> float:
        """Create jobs. Returns the seconds that this took, without the start."""
        jobs = {"what": what, "label": label, "first": first, "gap": gap}
        parts = 1 if gap else FILLERS
        counts = [(count + part) // parts for part in range(parts)]
        with ThreadPoolExecutor(parts) as pool:
            return max(pool.map(lambda part: self.run("fill", jobs={**jobs, "count": part}), counts))

    def _command(self, action: str, arguments: dict[str, Any]) -> list[str]:
        text = json.dumps({"url": self.url, **arguments})
        return [str(self.kind.python), "-m", "benchmarks.peers.run", self.kind.module, action, text]

    def _environment(self) -> dict[str, str]:
        # Tools that it calls, such as psql, are on the path.
        return {"PYTHONPATH": str(ROOT), VARIABLE: str(self.marks.folder), "PATH": os.environ.get("PATH", "")}


def _late(mark: Mark) -> float:
    return (mark.time - mark.value) * 1000
