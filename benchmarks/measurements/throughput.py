"""Tasks per second through one worker: durable beside plain."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.deployment import BrokerName, Site
from benchmarks.lab import Lab
from benchmarks.rows import Goal, Row, Samples, at_least, at_most

#: Tasks per run: some seconds' worth of plain ones. With half as many the start of the worker weighs on ours.
COUNTS: dict[BrokerName, tuple[int, int]] = {
    "redis": (2500, 500),
    "rabbitmq": (5000, 800),
    "embedded": (1500, 300),
}
TITLES: dict[BrokerName, str] = {"redis": "Redis", "rabbitmq": "RabbitMQ", "embedded": "embedded, SQLite"}
DAY = 86_400.0


def noop(lab: Lab, broker: BrokerName, goal: Goal) -> Iterator[Row]:
    """A task that does nothing."""
    site = warm(lab.site(broker))
    count = lab.size(*COUNTS[broker])
    yield lab.compare(
        f"noop_{broker}",
        f"no-op, durable ÷ plain; {TITLES[broker]}",
        ("durable", lambda: site.throughput("noop", count)),
        ("plain", lambda: site.throughput("plain", count)),
        goal=goal,
    )


def one_step(lab: Lab, broker: BrokerName) -> Iterator[Row]:
    """A task with one journaled step; how many commits it costs is counted apart."""
    site = warm(lab.site(broker))
    count = lab.size(*COUNTS[broker])
    yield lab.compare(
        f"step_{broker}",
        f"no-op with one step ÷ plain no-op; {TITLES[broker]}",
        ("durable", lambda: site.throughput("one_step", count)),
        ("plain", lambda: site.throughput("plain", count)),
        goal=at_least(0.5),
    )


def commits(lab: Lab) -> Iterator[Row]:
    """What PostgreSQL says it has committed, for each task with one step."""
    site = warm(lab.site("redis"))
    count = 1500
    # The scheduler's looks are not the tasks'. The next measurement has one again.
    site.stop_beat()
    site.stop_worker()
    before = site.postgres.commits()
    site.start_worker()
    site.throughput("one_step", count)
    site.stop_worker()
    # Renewals and what a worker asks at its start are a handful in all: rounded off.
    per_task = round((site.postgres.commits() - before) / count, 1)
    yield Row(
        "step_commits",
        "commits per task with one step",
        Samples("durable", "commits", (per_task,)),
        goal=at_most(4),
        note="xact_commit of pg_stat_database, without a scheduler and without the benchmark's own",
    )


def park(lab: Lab, broker: BrokerName) -> Iterator[Row]:
    """Tasks that go to sleep at once."""
    site = warm(lab.site(broker))
    count = lab.size(*COUNTS[broker])
    yield lab.compare(
        f"park_{broker}",
        f"put to sleep ÷ plain no-op; {TITLES[broker]}",
        ("durable", lambda: park_rate(site, count)),
        ("plain", lambda: site.throughput("plain", count)),
        goal=at_least(0.5),
    )


def park_rate(site: Site, count: int) -> float:
    """Tasks put to sleep per second; none is left."""
    try:
        return site.throughput("park", count, DAY)
    finally:
        site.postgres.forget_parked()


def warm(site: Site) -> Site:
    """Both sides have imported, connected and compiled what they need."""
    for task in ("noop", "plain"):
        site.throughput(task, 50)
    return site
