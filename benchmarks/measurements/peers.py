"""Durable tasks beside the peers. Each peer runs with two processes, as our worker does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from benchmarks.deployment import DEFAULT_QUEUE, BrokerName, Site
from benchmarks.lab import Lab
from benchmarks.measurements.sending import UNREAD, dispatch_rate, park_pattern
from benchmarks.measurements.throughput import TITLES, park_rate, warm
from benchmarks.measurements.waking import burst_rate, eta_burst_rate, eta_row
from benchmarks.peers.peer import ABSURD, DBOS, DJANGO_BEAT, PGQUEUER, PROCRASTINATE, Kind, Peer
from benchmarks.rows import Missing, Row, Samples, at_least, more_than, percentile

#: Sleeps that a tuned Absurd can be trusted to begin per second.
ABSURD_PARKS = 150.0
NAMES = {DBOS: "DBOS", ABSURD: "Absurd", PGQUEUER: "pgqueuer", PROCRASTINATE: "procrastinate"}


def step_dbos(lab: Lab) -> Iterator[Row]:
    """One step, ours and DBOS's."""
    site = warm(lab.site("redis"))
    count = lab.size(1000, 300)
    with lab.peer(DBOS) as peer:
        yield lab.compare(
            "step_dbos",
            "no-op with one step ÷ DBOS workflow with one step",
            ("durable, Redis", lambda: site.throughput("one_step", count)),
            ("DBOS", lambda: peer.throughput("step", count)),
            goal=at_least(2),
        )


def park_absurd(lab: Lab, broker: BrokerName) -> Iterator[Row]:
    """Going to sleep, ours and Absurd's."""
    site = warm(lab.site(broker))
    count = lab.size(1000, 300)
    with lab.peer(ABSURD) as peer:
        yield lab.compare(
            f"park_absurd_{broker}",
            f"put to sleep ÷ Absurd's default; {TITLES[broker]}",
            (f"durable, {TITLES[broker]}", lambda: park_rate(site, count)),
            ("Absurd", lambda: peer.throughput("park", count)),
            goal=at_least(2),
        )


def bursts(lab: Lab) -> Iterator[Row | Missing]:
    """Many that are due at one instant, on RabbitMQ, beside Celery's ETA and each peer at its best.

    (DBOS: at its default.) All are compared to the same bursts of ours, one in each round.
    """
    site = warm(lab.site("rabbitmq"))
    count = lab.size(5000, 500)
    with ExitStack() as opened:
        peers, absent = _open(lab, opened)
        sides: dict[str, Callable[[], float]] = {
            "durable": lambda: burst_rate(site, count),
            "eta": lambda: eta_burst_rate(site, count),
            **{NAMES[kind]: partial(_peer_burst, peer, count) for kind, peer in peers.items()},
        }
        values, failed = lab.in_turns(sides, may_fail=NAMES.values())
    yield eta_row("rabbitmq", count, values["durable"], values["eta"])
    for kind, who in NAMES.items():
        name, title = f"burst_{who.lower()}", f"{count:,} due at one instant, finished ÷ {who}"
        if who in values:
            ours, theirs = (Samples(label, "/s", values[side]) for label, side in _labels(who))
            yield Row(name, title, ours, theirs, more_than(1) if kind in (DBOS, ABSURD) else None)
        else:
            yield Missing.because(name, title, absent.get(who) or failed[who])


def _labels(who: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("durable, RabbitMQ", "durable"), (who, who)


def _open(lab: Lab, opened: ExitStack) -> tuple[dict[Kind, Peer], dict[str, Exception]]:
    """All peers that have queues; and, by name, why one of them cannot be had."""
    peers, absent = {}, {}
    for kind, who in NAMES.items():
        try:
            peers[kind] = opened.enter_context(lab.peer(kind))
        except Exception as error:  # noqa: BLE001 - the table says so
            absent[who] = error
    return peers, absent


def _peer_burst(peer: Peer, count: int) -> float:
    parks = ABSURD_PARKS if peer.kind is ABSURD else 0.0
    return peer.burst(count, tuned=peer.kind is not DBOS, parks=parks)


def lateness_peer(lab: Lab, kind: Kind) -> Iterator[Row]:
    """How late a peer is with its defaults."""
    count, seconds = lab.size(200, 50), lab.size(20, 5)
    with lab.peer(kind) as peer:
        yield from _lateness_rows(NAMES[kind], count, seconds, peer.lateness(count, seconds))


def dispatch_django_beat(lab: Lab) -> Iterator[Row]:
    """Due rows to messages, beside one-off entries of django-celery-beat."""
    site = lab.site("redis")
    count = lab.size(3000, 300)
    pattern = park_pattern(site)
    with lab.peer(DJANGO_BEAT) as peer:

        def theirs() -> float:
            label = peer.new_label("dispatch")
            broker = site.env["CELERY_BROKER_URL"]
            peer.run("dispatch", broker=broker, queue=UNREAD, label=label, count=count)
            if site.driver.ask("purge", queue=UNREAD) != count:
                raise AssertionError("not every entry has become a message")
            return peer.marks.read(label)[0].value

        row = lab.compare(
            "dispatch_django_beat",
            f"dispatch alone, {count:,} due ÷ django-celery-beat's one-off entries; Redis",
            ("scheduler", lambda: dispatch_rate(site, pattern, count)),
            ("django-celery-beat", theirs),
            goal=at_least(50),
        )
    site.postgres.forget_parked()
    yield row


def lateness_eta(lab: Lab, broker: BrokerName) -> Iterator[Row]:
    """How late Celery's own ETA is: the message waits in the memory of a worker."""
    site = warm(lab.site(broker))
    count, seconds = lab.size(200, 50), lab.size(20, 5)
    values = _eta_lateness(site, count, seconds)
    yield from _lateness_rows(f"Celery ETA, {TITLES[broker]}", count, seconds, values)


def _eta_lateness(site: Site, count: int, seconds: float) -> list[float]:
    label = site.new_label("eta")
    first = time.time() + 4
    dues = [first + seconds * number / count for number in range(count)]
    site.driver.ask("send_eta_each", task="plain_eta", label=label, dues=dues, queue=DEFAULT_QUEUE)
    return [(mark.time - mark.value) * 1000 for mark in site.marks.wait(label, count)]


def _lateness_rows(who: str, count: int, seconds: float, values: list[float]) -> Iterator[Row]:
    name = "".join(letter if letter.isalnum() else "_" for letter in who.lower()).replace("__", "_")
    for part, percent in (("p50", 50), ("p99", 99)):
        yield Row(
            f"lateness_{part}_{name}",
            f"wake lateness, {count} over {seconds:g} s, {part}; {who}",
            Samples(who, "ms", (percentile(values, percent),)),
            note="one run" if part == "p50" else "",
            detail=tuple(values) if part == "p50" else (),
        )
