"""Sleeps that end: many at one instant, and one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.deployment import DEFAULT_QUEUE, BrokerName, Site
from benchmarks.lab import Lab
from benchmarks.marks import rate
from benchmarks.measurements.throughput import COUNTS, DAY, TITLES, warm
from benchmarks.rows import Row, Samples, at_least, at_most, percentile
from tests.nodes import wait_for

#: An instant in the year 2096: until its copies are made due, the pattern sleeps.
FAR = 4e9
#: Seconds from the making of sleepers to their due time: more than a poll interval, so that the scheduler
#: knows of them as it would of real ones.
LEAD = 4.0
CROWD = 100_000
#: Tasks that any worker can put to sleep per second.
PARKS = 100
#: Messages with an ETA that any producer can send per second.
ETA_SENDS = 500


def burst(lab: Lab, broker: BrokerName) -> Iterator[Row]:
    """Sleeps that are all due at one instant."""
    site = warm(lab.site(broker))
    count, plain = lab.size(5000, 800), lab.size(*COUNTS[broker])
    yield lab.compare(
        f"burst_{broker}",
        f"{count:,} sleeps due at one instant, finished ÷ plain no-op; {TITLES[broker]}",
        ("durable", lambda: burst_rate(site, count)),
        ("plain", lambda: site.throughput("plain", plain)),
        goal=at_least(0.6),
    )


def crowded_burst(lab: Lab) -> Iterator[Row]:
    """The same while many others sleep on; and beside Celery's ETA. Both are compared to the same bursts."""
    site = warm(lab.site("redis"))
    count, others = lab.size(5000, 800), lab.size(CROWD, CROWD // 2)

    def crowded() -> float:
        site.postgres.clone(site.parked("wake", "others", FAR), others, due_in=DAY)
        try:
            return burst_rate(site, count)
        finally:
            site.postgres.forget_parked()

    sides = {
        "with": crowded,
        "without": lambda: burst_rate(site, count),
        "plain, eta": lambda: eta_burst_rate(site, count),
    }
    values, _ = lab.in_turns(sides)
    samples = {label: Samples(label, "/s", found) for label, found in values.items()}
    yield Row(
        "burst_crowded",
        f"the same with {others:,} others waiting ÷ without them; Redis",
        samples["with"],
        samples["without"],
        at_least(0.9),
    )
    yield eta_row("redis", count, values["without"], values["plain, eta"])


def burst_rate(site: Site, count: int) -> float:
    """So many sleepers come due at one instant: finished per second, from the first body to the last end."""
    label = site.new_label("burst")
    pattern = site.parked("wake", label, FAR)
    due_at = time.time() + LEAD
    site.postgres.clone(pattern, count, due_in=LEAD)
    if time.time() > due_at - 0.5:
        raise TimeoutError("the sleepers were not made before they were due")
    rate = site.rate_of(label, count)
    site.postgres.execute("DELETE FROM durable_executions WHERE task_id = %s", (pattern,))
    return rate


def eta_burst_rate(site: Site, count: int) -> float:
    """The same with Celery's own ETA: the messages wait in the memory of the worker."""
    label = site.new_label("eta")
    lead = count / ETA_SENDS + 3
    due = time.time() + lead
    site.driver.ask(
        "send", task="plain_eta", args=[label, due], count=count, queue=DEFAULT_QUEUE, eta_in=lead
    )
    if time.time() > due:
        raise TimeoutError("the messages were not sent before they were due")
    return rate(site.marks.wait(label, count))


def eta_row(broker: BrokerName, count: int, ours: tuple[float, ...], theirs: tuple[float, ...]) -> Row:
    """Our bursts beside those of Celery's ETA."""
    return Row(
        f"burst_celery_eta_{broker}",
        f"{count:,} due at one instant, finished ÷ Celery's ETA; {TITLES[broker]}",
        Samples("durable", "/s", ours),
        Samples("plain, eta", "/s", theirs),
    )


def lateness(lab: Lab, broker: BrokerName) -> Iterator[Row]:
    """Sleeps due one after the other, with every setting at its default."""
    site = warm(lab.site(broker))
    count, seconds = lab.size(200, 50), lab.size(20, 5)
    rounds = [_lateness(site, count, seconds) for _ in range(lab.rounds)]
    everything = tuple(value for values in rounds for value in values)
    title = f"wake lateness, {count} sleeps over {seconds} s, {{}}; {TITLES[broker]}"
    for name, percent, most in (("p50", 50, 10), ("p99", 99, 50)):
        yield Row(
            f"lateness_{name}_{broker}",
            title.format(name),
            Samples("due → body resumed", "ms", tuple(percentile(values, percent) for values in rounds)),
            goal=at_most(most),
            detail=everything if name == "p50" else (),
        )
    yield Row(
        f"lateness_least_{broker}",
        title.format("the earliest"),
        Samples("due → body resumed", "ms", tuple(min(values) for values in rounds)),
        goal=at_least(0),
    )


def _lateness(site: Site, count: int, seconds: float) -> list[float]:
    """Milliseconds from each due time to the resumed body."""
    label = site.new_label("late")
    first = time.time() + LEAD + count / PARKS
    dues = [first + seconds * number / count for number in range(count)]
    site.driver.ask("send_each", task="wake", args=[[label, due] for due in dues], queue=DEFAULT_QUEUE)
    # A sleep that began after its due time would tell how busy the worker was, not how late its wake.
    wait_for(
        lambda: site.postgres.sleeping() == count,
        max(first - time.time(), 0.0),
        f"{count} tasks sleep before the first is due",
    )
    return [(mark.time - mark.value) * 1000 for mark in site.marks.wait(label, count)]
