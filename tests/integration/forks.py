"""Schedulers as forks of the test: they start in no time, and may die at any instruction."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from celery import Celery
from celery.apps.beat import Beat

from tests.nodes.waiting import wait_for

#: Forks that have not been waited for.
_running: set[int] = set()
_INHERITED = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


def fork(body: Callable[[], object], log: Path) -> int:
    """Run `body` in a child process, with its output in `log`. Returns the child's pid."""
    pid = os.fork()
    if pid:
        _running.add(pid)
        return pid
    code = 1
    try:
        for number in _INHERITED:
            signal.signal(number, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 - this is the end of the process
        os.write(2, traceback.format_exc().encode())
    finally:
        # Not an exit of the test process: none of its handlers and finalizers is ours.
        os._exit(code)


def exit_code(pid: int, timeout: float = 20) -> int:
    """Wait for the end of a fork: its exit code, -n after signal n."""
    ended: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(found)

    wait_for(has_ended, timeout, f"fork {pid} ends")
    _running.discard(pid)
    return ended[0]


def end(pid: int) -> None:
    """Kill a fork, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    exit_code(pid)


def end_all() -> None:
    """Kill what is left of all forks: for the end of a test, however it ends."""
    for pid in list(_running):
        end(pid)


def run_beat(app: Celery) -> None:
    """What `celery beat` does, its signal handlers included."""
    Beat(app=app, quiet=True, loglevel="INFO").run()


def die() -> None:
    """As a kill -9 at this very place."""
    os.kill(os.getpid(), signal.SIGKILL)
