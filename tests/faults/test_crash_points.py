"""A worker dies, or freezes, at every point between two effects: the task goes on to its one end."""

from __future__ import annotations

import pytest

from tests.faults.scenes import FROZEN, SCENES
from tests.faults.stage import Stage
from tests.nodes import Bench, on


@pytest.mark.report("killed-while-parking")
@on("redis-postgres")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("group", SCENES)
def test_a_worker_is_killed_there_and_another_one_goes_on(bench: Bench, group: str) -> None:
    stage = Stage(bench, SCENES[group], frozen=False)
    bench.beat()
    stage.play()
    stage.take_over()
    assert not stage.complaints(), "\n".join(["", *stage.complaints()])


@on("redis-postgres")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("group", FROZEN)
def test_a_worker_freezes_there_and_thaws_when_another_one_has_done_its_work(
    bench: Bench, group: str
) -> None:
    stage = Stage(bench, SCENES[group], frozen=True)
    bench.beat()
    stage.play()
    stage.take_over()
    stage.thaw()
    assert not stage.complaints(), "\n".join(["", *stage.complaints()])
