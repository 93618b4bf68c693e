"""One program that a test may start, freeze, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from typing_extensions import Self

from tests.nodes import guard, tree
from tests.nodes.waiting import WaitTimeout, wait_for

_REPORTED_LINES = 60


class ProcessEnded(AssertionError):
    """A process ended before it was ready."""


class LocalProcess:
    """A program with its process tree, run in a folder, with a log file of all that it prints.

    It leads a session of its own, so that no signal meant for the tests reaches it, and dies with
    the tests. `start()` after the end of a process starts the same program again: same folder,
    same ports, same log. Subclasses say what the program is by overriding `command`,
    `environment`, `prepare` and `is_ready`.
    """

    #: What asks this program to stop in good order.
    stop_signal: int = signal.SIGTERM

    def __init__(
        self,
        name: str,
        command: Sequence[str] = (),
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        ready: str | Callable[[], object] | None = None,
    ) -> None:
        """`ready`: a text to be seen in the log, or a condition; without, "it has started"."""
        self.name = name
        self.folder = folder
        self.user = user
        self.log_file = folder / f"{name}.log"
        self._command = list(command)
        self._env = dict(env or {})
        self._ready = ready
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._prepared = False

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else f"exit code {self.exit_code}"
        return f"<{type(self).__name__} {self.name}: {state}>"

    # What the program is.

    def command(self) -> list[str]:
        """Program and arguments."""
        return self._command

    def environment(self) -> dict[str, str]:
        """What is set in the environment besides what is inherited."""
        return self._env

    def prepare(self) -> None:
        """Make what the program needs in its folder; called once, before the first start."""

    def is_ready(self) -> bool:
        """Whether the program that runs now can be used."""
        if self._ready is None:
            return True
        if isinstance(self._ready, str):
            return self._ready in self.logs()
        return bool(self._ready())

    # Its life.

    def start(self, *, wait: bool = True, timeout: float = 60) -> Self:
        """Start the program; with `wait`, come back when it is ready."""
        if self.running:
            raise RuntimeError(f"{self!r} is running already")
        if not self._prepared:
            self.prepare()
            self._prepared = True
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._popen = self._spawn(log)
        guard.watch(self._popen.pid)
        if wait:
            self.wait_until_ready(timeout)
        return self

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(),
            cwd=self.folder,
            env={**inherited_environment(), **self.environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=self.user,
            group=self.user,
            extra_groups=[] if self.user else None,
        )

    def wait_until_ready(self, timeout: float = 60) -> None:
        """Wait until `is_ready()`; a process that ends before that is an error at once."""

        def ready() -> bool:
            # In this order: a program may do its work and end at once.
            ended = not self.running
            if self.is_ready():
                return True
            if ended:
                raise ProcessEnded(f"{self.name} ended before it was ready{self.report()}")
            return False

        wait_for(ready, timeout, f"{self.name} is ready", [self])

    def restart(self, *, wait: bool = True, timeout: float = 60) -> Self:
        """Stop the program in good order if it runs, and start it again."""
        if self.running:
            self.stop()
        return self.start(wait=wait, timeout=timeout)

    def stop(self, timeout: float = 30) -> int:
        """Ask the program to stop, wait until its whole tree is gone, return its exit code."""
        self.signal(self.stop_signal)
        wait_for(lambda: not self.running, timeout, f"{self.name} stops", [self])
        tree.kill(self.pid)
        assert self.exit_code is not None
        return self.exit_code

    def kill(self) -> None:
        """kill -9 the whole tree at one instant, as a power cut would; also what is left of it."""
        tree.kill(self.pid)
        if self._popen is not None:
            self._popen.wait()

    def remove(self) -> None:
        """End it for good; harmless in every state."""
        if self._popen is None:
            return
        if "COVERAGE_PROCESS_CONFIG" in os.environ and self.running:
            # A killed process writes no coverage data.
            self.thaw()
            with suppress(WaitTimeout):
                self.stop(timeout=10)
        self.kill()
        guard.forget(self.pid)

    # While it runs.

    @property
    def pid(self) -> int:
        """The pid of the main process, also when it has ended."""
        if self._popen is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the main process lives."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The main process's exit code, -n after signal n, None while it runs."""
        return None if self._popen is None else self._popen.poll()

    def wait(self, timeout: float = 30) -> int:
        """Wait for the end of the main process, and return its exit code."""
        wait_for(lambda: not self.running, timeout, f"{self.name} ends", [self])
        assert self.exit_code is not None
        return self.exit_code

    def signal(self, number: int, pid: int | None = None) -> None:
        """Send a signal to the main process only, or to one process of the tree."""
        tree.send(self.pid if pid is None else pid, number)

    def freeze(self, pid: int | None = None) -> None:
        """SIGSTOP the whole tree, or one process of it with all below it."""
        tree.freeze(self.pid if pid is None else pid)

    def thaw(self, pid: int | None = None) -> None:
        """SIGCONT the whole tree, or one process of it with all below it."""
        tree.thaw(self.pid if pid is None else pid)

    def tree(self) -> list[int]:
        """The living pids of the tree, the main process first."""
        return tree.members(self.pid)

    def children(self) -> list[int]:
        """The living direct children of the main process."""
        return tree.children(self.pid)

    # What it says.

    def logs(self, *, all_starts: bool = False) -> str:
        """What it has printed since the last start, or since the first."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as log:
            log.seek(0 if all_starts else self._log_start)
            return log.read().decode(errors="replace")

    def report(self) -> str:
        """The state and the end of the log, to be put below an error message."""
        lines = self.logs(all_starts=True).splitlines()
        return "\n".join(["", f"--- {self!r}, end of its log:", *lines[-_REPORTED_LINES:], ""])


def inherited_environment() -> dict[str, str]:
    """The environment of the tests without what would configure Celery or pytest in a child."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CELERY_", "PYTEST_", "TEST_"))
    }


def find_program(name: str, *places: str, package: str) -> str:
    """The path of a program: on the PATH, or in one of `places` (globs; the last match wins).

    Raises `FileNotFoundError` that names the Debian package.
    """
    for place in places:
        found = sorted(Path("/").glob(place.lstrip("/")), key=_version_of)
        if found:
            return str(found[-1])
    on_path = shutil.which(name)
    if on_path is None:
        raise FileNotFoundError(f"{name} is not on this machine: apt-get install -y {package}")
    return on_path


def _version_of(path: Path) -> list[int]:
    return [int(digits) for digits in "".join(c if c.isdigit() else " " for c in str(path)).split()]
