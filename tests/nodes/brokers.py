"""One test's own place at a broker: its URL, what it holds, and how to lose all of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.nodes.rabbit import RabbitServer
from tests.nodes.redis_server import RedisServer

_EMBEDDED_FOLDER = "celery-durable-broker"


class Messages(NamedTuple):
    """How many task messages a broker holds, remote control and events left out."""

    #: Waiting in queues.
    ready: int
    #: Delivered to a worker and not acknowledged.
    unacknowledged: int


class BrokerPlace(Protocol):
    """What a test may ask of its broker, whichever it is."""

    #: None where no URL is configured.
    url: str | None

    def messages(self) -> Messages:
        """What it holds now."""

    def lose_everything(self) -> None:
        """Drop all messages, those that workers hold too."""

    def close(self) -> None:
        """Give the place back at the end of the test."""


class RedisPlace:
    """A database of a Redis server."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._database = server.new_database()
        self.url: str | None = server.url(self._database)

    def messages(self) -> Messages:
        with self._server.client(self._database) as client:
            queues = [key for key in client.scan_iter(_type="list") if _carries_tasks(key)]
            ready = sum(client.llen(queue) for queue in queues)
            return Messages(ready, client.hlen("unacked"))

    def lose_everything(self) -> None:
        with self._server.client(self._database) as client:
            client.flushdb()

    def close(self) -> None:
        if self._server.running:
            self.lose_everything()


class RabbitPlace:
    """A vhost of a RabbitMQ server."""

    def __init__(self, server: RabbitServer) -> None:
        self._server = server
        self._vhost = server.new_vhost()
        self.url: str | None = server.url(self._vhost)

    def messages(self) -> Messages:
        queues = [queue for queue in self._server.queues(self._vhost) if _carries_tasks(queue.name)]
        ready = sum(queue.ready for queue in queues)
        return Messages(ready, sum(queue.unacknowledged for queue in queues))

    def lose_everything(self) -> None:
        self._server.purge_vhost(self._vhost)

    def close(self) -> None:
        if self._server.running:
            self._server.delete_vhost(self._vhost)


class EmbeddedPlace:
    """The broker folder that the processes of an embedded application share."""

    url: str | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _EMBEDDED_FOLDER

    def messages(self) -> Messages:
        queues = self._folder.glob("queues/*")
        ready = sum(_count(queue) for queue in queues if _carries_tasks(queue.name))
        return Messages(ready, sum(_count(owner) for owner in self._folder.glob("taken/*/")))

    def lose_everything(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing: the folder goes with the test's own."""


def _carries_tasks(queue: str) -> bool:
    return not queue.endswith(".celery.pidbox") and not queue.startswith("celeryev")


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.msg*"))
