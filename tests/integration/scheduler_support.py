"""What the tests of the scheduler ask of its rows, and how they start one in no time."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import func, select

from celery_durable.store import Store
from celery_durable.store.dialect import UtcDateTime
from tests.integration.forks import fork, run_beat
from tests.nodes import Bench


def start_beat(bench: Bench, number: int) -> int:
    """A beat in a fork; its handlers for signals are in place."""
    log = bench.folder / f"beat-{number}.log"
    pid = fork(partial(run_beat, bench.app()), log)
    bench.wait_for(lambda: log.exists() and "beat: Starting" in log.read_text(), message="beat starts")
    return pid


def count_where(store: Store, *conditions: Any, **equal: Any) -> int:
    """How many executions fit."""
    executions = store.context.schema.executions
    wanted = [executions.c[name] == value for name, value in equal.items()]
    with store.database.statements() as connection:
        found: int = connection.execute(
            select(func.count()).select_from(executions).where(*conditions, *wanted)
        ).scalar_one()
        return found


def latest(store: Store) -> datetime:
    """The last of all times: it moves whenever a batch was sent and noted."""
    executions = store.context.schema.executions
    with store.database.statements() as connection:
        found: datetime = connection.execute(
            select(func.max(executions.c.wake_at, type_=UtcDateTime())).where(
                executions.c.namespace == store.context.namespace
            )
        ).scalar_one()
        return found


def is_due(store: Store, count: int) -> bool:
    executions = store.context.schema.executions
    return count_where(store, executions.c.wake_at <= store.now()) == count


def marked_as_sent(store: Store) -> int:
    """How many rows the schedulers know to be sent: their next time is the resend time."""
    executions = store.context.schema.executions
    return count_where(store, executions.c.wake_at > store.now() + timedelta(minutes=10))
