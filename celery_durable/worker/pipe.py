"""The claims pipe: how a pool child tells the worker's main process what became of a delivery.

It is made before the pool forks and inherited by every child. A record has a fixed size below PIPE_BUF,
so that the records of many children never mix.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_durable.records import LeaseKey
from celery_durable.runtime import owner_name

if TYPE_CHECKING:
    from celery_durable.worker.book import Book

# delivery number, verdict, token, process id, process instance
_RECORD = struct.Struct(">QBQI16s")
_NO_LEASE = (0, 0, bytes(16))


class ClaimsPipe:
    """Both ends of the pipe, and one shared byte that says whether the worker is stopping."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._stopping = mmap.mmap(-1, 1)
        self._rest = b""
        # A reading thread and the handler of a dead child may both come to drain.
        self._lock = threading.RLock()

    # -- the child's side ------------------------------------------------------------------------

    def reporter(self, identity: Callable[[], tuple[int, uuid.UUID]]) -> PipeReporter:
        """The writing end for a child; ``identity`` gives its process id and instance."""
        return PipeReporter(self, identity)

    @property
    def is_stopping(self) -> bool:
        return self._stopping[0] == 1

    def announce_stop(self) -> None:
        """Let every child know that the worker is stopping."""
        self._stopping[0] = 1

    # -- the main process's side -----------------------------------------------------------------

    def drain(self, book: Book) -> None:
        """Hand all records that are there to the book. Never blocks."""
        with self._lock:
            while True:
                try:
                    data = os.read(self.reader, _RECORD.size * 256)
                except (BlockingIOError, OSError):
                    return
                if not data:
                    return
                self._rest = self._hand_over(self._rest + data, book)

    def _hand_over(self, data: bytes, book: Book) -> bytes:
        whole = len(data) - len(data) % _RECORD.size
        for number, verdict, token, pid, instance in _RECORD.iter_unpack(data[:whole]):
            owner = owner_name(self.node, pid, uuid.UUID(bytes=instance))
            book.report(number, verdict, owner, token)
        return data[whole:]

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class PipeReporter:
    """What a child reports through."""

    def __init__(self, pipe: ClaimsPipe, identity: Callable[[], tuple[int, uuid.UUID]]) -> None:
        self._pipe = pipe
        self._identity = identity

    def report(self, number: int, verdict: int, key: LeaseKey | None) -> None:
        token, pid, instance = _NO_LEASE
        if key is not None:
            process, own = self._identity()
            token, pid, instance = key.token, process, own.bytes
        os.write(self._pipe.writer, _RECORD.pack(number, verdict, token, pid, instance))

    @property
    def is_stopping(self) -> bool:
        return self._pipe.is_stopping
