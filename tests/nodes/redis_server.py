"""A private Redis server."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.nodes.folders import new_folder
from tests.nodes.ports import free_port
from tests.nodes.process import LocalProcess, find_program

_DATABASES = 4096


class RedisServer(LocalProcess):
    """Redis on a free port of 127.0.0.1; what it has confirmed survives `kill()`."""

    def __init__(self, *, options: Mapping[str, object] | None = None) -> None:
        """`options`: server settings, such as `{"maxmemory": "10mb"}`."""
        super().__init__("redis", folder=new_folder("redis"))
        self.port = free_port()
        self._options = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self.folder,
            "databases": _DATABASES,
            "save": "",
            # Written before the answer is sent; only the sync to the disk comes later.
            "appendonly": "yes",
            "appendfsync": "everysec",
            **(options or {}),
        }
        self._numbers = itertools.cycle(range(1, _DATABASES))

    def command(self) -> list[str]:
        server = find_program("redis-server", package="redis-server")
        return [server, *(part for k, v in self._options.items() for part in (f"--{k}", str(v)))]

    def is_ready(self) -> bool:
        with suppress(redis.ConnectionError, redis.TimeoutError), self.client() as client:
            return bool(client.ping())
        return False

    def remove(self) -> None:
        super().remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: int = 0) -> str:
        """The URL of a database, for Celery as a broker or as a result store."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def client(self, database: int = 0) -> Any:
        """A client with text answers; a context manager."""
        return redis.Redis(
            port=self.port,
            db=database,
            decode_responses=True,
            socket_timeout=5,
            # A server that is down is to be seen as down at once.
            retry=Retry(NoBackoff(), 0),
        )

    def new_database(self) -> int:
        """The number of an empty database."""
        number = next(self._numbers)
        with self.client(number) as client:
            client.flushdb()
        return number
