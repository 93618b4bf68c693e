"""The list of crash points comes from the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import celery_durable
from celery_durable import points
from celery_durable.points import CRASH_VARIABLE, FREEZE_VARIABLE, MARKS_VARIABLE, Point
from tests.faults.scenes import KILLED, SCENES, scenes_of
from tests.faults.test_schedulers import STRUCK

PACKAGE = Path(celery_durable.__file__).parent


def points_in_code() -> list[str]:
    """The point of each call of `reached` in the package."""
    calls = [
        node
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reached"
    ]
    return [getattr(Point, call.args[0].attr) for call in calls if isinstance(call.args[0], ast.Attribute)]


def test_every_point_is_somewhere_in_the_code() -> None:
    assert set(points_in_code()) == Point.names()


def test_every_point_has_a_fault_test() -> None:
    """Each of these tests waits until a process has come to the point and was struck there."""
    scenes = [scene.mark for topics in KILLED.values() for scene in scenes_of(topics)]
    assert {*scenes, *STRUCK} == Point.names()
    assert sorted(topic for topics in KILLED.values() for topic in topics) == sorted(SCENES)


def test_names_are_told_apart() -> None:
    values = [value for name, value in vars(Point).items() if name.isupper()]
    assert len(values) == len(set(values))


def test_outside_of_the_fault_tests_nothing_happens_at_a_point() -> None:
    unstruck = points.striker_for({})
    assert points._strikers == [unstruck]
    assert all(unstruck(point) is None for point in Point.names())  # type: ignore[func-returns-value]


class TestStrikes:
    @pytest.fixture
    def struck(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The signals that this process would have sent to itself."""
        signals: list[int] = []
        monkeypatch.setattr(points.os, "kill", lambda _pid, number: signals.append(number))
        return signals

    def test_a_process_is_struck_when_it_gets_there_for_the_nth_time(self, struck: list[int]) -> None:
        reached = points.striker_for({CRASH_VARIABLE: "step-ran:2, sleep-parked", FREEZE_VARIABLE: ""})
        for point, signals in [
            ("step-ran", []),
            ("body-left", []),
            ("step-ran", [9]),
            ("step-ran", [9]),
            ("sleep-parked", [9, 9]),
        ]:
            reached(point)
            assert struck == signals

    def test_one_process_of_many_is_struck_where_they_share_marks(
        self, struck: list[int], tmp_path: Path
    ) -> None:
        environment = {FREEZE_VARIABLE: "step-ran", MARKS_VARIABLE: str(tmp_path)}
        for _ in range(3):
            points.striker_for(environment)("step-ran")
        assert struck == [points.signal.SIGSTOP]
        assert [mark.name for mark in tmp_path.iterdir()] == ["step-ran"]

    def test_a_point_that_there_is_not_is_refused(self) -> None:
        with pytest.raises(ValueError, match="nowhere, other"):
            points.striker_for({CRASH_VARIABLE: "nowhere,step-ran:2,other"})
