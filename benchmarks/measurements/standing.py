"""What it costs to stand by: sleepers at rest, and leases held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil  # type: ignore[import-untyped]

from benchmarks.deployment import DEFAULT_QUEUE, Site
from benchmarks.lab import Lab
from benchmarks.measurements.throughput import DAY, warm
from benchmarks.measurements.waking import FAR
from benchmarks.rows import Row, Samples, at_most, percentile
from tests.nodes import LocalProcess, wait_for

MEGABYTE = 1e6
#: In the table of a scheduler. To make them takes longer than to measure: two measurements share them.
SLEEPERS = (1_000_000, 100_000)
#: What happens to a busy scheduler's table: sleeps that end per second, and rows that are sent and cancelled.
BUSY_DUE, BUSY_CHURN = 100 / 3, 50
#: Seconds for the worker to put all of them to sleep, besides a tenth of the time in which they end.
BUSY_LEAD = 20.0


def idle_scheduler(lab: Lab) -> Iterator[Row]:
    """A scheduler with nothing to do, over a table full of sleepers."""
    site = lab.new_site("redis", log_statements=True)
    sleepers, window, settled = lab.size(*SLEEPERS), lab.size(20, 10), lab.size(5, 3)
    pattern = _park_pattern(site)
    empty = lab.repeat(lambda: _beat_memory(site, settled))
    _fill(site, pattern, sleepers)
    full = lab.repeat(lambda: _beat_memory(site, settled))
    beat = site.start_beat()
    # Its first looks at everything, from the schedule to what can be pruned, are behind it.
    time.sleep(2 * settled)
    windows = [_usage(site, beat, window) for _ in range(lab.rounds)]
    site.stop_beat()
    title = f"{sleepers:,} sleepers, idle scheduler: {{}}"
    yield Row(
        "idle_cpu",
        title.format("CPU"),
        Samples("beat", "% of a core", tuple(cpu for cpu, _ in windows)),
        goal=at_most(0.2),
    )
    yield Row(
        "idle_statements",
        title.format("statements a minute"),
        Samples("beat", "/min", tuple(statements for _, statements in windows)),
        goal=at_most(40),
    )
    yield Row(
        "idle_memory",
        title.format("memory over an empty table"),
        Samples("beat", "MB", tuple(much - little for much, little in zip(full, empty, strict=True))),
        goal=at_most(1),
    )


def busy_scheduler(lab: Lab) -> Iterator[Row]:
    """The same table while sleeps end in it, rows are added, and rows are cancelled."""
    site, sleepers, seconds = _full_site(lab), lab.size(*SLEEPERS), lab.size(60, 20)
    site.start_worker()
    label = site.new_label("busy")
    first = time.time() + BUSY_LEAD + seconds / 10
    dues = [first + number / BUSY_DUE for number in range(int(seconds * BUSY_DUE))]
    site.driver.ask("send_each", task="wake", args=[[label, due] for due in dues], queue=DEFAULT_QUEUE)
    # With the worker at rest: what is measured is the scheduler.
    wait_for(lambda: site.postgres.sleeping() >= sleepers + len(dues), first - time.time(), "all sleep")
    overdue = site.new_label("overdue")
    site.driver.ask("send", task="noop", args=[overdue], count=1, queue=DEFAULT_QUEUE, countdown=0.1)
    time.sleep(0.5)
    began = time.time()
    beat = site.start_beat()
    start = site.marks.wait(overdue, 1)[0].time - began
    time.sleep(max(0.0, first - time.time()))
    before = _memory(beat)
    site.driver.ask("churn", seconds=seconds, per_second=BUSY_CHURN)
    late = [mark.time - mark.value for mark in site.marks.wait(label, len(dues))]
    load = f"{BUSY_DUE * 60:.0f} due a minute, {BUSY_CHURN} sent and cancelled a second"
    title = f"{sleepers:,} sleepers, {load}: {{}}"
    for name, unit, value, most in (
        ("lateness_p99", "s", percentile(late, 99), 2.0),
        ("start", "s", start, 5.0),
        ("memory_growth", "MB", _memory(beat) - before, 2.0),
    ):
        yield Row(
            f"busy_{name}",
            title.format(name.replace("_", " ")),
            Samples("beat", unit, (value,)),
            goal=at_most(most),
        )


def _full_site(lab: Lab) -> Site:
    """A site full of sleepers, with no process but the producer: the one in use, if it is such a one."""
    site, sleepers = lab.site_in_use, lab.size(*SLEEPERS)
    if site is None or site.sleepers != sleepers:
        site = lab.new_site("redis", log_statements=True)
        _fill(site, _park_pattern(site), sleepers)
    return site


def _park_pattern(site: Site) -> str:
    site.start_worker()
    pattern = site.parked("wake", "sleeper", FAR)
    site.stop_worker()
    return pattern


def _fill(site: Site, pattern: str, sleepers: int) -> None:
    site.postgres.clone(pattern, sleepers, due_in=DAY)
    site.sleepers = sleepers


def worker_memory(lab: Lab) -> Iterator[Row]:
    """What a worker keeps of tasks that sleep, beside what Celery's ETA keeps."""
    count, etas = lab.size(10_000, 1500), lab.size(4000, 1500)

    def durable() -> float:
        site = warm(lab.new_site("redis").running())
        assert site.worker is not None
        # Until Python's first full collection has touched, and so copied, what the children were forked with.
        site.throughput("park", max(count // 2, 1000), DAY)
        before = _memory(site.worker)
        site.throughput("park", count, DAY)
        return (_memory(site.worker) - before) / count * 10_000

    def plain() -> float:
        site = warm(lab.new_site("redis").running())
        assert site.worker is not None
        before = _memory(site.worker)
        site.driver.ask("send", task="plain", args=["x"], count=etas, queue="celery", eta_in=DAY)
        wait_for(lambda: not site.driver.ask("depth", queue="celery"), timeout=120, message="all are fetched")
        return (_memory(site.worker) - before) / etas * 10_000

    ours, theirs = (durable(),), (plain(),)
    yield Row(
        "worker_memory",
        "worker memory per 10,000 sleeping tasks",
        Samples("durable", "MB", ours),
        goal=at_most(0.5),
    )
    yield Row(
        "worker_memory_celery_eta",
        "worker memory per 10,000 tasks with an ETA, plain Celery on Redis",
        Samples("plain", "MB", theirs),
    )


def leases(lab: Lab) -> Iterator[Row]:
    """Many leases held by one process with threads."""
    site = lab.new_site("redis", log_statements=True)
    count, window = lab.size(2000, 500), 10.0
    worker = site.start_worker(pool="threads", concurrency=count)
    label = site.new_label("hold")
    site.driver.ask("send", task="hold", args=[label, 3600], count=count, queue="celery")
    site.marks.wait(label, count)
    # One whole interval: from here on nothing but renewals is sent.
    time.sleep(window)
    rates = lab.repeat(lambda: _per_second(site.postgres.statements, window))
    held = site.postgres.ask("SELECT count(*) FROM durable_executions WHERE wake_at > clock_timestamp()")
    if held != count or not worker.running:
        raise AssertionError(f"{held} of {count} leases are held")
    site.stop_worker()
    yield Row(
        "lease_statements",
        f"{count:,} leases in one threads-pool process: renewal statements per second",
        Samples("worker", "/s", rates),
        goal=at_most(5),
    )


def _per_second(count: Callable[[], int], seconds: float) -> float:
    before = count()
    time.sleep(seconds)
    return (count() - before) / seconds


def _usage(site: Site, process: LocalProcess, seconds: float) -> tuple[float, float]:
    """Percent of a core, and statements a minute."""
    before = _cpu(process)
    statements = _per_second(site.postgres.statements, seconds) * 60
    # The system counts in hundredths of a second.
    return round((_cpu(process) - before) / seconds * 100, 2), statements


def _cpu(process: LocalProcess) -> float:
    """Seconds of processor time so far."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _beat_memory(site: Site, settled: float) -> float:
    beat = site.start_beat()
    time.sleep(settled)
    memory = _memory(beat)
    site.stop_beat()
    return memory


def _memory(process: LocalProcess) -> float:
    """Megabytes that would be free if the process and its children were gone."""
    return sum(float(psutil.Process(pid).memory_full_info().uss) for pid in process.tree()) / MEGABYTE
