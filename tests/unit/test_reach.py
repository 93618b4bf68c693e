"""Whether something can be reached: each change said once, tries at growing distances."""

from __future__ import annotations

import logging

import pytest

from celery_durable.reach import CEILING, FIRST_DELAY, Reach
from tests.unit.fakes import StillClock


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def reach(clock: StillClock) -> Reach:
    return Reach("The broker", logging.getLogger("tests.reach"), clock)


def test_at_first_it_is_taken_to_be_there(reach: Reach) -> None:
    assert not reach.is_away
    assert reach.retry_in == 0


def test_each_change_is_one_line(reach: Reach, clock: StillClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reach.back()
    for _ in range(5):
        reach.lost("refused")
        clock.now += 10
    reach.back()
    reach.back()
    assert [record.getMessage() for record in caplog.records] == [
        "The broker cannot be reached: refused. Trying again",
        "The broker is back after 50.0 s",
    ]


def test_the_pauses_grow_up_to_a_ceiling_and_differ_between_processes(
    reach: Reach, clock: StillClock
) -> None:
    expected = [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY, CEILING, CEILING]
    pauses = []
    for longest in expected:
        reach.lost("refused")
        pauses.append(reach.retry_in)
        assert longest / 2 <= reach.retry_in <= longest
        clock.now += reach.retry_in
        assert reach.retry_in == 0
    others = Reach("The broker", logging.getLogger("tests.reach"), clock)
    others.lost("refused")
    assert others.retry_in != pauses[0]


def test_what_is_back_starts_anew(reach: Reach) -> None:
    for _ in range(6):
        reach.lost("refused")
    reach.back()
    assert not reach.is_away
    assert reach.retry_in == 0
    reach.lost("refused")
    assert reach.retry_in <= FIRST_DELAY
