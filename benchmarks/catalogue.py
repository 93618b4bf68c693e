"""Everything that can be measured, by name, in the order of a run: sites follow one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.deployment import BrokerName
from benchmarks.lab import Lab
from benchmarks.measurements import peers, replay, sending, standing, throughput, waking
from benchmarks.measurements.peers import NAMES
from benchmarks.peers.peer import Kind
from benchmarks.rows import Missing, Row, at_least


@dataclass(frozen=True)
class Measurement:
    """One entry of the catalogue.

    ``peer``: needs a package that the benchmark installs. ``quick``: part of a quick run.
    """

    name: str
    measure: Callable[[Lab], Iterable[Row | Missing]]
    peer: bool = False
    quick: bool = True


def _lateness_of(kind: Kind) -> Measurement:
    name = f"peer-lateness-{NAMES[kind].lower()}"
    return Measurement(name, lambda lab: peers.lateness_peer(lab, kind), peer=True, quick=False)


def _peer_on(
    what: str, broker: BrokerName, measure: Callable[[Lab, BrokerName], Iterable[Row]]
) -> Measurement:
    return Measurement(f"peer-{what}-{broker}", lambda lab: measure(lab, broker), peer=True, quick=False)


CATALOGUE: tuple[Measurement, ...] = (
    Measurement("noop-redis", lambda lab: throughput.noop(lab, "redis", at_least(0.6))),
    Measurement("step-redis", lambda lab: throughput.one_step(lab, "redis")),
    Measurement("commits", throughput.commits),
    Measurement("park-redis", lambda lab: throughput.park(lab, "redis")),
    Measurement("burst-redis", lambda lab: waking.burst(lab, "redis")),
    Measurement("burst-crowded", waking.crowded_burst, quick=False),
    Measurement("lateness-redis", lambda lab: waking.lateness(lab, "redis")),
    Measurement("replay", replay.replay),
    Measurement("countdown", sending.countdown),
    Measurement("dispatch-redis", lambda lab: sending.dispatch(lab, "redis")),
    Measurement("idle-scheduler", standing.idle_scheduler),
    Measurement("busy-scheduler", standing.busy_scheduler, quick=False),
    Measurement("worker-memory", standing.worker_memory, quick=False),
    Measurement("leases", standing.leases, quick=False),
    Measurement("noop-rabbitmq", lambda lab: throughput.noop(lab, "rabbitmq", at_least(0.5))),
    Measurement("step-rabbitmq", lambda lab: throughput.one_step(lab, "rabbitmq"), quick=False),
    Measurement("park-rabbitmq", lambda lab: throughput.park(lab, "rabbitmq"), quick=False),
    Measurement("burst-rabbitmq", lambda lab: waking.burst(lab, "rabbitmq")),
    Measurement("lateness-rabbitmq", lambda lab: waking.lateness(lab, "rabbitmq"), quick=False),
    Measurement("dispatch-rabbitmq", lambda lab: sending.dispatch(lab, "rabbitmq")),
    Measurement("noop-embedded", lambda lab: throughput.noop(lab, "embedded", at_least(0.5))),
    Measurement("peer-step-dbos", peers.step_dbos, peer=True, quick=False),
    _peer_on("park-absurd", "redis", peers.park_absurd),
    _peer_on("lateness-celery-eta", "redis", peers.lateness_eta),
    Measurement("peer-dispatch-django-beat", peers.dispatch_django_beat, peer=True, quick=False),
    _peer_on("lateness-celery-eta", "rabbitmq", peers.lateness_eta),
    _peer_on("park-absurd", "rabbitmq", peers.park_absurd),
    Measurement("peer-burst", peers.bursts, peer=True, quick=False),
    *(_lateness_of(kind) for kind in NAMES),
)
