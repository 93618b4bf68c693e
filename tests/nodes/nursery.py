"""A process that has Celery loaded, and forks: a worker from here starts in a tenth of the time.

What it is after the fork is what `python -m celery …` is: a session of its own, its own environment, folder
and log, and the project imported by itself. The tests are not its parents, so they ask here how it ended.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "alembic.command",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.events.state",
    "celery.worker.consumer",
    "celery_durable.beat",
    "celery_durable.extension",
    "celery_durable.worker.request",
    "kombu.transport.redis",
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
)
ROOT = Path(__file__).resolve().parents[2]


class Nursery:
    """One such process, started when first asked for."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen[str] | None = None
        # Tests wait for things in several threads, and one that is interrupted by its time limit leaves an
        # answer behind.
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def spawn(self, arguments: Sequence[str], *, folder: Path, env: Mapping[str, str], log: Path) -> Nursling:
        """Run `celery ARGUMENTS` in a folder, with this environment and no other."""
        pid = self._ask(
            {"arguments": list(arguments), "folder": str(folder), "env": dict(env), "log": str(log)}
        )
        return Nursling(self, pid)

    def exit_code(self, pid: int) -> int | None:
        """How a process from here has ended; None while it runs."""
        code: int | None = self._ask({"pid": pid})
        return code

    def _ask(self, question: Mapping[str, Any]) -> Any:
        with self._lock:
            return self._ask_alone(question)

    def _ask_alone(self, question: Mapping[str, Any]) -> Any:
        if self._popen is None:
            self._popen = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        number = next(self._numbers)
        self._popen.stdin.write(json.dumps({**question, "number": number}) + "\n")
        self._popen.stdin.flush()
        for line in self._popen.stdout:
            answer = json.loads(line)
            if answer["number"] == number:
                return answer["answer"]
        raise RuntimeError("the nursery has ended")

    def close(self) -> None:
        """End the nursery; what was born there lives on."""
        if self._popen is not None:
            self._popen.communicate()
            self._popen = None


class Nursling:
    """What `subprocess.Popen` would be for a process from the nursery."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, -n after signal n; None while it runs."""
        if self._code is None:
            self._code = self._nursery.exit_code(self.pid)
        return self._code

    def wait(self) -> int:
        """Wait for the end of a process that was killed."""
        while (code := self.poll()) is None:
            os.sched_yield()
        return code


# -- in the nursery ------------------------------------------------------------------------------

#: A process can be asked about once; the answer may not have reached who asked.
_exit_codes: dict[int, int] = {}


def _serve() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    _load()
    for line in sys.stdin:
        question = json.loads(line)
        answer = _exit_code(question["pid"]) if "pid" in question else _bear(question)
        sys.stdout.write(json.dumps({"number": question["number"], "answer": answer}) + "\n")
        sys.stdout.flush()


def _load() -> None:
    """Import what every worker and every beat imports."""
    for module in MODULES:
        importlib.import_module(module)


def _exit_code(pid: int) -> int | None:
    if pid not in _exit_codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _exit_codes[pid] = os.waitstatus_to_exitcode(status)
    return _exit_codes[pid]


def _bear(order: dict[str, Any]) -> int:
    pid = os.fork()
    if not pid:
        _live(order)
    _exit_codes.pop(pid, None)
    return pid


def _live(order: dict[str, Any]) -> NoReturn:
    """Become that process."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _redirect(order["log"])
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["env"])
        _run(order["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - this is the end of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)


def _run(arguments: list[str]) -> None:
    from celery.__main__ import main

    from celery_durable import points

    # What it has read from the environment when it was imported.
    points._strikers[:] = [points.striker_for(os.environ)]
    # In the place of this file's folder.
    sys.path[:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = ["celery", *arguments]
    main()


if __name__ == "__main__":
    _serve()
