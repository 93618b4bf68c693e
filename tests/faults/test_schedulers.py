"""A scheduler dies at every point of its own: what it had begun, the next one ends."""

from __future__ import annotations

import pytest

from celery_durable.points import Point
from tests.faults.stage import strike
from tests.nodes import Bench, on
from tests.nodes.workers import CeleryProcess

#: While rows are sent, and while an entry of the schedule is run.
DISPATCH = (Point.DUE_TAKEN, Point.WAKES_SENT, Point.WAKES_NOTED)
ENTRIES = (Point.ENTRY_TAKEN, Point.ENTRY_ADVANCED)
STRUCK = (*DISPATCH, *ENTRIES)


@on("redis-postgres", "redis-sqlite")
@pytest.mark.timeout(150)
def test_a_scheduler_is_killed_there_and_the_next_one_goes_on(bench: Bench) -> None:
    """One that sends rows and one that runs an entry die at all their points, one after the other."""
    marks = bench.folder / "marks"
    marks.mkdir()
    bench.worker()
    naps = [bench.project.nap.delay(1.2 + number) for number in range(4)]
    sender = bench.process(
        "durable", "scheduler", name="sender", env=strike(",".join(DISPATCH), marks), wait=False
    )
    # Its first entry is due when the other one has died its deaths: what is struck is a wake.
    bench.wait_for(lambda: is_through(bench, sender, DISPATCH), 60, "the sender has died everywhere")
    runner = bench.beat(
        name="runner", env={"PROJ_ENTRY": "1", **strike(",".join(ENTRIES), marks)}, wait=False
    )
    bench.wait_for(lambda: is_through(bench, runner, ENTRIES), 60, "the runner has died everywhere")

    assert [nap.get(timeout=30) for nap in naps] == ["napped"] * len(naps)
    assert [bench.witness.steps(nap.id) for nap in naps] == [["body", "body", "woken", "success"]] * len(naps)
    ticks = bench.witness.count("tick")
    bench.wait_for(lambda: bench.witness.count("tick") > ticks, message="the entry runs on")
    runner.kill()
    store = bench.app().durable.store
    runs = store.schedule.load(["tick"])[0]["tick"].total_run_count
    bench.wait_for(lambda: store.due.poll().wake_at is None and bench.queue_is_empty(), 30, "all is sent")
    bench.wait_for(lambda: bench.witness.count("tick") == runs, message=f"{runs} runs are {runs} ticks")


def is_through(bench: Bench, scheduler: CeleryProcess, points: tuple[str, ...]) -> bool:
    """Start a scheduler that has died again; whether it has died at all these points."""
    struck = {mark.name for mark in (bench.folder / "marks").iterdir()} & set(points)
    if scheduler.running:
        return False
    assert scheduler.exit_code == -9, scheduler.logs()
    scheduler.start(wait=False)
    return struck == set(points)
