"""What `sleep` and `sleep_until` do with every kind of argument, on a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.integration.support import (
    row,
    running_bench,
    wait_for_status,
    wait_until_asleep,
)
from tests.nodes import Bench, Servers, on


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A worker and a beat for all tests of this module that break nothing."""
    with running_bench(request.param, servers, tmp_path_factory.mktemp("running")) as bench:
        yield bench


def journal(bench: Bench, task_id: str) -> list[str]:
    """The kinds of a task's journal entries."""
    found = row(bench, task_id)
    return [] if found is None else [entry.kind for entry in found.journal]


@on("redis-sqlite", "redis-postgres", fixture="running")
class TestAtOnce:
    @pytest.mark.parametrize("duration", [0, -5, -0.0, 0.001, "timedelta.min"])
    def test_a_sleep_that_is_over_at_once_is_journaled_all_the_same(
        self, running: Bench, duration: Any
    ) -> None:
        result = running.project.sleep_for.delay(duration)
        assert result.get(timeout=15) == "awake"
        assert journal(running, result.id) == ["sleep"]
        assert running.witness.steps(result.id) == ["body", "awake"]

    @pytest.mark.report("absurd-times")
    @pytest.mark.parametrize(
        "when", ["0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00", "2001-02-03T04:05:06Z"]
    )
    def test_a_time_in_the_past_is_now(self, running: Bench, when: str) -> None:
        result = running.project.sleep_till.delay(when.replace("Z", "+00:00"))
        assert result.get(timeout=15) == "awake"
        assert journal(running, result.id) == ["sleep"]


@on("redis-postgres", fixture="running")
class TestRefused:
    """An error in the task that names the argument; nothing is journaled."""

    @pytest.mark.report("absurd-times")
    @pytest.mark.parametrize(
        ("duration", "error"),
        [
            ("nan", ValueError),
            ("inf", ValueError),
            ("-inf", ValueError),
            ("timedelta.max", ValueError),
            (10**400, ValueError),
            (True, TypeError),
            ("3", TypeError),
            (None, TypeError),
            ([3], TypeError),
        ],
    )
    def test_what_is_no_duration(self, running: Bench, duration: Any, error: type[Exception]) -> None:
        result = running.project.sleep_for.delay(duration)
        with pytest.raises(error, match="duration"):
            result.get(timeout=15)
        assert result.state == "FAILURE"
        assert wait_for_status(running, result.id, "failed").journal == ()
        assert running.witness.steps(result.id) == ["body"]

    @pytest.mark.parametrize(
        ("units", "error", "named"),
        [
            ({"months": 1}, TypeError, "months"),
            ({"days": True}, TypeError, "days"),
            ({"days": "1"}, TypeError, "days"),
            ({"hours": 1e300}, ValueError, "hours"),
        ],
    )
    def test_what_is_no_unit(
        self, running: Bench, units: dict[str, Any], error: type[Exception], named: str
    ) -> None:
        result = running.project.sleep_for.delay(None, **units)
        with pytest.raises(error, match=named):
            result.get(timeout=15)

    def test_a_duration_and_units_at_once(self, running: Bench) -> None:
        with pytest.raises(TypeError, match="not both: hours"):
            running.project.sleep_for.delay(1, hours=1).get(timeout=15)

    def test_a_time_after_the_last_year(self, running: Bench) -> None:
        result = running.project.sleep_till.delay("9999-12-31T23:59:59-14:00")
        with pytest.raises(ValueError, match="after the last year"):
            result.get(timeout=15)
        assert wait_for_status(running, result.id, "failed").journal == ()


@on("redis-sqlite", "redis-postgres", fixture="running")
class TestFarAway:
    def test_ten_years(self, running: Bench) -> None:
        result = running.project.sleep_for.delay("10 years")
        found = wait_until_asleep(running, result)
        assert found.wake_at is not None
        away = found.wake_at - datetime.now(timezone.utc)
        assert timedelta(days=3652) < away <= timedelta(days=3653)
        running.wait_for(running.queue_is_empty)

    def test_the_last_hours_that_there_are(self, running: Bench) -> None:
        result = running.project.sleep_till.delay("9999-12-31T23:59:59+14:00")
        found = wait_until_asleep(running, result)
        assert found.wake_at == datetime(9999, 12, 31, 9, 59, 59, tzinfo=timezone.utc)
        assert result.info["due_at"] == "9999-12-31T09:59:59+00:00"

    @pytest.mark.report("absurd-times")
    def test_they_keep_nobody_else_from_waking(self, running: Bench) -> None:
        for _ in range(3):
            running.project.sleep_for.delay("10 years")
        assert running.project.doze.delay(7, 1.2).get(timeout=15) == 7


@on("redis-postgres", fixture="running")
class TestUnits:
    def test_they_add_up(self, running: Bench) -> None:
        before = datetime.now(timezone.utc)
        result = running.project.sleep_for.delay(None, days=3, hours=1, minutes=30, name="long")
        found = wait_until_asleep(running, result)
        assert found.wake_at is not None
        wanted = timedelta(days=3, hours=1, minutes=30)
        assert timedelta(0) <= found.wake_at - before - wanted < timedelta(seconds=10)
        assert result.info["name"] == "long"

    def test_a_naive_time_is_read_in_the_timezone_of_the_app(self, running: Bench) -> None:
        tomorrow = (datetime.now(timezone.utc) + timedelta(days=1)).replace(tzinfo=None, microsecond=0)
        result = running.project.sleep_till.delay(tomorrow.isoformat())
        found = wait_until_asleep(running, result)
        assert found.wake_at == tomorrow.replace(tzinfo=timezone.utc)
