"""`celery worker` and `celery beat` as real processes, to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from example_project.demo.scene import Uptime

APP = "example_project"
WORKER = ("worker", "--pool", "prefork", "--concurrency", "2")
BEAT = ("beat",)
KILL_TIMEOUT = 5.0


class CeleryProcess:
    """One `celery` command with all its children, in a process group of its own."""

    def __init__(self, name: str, command: tuple[str, ...], ready_text: str, env: Mapping[str, str]) -> None:
        self.name = name
        self._command = command
        self._ready_text = ready_text
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._lives: list[Uptime] = []
        self._log = Path()

    @property
    def lives(self) -> tuple[Uptime, ...]:
        return tuple(self._lives)

    def start(self) -> None:
        self._log = Path(f"{self.name}-{len(self._lives) + 1}.log").absolute()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", APP, *self._command, "--loglevel", "INFO"],
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._lives.append(Uptime(self.name, time.time()))

    @property
    def boot_seconds(self) -> float:
        """How long its last start took; 0 before it is ready."""
        life = self._lives[-1]
        return 0.0 if life.ready_at is None else life.ready_at - life.started_at

    def is_ready(self) -> bool:
        """Whether this life of the process has said so in its log."""
        life = self._lives[-1]
        if life.ready_at is None and self._ready_text in self._log_text():
            self._lives[-1] = Uptime(life.name, life.started_at, time.time())
        return self._lives[-1].ready_at is not None

    def exit_code(self) -> int | None:
        """None while it runs, and after a kill of ours."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> list[int]:
        """SIGKILL the whole group; returns the ids of the processes that it had."""
        process, self._process = self._process, None
        if process is None:
            return []
        members = group_members(process.pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_TIMEOUT)
        wait_until_gone(process.pid)
        life = self._lives[-1]
        self._lives[-1] = Uptime(life.name, life.started_at, life.ready_at, time.time())
        return members

    def last_log_lines(self, count: int = 15) -> list[str]:
        lines = self._log_text().splitlines()[-count:]
        return lines or [f"(nothing yet, {self._age():.0f} s after its start)"]

    def _age(self) -> float:
        return time.time() - self._lives[-1].started_at if self._lives else 0.0

    def _log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.is_file() else ""


def worker(env: Mapping[str, str], options: tuple[str, ...]) -> CeleryProcess:
    return CeleryProcess("worker", (*WORKER, *options), " ready.", env)


def beat(env: Mapping[str, str]) -> CeleryProcess:
    return CeleryProcess("beat", BEAT, "beat: Starting...", env)


def wait_until_gone(group: int) -> None:
    """Raises TimeoutError where a process of the group outlives its SIGKILL."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while group_members(group):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process group {group} is still there after SIGKILL")
        time.sleep(0.02)


def group_members(group: int) -> list[int]:
    """The living processes of a group. A zombie is dead: only its parent has not looked yet."""
    table = _proc_table() if Path("/proc/self/stat").exists() else _ps_table()
    return [pid for pid, pgid, state in table if pgid == group and not state.startswith("Z")]


def _proc_table() -> Iterator[tuple[int, int, str]]:
    # Small images of Linux have no ps.
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                # "pid (command) state parent group ...", and a command may hold anything.
                state, _, group, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                yield int(folder.name), int(group), state


def _ps_table() -> Iterator[tuple[int, int, str]]:
    command = ["ps", "-A", "-o", "pid=,pgid=,stat="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for pid, group, state in map(str.split, listing.splitlines()):
        yield int(pid), int(group), state
