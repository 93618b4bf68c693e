"""What producers and the scheduler send per second."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.deployment import BrokerName, Site
from benchmarks.lab import Lab
from benchmarks.rows import Row, at_least

DAY = 86_400.0
#: An instant in the year 2096.
FAR = 4e9
#: Nobody takes from this queue.
UNREAD = "unread"


def countdown(lab: Lab) -> Iterator[Row]:
    """``apply_async(countdown=…)`` from one producer: rows, beside Celery's messages with an ETA."""
    site = lab.site("redis")
    count = lab.size(2000, 600)

    def rows() -> float:
        seconds: float = site.driver.ask(
            "send", task="noop", args=["x"], count=count, queue=UNREAD, countdown=DAY
        )
        site.postgres.forget_parked()
        return count / seconds

    def messages() -> float:
        seconds: float = site.driver.ask(
            "send", task="plain", args=["x"], count=count, queue=UNREAD, eta_in=DAY
        )
        site.driver.ask("purge", queue=UNREAD)
        return count / seconds

    yield lab.compare(
        "countdown_redis",
        "apply_async(countdown) of a durable task ÷ apply_async(eta) of a plain one; Redis",
        ("durable", rows),
        ("plain", messages),
        goal=at_least(1.2),
    )


def dispatch(lab: Lab, broker: BrokerName) -> Iterator[Row]:
    """Due rows to broker messages, beside kombu publishing one message after the other."""
    site = lab.site(broker)
    count = lab.size(5000, 1000)
    confirm = broker == "rabbitmq"
    pattern = park_pattern(site)

    def messages() -> float:
        seconds: float = site.driver.ask("publish", count=count, queue=UNREAD, confirm=confirm)
        site.driver.ask("purge", queue=UNREAD)
        return count / seconds

    how = "with a confirm each" if confirm else "one by one"
    row = lab.compare(
        f"dispatch_{broker}",
        f"dispatch alone, {count:,} due ÷ kombu {how}; {'RabbitMQ' if confirm else 'Redis'}",
        ("scheduler", lambda: dispatch_rate(site, pattern, count)),
        ("kombu", messages),
        goal=at_least(3),
    )
    site.postgres.forget_parked()
    yield row


def park_pattern(site: Site) -> str:
    """Have the worker park a task whose wake nobody takes, and stop all that could send or take it."""
    pattern = site.parked("wake", "pattern", FAR, queue=UNREAD)
    site.stop_beat()
    site.stop_worker()
    return pattern


def dispatch_rate(site: Site, pattern: str, count: int) -> float:
    """Copies of the pattern that are due: messages per second of one dispatcher that does nothing else."""
    site.postgres.clone(pattern, count, due_in=-1)
    sent, seconds = site.driver.ask("dispatch")
    purged = site.driver.ask("purge", queue=UNREAD)
    if not sent == purged == count:
        raise AssertionError(f"{count} were due, {sent} sent, {purged} in the queue")
    site.postgres.execute("DELETE FROM durable_executions WHERE task_id <> %s", (pattern,))
    return float(count / seconds)
