"""What the lease tests ask of a bench, and do to it."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import text, update

from tests.integration.support import row
from tests.nodes import Bench, Worker

PROJECT = "tests.integration.leases_proj"
#: As in the project: seconds between renewals, from asking a run to stop to killing it, of a lease.
INTERVAL, GRACE, TTL = 1.0, 4.0, 6.0


def execute(bench: Bench, statement: str, **values: Any) -> list[Any]:
    """Run SQL on the bench's database, as an operator would. Its rows, if it has any."""
    with bench.app().durable.store.database.transaction() as connection:
        result = connection.execute(text(statement), values)
        return list(result) if result.returns_rows else []


def steal(bench: Bench, *results: Any) -> float:
    """Take the leases of these tasks away. When that was, by the witness's clock."""
    for result in results:
        execute(
            bench,
            "UPDATE durable_executions SET owner = 'x', token = token + 1 WHERE task_id = :id",
            id=result.id,
        )
    return time.time()


def end_stolen_leases(bench: Bench) -> None:
    """As if the thief had died long ago: nobody has to wait until what it took runs out."""
    store = bench.app().durable.store
    executions = store.context.schema.executions
    with store.database.transaction() as connection:
        stolen = update(executions).where(executions.c.owner == "x")
        connection.execute(stolen.values(wake_at=store.context.now()))


def wait_for_step(bench: Bench, result: Any, step: str, count: int = 1, timeout: float = 20) -> None:
    """Wait until a task has done something so many times."""
    message = f"{result.id} has done {step!r} {count} times"
    bench.wait_for(lambda: bench.witness.count(result.id, step) >= count, timeout, message)


def time_of(bench: Bench, result: Any, step: str, which: int = 0) -> float:
    """When a task has done something."""
    return bench.witness.sightings(result.id, step)[which].time


def tokens_of(bench: Bench, result: Any, step: str = "body") -> list[int]:
    """The tokens of the runs that have done something, in their order."""
    return [seen.attempt for seen in bench.witness.sightings(result.id, step)]


def pid_of(bench: Bench, result: Any, which: int = -1) -> int:
    """The process that a task has last run in."""
    return bench.witness.sightings(result.id, "body")[which].pid


def crashes_of(bench: Bench, result: Any) -> int:
    found = row(bench, result.id)
    assert found is not None
    return found.crashes


def revoked_ids(bench: Bench, *workers: Worker) -> set[str]:
    """What these workers would throw away."""
    answers = bench.app().control.inspect([worker.hostname for worker in workers], timeout=3).revoked()
    assert answers is not None
    return {task_id for ids in answers.values() for task_id in ids}
