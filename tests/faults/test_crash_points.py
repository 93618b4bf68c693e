"""A process dies, or freezes, at every point between two effects: the task goes on to its one end."""

from __future__ import annotations

import pytest

from tests.faults.scenes import FROZEN, KILLED, scenes_of
from tests.faults.stage import Stage
from tests.nodes import Bench, on


@on("redis-postgres", "redis-sqlite")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("part", KILLED)
def test_a_process_is_killed_there_and_a_worker_goes_on(bench: Bench, part: str) -> None:
    stage = Stage(bench, scenes_of(KILLED[part]), frozen=False)
    bench.beat()
    stage.play()
    stage.take_over()
    assert not stage.complaints(), "\n".join(["", *stage.complaints()])


@on("redis-postgres")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("part", FROZEN)
def test_a_worker_freezes_there_and_thaws_when_another_one_has_done_its_work(bench: Bench, part: str) -> None:
    stage = Stage(bench, scenes_of(FROZEN[part]), frozen=True)
    bench.beat()
    stage.play()
    stage.take_over()
    stage.thaw()
    assert not stage.complaints(), "\n".join(["", *stage.complaints()])
