"""Executions in each state, brought there by the statements that bring them there in life."""

from __future__ import annotations

from celery_durable.records import Claim, Due, JournalEntry, Kind, LeaseKey, Outcome, OutcomeKind, Status
from celery_durable.store import Store
from tests.store.messages import delivery, edit, schedule

WORKER = "celery@one:1:aaaa"


def claim(store: Store, task_id: str, *, is_wake: bool = False) -> Claim:
    """What a worker does that gets the message."""
    granted = store.claims.claim(delivery(task_id, is_wake=is_wake), WORKER, 60.0, 3)
    assert isinstance(granted, Claim)
    return granted


def run(store: Store, task_id: str) -> LeaseKey:
    """A first run that has just begun."""
    return claim(store, task_id).key


def sleep_entry(position: int) -> JournalEntry:
    return JournalEntry(position, Kind.SLEEP, f"sleep {position}")


def fall_asleep(store: Store, task_id: str, seconds: float = 3600.0, position: int = 1) -> None:
    """A first run that sleeps, after steps up to that position."""
    key = run(store, task_id)
    steps = [JournalEntry(n, Kind.STEP, f"step {n}", payload=b"null") for n in range(1, position)]
    assert store.runs.park(key, Due(seconds=seconds), entries=[*steps, sleep_entry(position)])


def wait_for_retry(store: Store, task_id: str, seconds: float = 3600.0) -> None:
    """A run that parked for its retry, after a sleep that is over."""
    key = run(store, task_id)
    assert store.runs.record_sleep(key, [sleep_entry(1)], Due())
    assert store.runs.park(key, Due(seconds=seconds), status=Status.RETRYING)


def begin_to_end(store: Store, task_id: str) -> LeaseKey:
    """A run that has its outcome, which is being told."""
    key = run(store, task_id)
    assert store.runs.end(key, Outcome(OutcomeKind.VALUE, payload=b"42"), 60.0) is not None
    return key


def end(store: Store, task_id: str, status: str = Status.SUCCEEDED) -> None:
    """An execution that has ended."""
    assert store.runs.finish(begin_to_end(store, task_id), status)


def quarantine(store: Store, task_id: str) -> None:
    """An execution whose quarantine has been told."""
    key = run(store, task_id)
    assert store.runs.end(key, Outcome(OutcomeKind.QUARANTINED, "it died"), 60.0) is not None
    assert store.runs.finish(key, Status.QUARANTINED)


def set_aside(store: Store, task_id: str) -> None:
    """An execution whose code no longer fits its journal."""
    assert store.runs.set_aside(run(store, task_id))


def replace(store: Store, task_id: str) -> None:
    """An execution that another one is to take over."""
    assert store.runs.finish(run(store, task_id), Status.REPLACED)


def send_wake(store: Store, task_id: str) -> None:
    """Make it look as if a wake message were on its way: it is due again in ten minutes."""
    edit(store, task_id, sends=1, wake_at=store.context.now(600.0))


#: How to bring an execution into each state in which nobody holds it.
PARKED = {
    "scheduled": lambda store, task_id: schedule(store, task_id, due_in=3600),
    "sleeping": fall_asleep,
    "retrying": wait_for_retry,
}
ENDED = {"ending": begin_to_end, "succeeded": end}
