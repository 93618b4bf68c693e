"""A slice of the chaos run: two minutes with their faults, then each task is held against the witness."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import Plan, play

#: The same faults each time: what a change has broken is told from what a new seed has found. Long runs
#: (``make soak``) draw a new one.
SEED = 858065


class TestChaos:
    @pytest.mark.timeout(300)
    def test_no_task_is_lost_and_no_write_accepted_twice(self, tmp_path: Path) -> None:
        """``python -m tests.chaos --broker redis --pause 1.2 --minutes 1.7 --seed N`` plays it again."""
        plan = Plan(SEED, 102, broker="redis", pause=1.2, settle=75, folder=tmp_path)
        report = play(plan)
        print(report.text())
        assert report.is_good, report.text()
        # Else it has shown little.
        assert sum(report.struck.values()) >= 30
        assert report.findings.outcomes["succeeded"] >= 30
