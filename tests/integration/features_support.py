"""What the tests of Celery's features ask of a bench."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kombu.utils.json import loads
from sqlalchemy import select

from tests.integration.support import row
from tests.nodes import DEPLOYMENTS, Bench, Servers

PROJECT = "tests.integration.features_proj"

#: One deployment with results in Redis, one with results in the database.
BOTH = ("redis-postgres", "rabbitmq-postgres")


@contextmanager
def features_bench(
    deployment: str,
    servers: Servers,
    folder: Path,
    *options: str,
    queues: str | None = None,
    env: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[Bench]:
    """A bench with a worker of 2 and a beat, for many tests that leave both as they were.

    ``env``: for its processes and this one.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = Bench(DEPLOYMENTS[deployment], servers, folder, PROJECT, monkeypatch)
        try:
            bench.configure(**settings)
            bench.env |= env or {}
            for name, value in (env or {}).items():
                monkeypatch.setenv(name, value)
            worker = bench.worker(*options, queues=queues, wait=False)
            beat = bench.beat(wait=False)
            worker.wait_until_ready()
            beat.wait_until_ready()
            yield bench
        finally:
            bench.close()


def halt_at(bench: Bench, point: str, task_id: str, how: str = "kill") -> None:
    """Have the process killed, or frozen, that comes to this point of this task, once."""
    bench.project.halt_point(how, point, task_id).touch()


def seen(bench: Bench, task_id: str, step: str, times: int = 1, timeout: float = 15) -> None:
    """Wait until the witness has seen a step so often; more is a mistake, fewer at the end too."""
    bench.wait_for(
        lambda: bench.witness.count(task_id, step) >= times, timeout, f"{task_id}: {step} × {times}"
    )
    assert bench.witness.count(task_id, step) == times


class Copies:
    """A task's message, to be sent again, also when its row is gone."""

    def __init__(self, bench: Bench, task_id: str) -> None:
        store = bench.app().durable.store
        columns = store.context.schema.executions.c
        found = row(bench, task_id)
        assert found is not None
        assert found.message is not None
        self._bench = bench
        self._message = found.message
        with store.database.statements() as connection:
            one = select(columns.send_id).where(columns.task_id == task_id)
            self._send_id = connection.execute(one).scalar_one()

    def send(self, count: int = 1, *, wake: int | None = None) -> None:
        """Send it as it was first sent, or as that wake, so many times."""
        message = self._message
        mark = {"send_id": self._send_id, "version": 0}
        headers = {**loads(message.headers), "durable": mark if wake is None else {**mark, "wake": wake}}
        with self._bench.app().producer_pool.acquire() as producer:
            for _ in range(count):
                producer.publish(
                    message.body,
                    content_type=message.content_type,
                    content_encoding=message.content_encoding,
                    compression=message.compression,
                    headers=headers,
                    exchange=message.exchange,
                    routing_key=message.routing_key,
                    **loads(message.properties),
                )


def dropped(bench: Bench, task_id: str) -> list[str]:
    """The lines by which the first worker says that it has dropped a message of a task."""
    lines = bench.processes[0].logs().splitlines()
    return [line for line in lines if f"[{task_id}] dropped: " in line]


def requests_of(bench: Bench, task_id: str) -> list[dict[str, Any]]:
    """What each run of a task saw of its request."""
    lines = (bench.folder / f"requests-{task_id}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def outbox_delays(bench: Bench) -> list[float]:
    """For each message of a plain task that waits in the database: for how many seconds it was to wait."""
    store = bench.app().durable.store
    columns = store.context.schema.executions.c
    waiting = select(columns.wake_at, columns.created_at).where(columns.status == "outbox")
    with store.database.statements() as connection:
        return [(wake_at - created_at).total_seconds() for wake_at, created_at in connection.execute(waiting)]
