"""A helper process that outlives the tests just long enough to clean up after them.

A test run can end without any teardown: a kill -9, a crash, a timeout. The guard holds the
reading end of a pipe that closes when that happens; then it kills every process session that it
was told to watch, and removes every folder.

Why not `PR_SET_PDEATHSIG`: it is sent when the *thread* that started the process ends, it does
not reach grandchildren such as a worker's pool, and it exists on Linux only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path


def watch(session: int) -> None:
    """Have all processes of this session killed when the current process is gone."""
    _tell("watch", str(session))


def forget(session: int) -> None:
    """The session has ended; its number may soon be somebody else's."""
    _tell("forget", str(session))


def watch_folder(folder: Path) -> None:
    """Have this folder removed when the current process is gone."""
    _tell("folder", str(folder))


#: Tests start processes in several threads.
_telling = threading.Lock()


@cache
def _guard() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd="/",
    )


def _tell(verb: str, value: str) -> None:
    with _telling:
        pipe = _guard().stdin
        assert pipe is not None
        pipe.write(f"{verb} {value}\n")
        pipe.flush()


def _serve() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sessions: set[int] = set()
    folders: set[Path] = set()
    for line in sys.stdin:
        verb, value = line.rstrip("\n").split(" ", 1)
        if verb == "watch":
            sessions.add(int(value))
        elif verb == "forget":
            sessions.discard(int(value))
        else:
            folders.add(Path(value))
    _kill(sessions)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _kill(sessions: set[int]) -> None:
    for session in sessions:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
    proc = Path("/proc")
    if not proc.is_dir():
        return
    # Pool processes may be in process groups of their own; they are in the session all the same.
    for pid in (int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) in sessions:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
