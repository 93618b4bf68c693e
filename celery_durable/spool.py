"""Queues of messages as files, shared by the processes of one machine.

A message moves only by a rename within one folder, so it is always whole, and always in one
place. What a killed process had taken is given back by the next process that looks.

    queues/<queue>/          messages, the oldest name first
    taken/<owner>/           what one process has taken, and a mark for each queue tied to it
    taken/<owner>/lock       locked for as long as that process lives
    exchanges/<name>.json    bindings
    new/, unreadable/        messages being written; messages that were broken
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote, unquote

from celery_durable.errors import ConfigurationError

try:
    import fcntl
except ImportError as error:  # Windows
    raise ConfigurationError(
        "the embedded broker needs a POSIX system, for its locks: configure broker_url"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SWEEP_INTERVAL = 1.0  # seconds between two looks for dead processes

Rows = list[list[str]]
_sequence = itertools.count()


class Spool:
    """One process's hold on the folder. A *tag* names a message that this process has taken."""

    _opened: ClassVar[dict[tuple[int, str], Spool]] = {}

    def __init__(self, root: Path) -> None:
        self._root = root
        self._taken = root / "taken"
        self._own = self._taken / f"{os.getpid()}-{os.urandom(8).hex()}"
        self._lock: int | None = None
        self._listed: dict[str, Iterator[str]] = {}
        self._next_sweep = 0.0

    @classmethod
    def of_this_process(cls, folder: str) -> Spool:
        """The one spool of a folder in this process.

        A forked child gets one of its own: what its parent has taken stays the parent's.
        """
        key = os.getpid(), folder
        if key not in cls._opened:
            # One for all spellings of a path: two would not see each other's lock.
            real = os.path.realpath(folder)
            spool = cls._opened.setdefault((os.getpid(), real), cls(Path(real)))
            cls._opened[key] = spool
        return cls._opened[key]

    def put(self, queue: str, data: bytes, *, durable: bool) -> None:
        """Append a message. ``durable``: it is on the disk when this returns."""
        # The wall clock orders the messages of several processes; nothing is decided by it.
        name = f"{time.time_ns():020d}-{next(_sequence):08d}-{os.urandom(4).hex()}.msg"
        self._write(self._queue(queue) / name, data, durable=durable)

    def take(self, queue: str) -> tuple[str, bytes] | None:
        """Take the oldest message: its tag and its data; None when there is none."""
        # A listing serves until it is used up: one for each message would be quadratic.
        taken = self._take_from(queue, self._listed.get(queue, iter(())))
        if taken is None:
            self._listed[queue] = iter(self._waiting(queue))
            taken = self._take_from(queue, self._listed[queue])
        return taken

    def settle(self, tag: str) -> None:
        """Remove a taken message, acknowledged or refused."""
        (self._own / tag).unlink(missing_ok=True)

    def give_back(self, tag: str) -> None:
        """Return a taken message to its old place in its queue."""
        with suppress(FileNotFoundError):  # settled, or taken by the parent of this process
            self._return(self._own / tag)

    def set_aside(self, tag: str) -> Path:
        """Keep a taken message that cannot be read, out of everybody's way: where."""
        return _move(self._own / tag, self._root / "unreadable" / tag)

    def size(self, queue: str) -> int:
        """How many messages wait."""
        return len(self._waiting(queue))

    def purge(self, queue: str) -> int:
        """Remove the messages that nobody has taken: how many."""
        purged = 0
        for name in self._waiting(queue):
            with suppress(FileNotFoundError):
                (self._queue(queue) / name).unlink()
                purged += 1
        return purged

    def delete(self, queue: str) -> None:
        """Remove a queue with its messages and bindings."""
        with self._exclusive():
            self._delete(queue)
        (self._own / _mark(queue)).unlink(missing_ok=True)

    def tie(self, queue: str) -> None:
        """Let the queue be deleted after the last process that has tied it is dead."""
        self._claim()
        (self._own / _mark(queue)).touch()

    def bindings(self, exchange: str) -> Rows:
        """The rows [routing key, pattern, queue] of an exchange."""
        try:
            rows: Rows = json.loads(self._table(exchange).read_bytes())
        except FileNotFoundError:
            return []
        return rows

    def bind(self, exchange: str, row: list[str]) -> None:
        """Add a row, unless it is there."""
        with self._exclusive():
            self._edit(exchange, lambda rows: rows if row in rows else [*rows, row])

    def sweep(self) -> None:
        """Give back what dead processes had taken; within SWEEP_INTERVAL of the last: nothing."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_INTERVAL
        if self._lock is not None and not self._own.exists():
            self._lock = None  # somebody removed the folder under us
        if self._dead_owners():
            with self._exclusive():  # one sweeps at a time; who was just being born has its lock
                for owner in self._dead_owners():
                    self._bury(owner)

    def _take_from(self, queue: str, names: Iterator[str]) -> tuple[str, bytes] | None:
        source = self._queue(queue)
        for name in names:
            self._claim()
            target = self._own / f"{source.name}@{name}"
            with suppress(FileNotFoundError):  # another process was faster
                (source / name).rename(target)
                return target.name, target.read_bytes()
        return None

    def _claim(self) -> None:
        """Hold the own folder, so that no sweep takes it for a dead one."""
        if self._lock is None:
            with self._exclusive():
                self._own.mkdir(parents=True, exist_ok=True)
                lock = os.open(self._own / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                # A POSIX lock, for flock() would live on in forked children. It is lost as soon
                # as *any* descriptor of the file is closed here: nobody else opens our own.
                fcntl.lockf(lock, fcntl.LOCK_EX)
                self._lock = lock

    def _dead_owners(self) -> list[Path]:
        owners = [self._taken / name for name in _names(self._taken)]
        return [owner for owner in owners if owner != self._own and _is_unlocked(owner / "lock")]

    def _bury(self, owner: Path) -> None:
        for tag in _names(owner, ".msg"):
            self._return(owner / tag)
        for mark in _names(owner, ".queue"):
            if all(tied.parent == owner for tied in self._taken.glob(f"*/{mark}")):
                self._delete(unquote(mark.removesuffix(".queue")))
        shutil.rmtree(owner)

    def _return(self, taken: Path) -> None:
        queue, _, name = taken.name.partition("@")
        _move(taken, self._root / "queues" / queue / name)

    def _delete(self, queue: str) -> None:
        for table in _names(self._root / "exchanges"):
            exchange = unquote(table.removesuffix(".json"))
            self._edit(exchange, lambda rows: [row for row in rows if row[2] != queue])
        self.purge(queue)
        with suppress(OSError):  # never made, or a message arrives at this moment
            self._queue(queue).rmdir()

    def _edit(self, exchange: str, change: Callable[[Rows], Rows]) -> None:
        rows = self.bindings(exchange)
        changed = change(rows)
        if changed != rows:
            self._write(self._table(exchange), json.dumps(changed).encode(), durable=True)

    def _write(self, target: Path, data: bytes, *, durable: bool) -> None:
        part = self._root / "new" / os.urandom(16).hex()
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            _move(part, target)
        finally:
            part.unlink(missing_ok=True)
        if durable:
            _sync(target.parent)

    def _waiting(self, queue: str) -> list[str]:
        return sorted(_names(self._queue(queue), ".msg"))

    def _queue(self, queue: str) -> Path:
        return self._root / "queues" / quote(queue, safe="")

    def _table(self, exchange: str) -> Path:
        return self._root / "exchanges" / f"{quote(exchange, safe='')}.json"

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # unlike a POSIX lock it keeps threads apart, too
            try:
                yield
            finally:
                # Closing alone would leave it to a child that was forked meanwhile.
                fcntl.flock(file, fcntl.LOCK_UN)


def _mark(queue: str) -> str:
    return f"{quote(queue, safe='')}.queue"


def _is_unlocked(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _move(source: Path, target: Path) -> Path:
    """Rename into a folder that may be new, or just removed by another process."""
    try:
        return source.replace(target)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        return source.replace(target)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path, suffix: str = "") -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.name.endswith(suffix)]
    except FileNotFoundError:
        return []
