"""What a journaled step costs when the body runs again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.lab import Lab
from benchmarks.measurements.throughput import warm
from benchmarks.rows import Row, Samples, at_most

STEPS = 100


def replay(lab: Lab) -> Iterator[Row]:
    """A body with a hundred steps, after a sleep that comes behind them."""
    site = warm(lab.site("redis"))
    tasks = lab.size(20, 6)

    def microseconds() -> float:
        label = site.new_label("replay")
        site.driver.ask("send", task="replay", args=[label, STEPS, 1.5], count=tasks, queue="celery")
        return statistics.median(mark.value for mark in site.marks.wait(label, tasks)) / STEPS * 1e6

    yield Row(
        "replay_step",
        f"a task with {STEPS} journaled steps, replayed: time per replayed step",
        Samples("durable", "µs", lab.repeat(microseconds)),
        goal=at_most(50),
    )
