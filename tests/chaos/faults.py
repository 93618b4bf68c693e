"""The faults: what each of them does, and how it is taken back."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import amqp
import redis
from kombu.exceptions import OperationalError

from tests.chaos.rows import Row
from tests.chaos.site import Stage
from tests.nodes import FaultProxy, LocalProcess

#: What a broker raises that is away.
BROKER_ERRORS = (OperationalError, OSError, redis.exceptions.RedisError, amqp.exceptions.AMQPError)

#: Takes a fault back.
Heal = Callable[[], None]


@dataclass(frozen=True)
class Struck:
    """A fault that has been done."""

    target: str
    #: Seconds until it is taken back.
    seconds: float
    heal: Heal
    detail: str = ""


#: Does a fault to something that is whole; None when there is nothing to do it to.
Fault = Callable[[Stage, random.Random], Struck | None]


def nothing() -> None:
    """There is nothing to take back."""


def _pick(stage: Stage, dice: random.Random, among: list[Any]) -> Any:
    whole = [process for process in among if process.name not in stage.broken and process.running]
    return dice.choice(whole) if whole else None


def _ready(among: list[Any]) -> list[Any]:
    return [process for process in among if process.running and process.is_ready()]


# Processes of the application.


def kill_child(stage: Stage, dice: random.Random) -> Struck | None:
    worker = _pick(stage, dice, stage.workers[:2])
    children = worker.pool_pids() if worker else []
    if not children:
        return None
    pid = dice.choice(children)
    worker.signal(signal.SIGKILL, pid)
    return Struck(worker.name, 0, nothing, str(pid))


def kill_worker(stage: Stage, dice: random.Random) -> Struck | None:
    return _kill(stage, dice, _pick(stage, dice, _ready(list(stage.workers))))


def kill_main_process(stage: Stage, dice: random.Random) -> Struck | None:
    """The children stay behind."""
    worker = _pick(stage, dice, _ready(list(stage.workers)))
    if worker is None:
        return None
    worker.signal(signal.SIGKILL)

    def heal() -> None:
        worker.kill()
        stage.begin(worker)

    return Struck(worker.name, dice.uniform(0.2, 6), heal)


def kill_beat(stage: Stage, dice: random.Random) -> Struck | None:
    return _kill(stage, dice, _pick(stage, dice, stage.beats))


def _kill(stage: Stage, dice: random.Random, process: LocalProcess | None) -> Struck | None:
    if process is None:
        return None
    process.kill()
    return Struck(process.name, dice.uniform(0, 2), lambda: stage.begin(process))


def deploy(stage: Stage, dice: random.Random) -> Struck | None:
    """TERM, then KILL for who is not gone by then."""
    process = _pick(stage, dice, _ready(list(stage.programs)))
    if process is None:
        return None
    process.signal(signal.SIGTERM)

    def heal() -> None:
        process.kill()
        stage.begin(process)

    return Struck(process.name, dice.choice([0.3, 1, 3, 6]), heal)


def quit_worker(stage: Stage, dice: random.Random) -> Struck | None:
    """A cold shutdown."""
    worker = _pick(stage, dice, _ready(list(stage.workers)))
    if worker is None:
        return None
    worker.signal(signal.SIGQUIT)

    def heal() -> None:
        worker.kill()
        stage.begin(worker)

    return Struck(worker.name, dice.uniform(1, 4), heal)


def freeze_worker(stage: Stage, dice: random.Random) -> Struck | None:
    return _freeze(_pick(stage, dice, list(stage.workers)), dice.choice([0.5, 2, 5, 8]))


def freeze_beat(stage: Stage, dice: random.Random) -> Struck | None:
    return _freeze(_pick(stage, dice, stage.beats), dice.choice([0.5, 3, 12]))


def _freeze(process: LocalProcess | None, seconds: float) -> Struck | None:
    if process is None:
        return None
    process.freeze()
    return Struck(process.name, seconds, process.thaw)


def freeze_child(stage: Stage, dice: random.Random) -> Struck | None:
    worker = _pick(stage, dice, stage.workers[:2])
    children = worker.pool_pids() if worker else []
    if not children:
        return None
    return _freeze_one(worker, dice.choice(children), dice.choice([1, 5, 7]))


def freeze_main_process(stage: Stage, dice: random.Random) -> Struck | None:
    """Its children go on."""
    worker = _pick(stage, dice, stage.workers[:2])
    return None if worker is None else _freeze_one(worker, worker.pid, dice.choice([1, 4, 7]))


def _freeze_one(worker: LocalProcess, pid: int, seconds: float) -> Struck:
    worker.signal(signal.SIGSTOP, pid)
    return Struck(worker.name, seconds, lambda: worker.signal(signal.SIGCONT, pid), str(pid))


def wrong_clock(stage: Stage, dice: random.Random) -> Struck | None:
    """Killed, and started again with a clock that is hours off."""
    process = _pick(stage, dice, _ready(list(stage.programs)))
    if process is None:
        return None
    offset = dice.choice([-86_400, -3600, -30, 30, 3600, 86_400])
    process.kill()
    stage.set_clock(process, offset)
    return Struck(process.name, 0.1, lambda: stage.begin(process), f"{offset:+d} s")


# Servers.


def freeze_broker(stage: Stage, dice: random.Random) -> Struck | None:
    return _freeze(_pick(stage, dice, [stage.broker]), dice.choice([0.5, 2, 6]))


def freeze_database(stage: Stage, dice: random.Random) -> Struck | None:
    return _freeze(_pick(stage, dice, [stage.database]), dice.choice([0.5, 2, 6]))


def kill_broker(stage: Stage, dice: random.Random) -> Struck | None:
    return _kill(stage, dice, _pick(stage, dice, _ready([stage.broker])))


def kill_database(stage: Stage, dice: random.Random) -> Struck | None:
    return _kill(stage, dice, _pick(stage, dice, _ready([stage.database])))


def restart_database(stage: Stage, dice: random.Random) -> Struck | None:
    """PostgreSQL's immediate shutdown: it leaves as it is, and recovers at the next start."""
    database = _pick(stage, dice, _ready([stage.database]))
    if database is None:
        return None
    database.signal(signal.SIGQUIT)

    def heal() -> None:
        database.kill()
        stage.begin(database)

    return Struck(database.name, dice.uniform(0.5, 4), heal)


def flush_broker(stage: Stage, dice: random.Random) -> Struck | None:
    broker = _pick(stage, dice, _ready([stage.broker]))
    if broker is None:
        return None
    stage.flushes.append(time.time())
    stage.bench.broker.lose_everything()
    stage.flushes.append(time.time())
    return Struck(broker.name, 0, nothing)


# The network.


def cut_network(stage: Stage, dice: random.Random) -> Struck | None:
    """One site loses the broker, the database or both: nothing answers, or all is refused."""
    site = dice.choice("ab")
    chosen = [link for link in stage.links if link.site == site]
    chosen = dice.choice([chosen[:1], chosen[1:], chosen])
    names = {str(link) for link in chosen}
    if names & stage.broken:
        return None
    how = dice.choice(["freeze", "refuse"])
    for link in chosen:
        getattr(link.proxy, how)()

    def heal() -> None:
        for link in chosen:
            link.proxy.heal()

    return Struck("+".join(sorted(names)), dice.choice([0.5, 2, 5, 7]), heal, how)


def break_connections(stage: Stage, dice: random.Random) -> Struck | None:
    """One way loses its connections in the middle of what they carry, or is slow."""
    link = dice.choice(stage.links)
    if str(link) in stage.broken:
        return None
    how = dice.choice(["reset", "cut", "slow"])
    proxy: FaultProxy = link.proxy
    if how == "reset":
        proxy.reset()
    elif how == "cut":
        proxy.cut_after(dice.randint(1, 4000), dice.choice(["up", "down"]))
    else:
        proxy.delay(dice.choice([0.05, 0.3]))
    return Struck(str(link), dice.uniform(0.5, 3), proxy.heal, how)


def unknown_commits(stage: Stage, dice: random.Random) -> Struck | None:
    """A site's next commits are done, but nobody hears of them."""
    link = dice.choice([link for link in stage.links if link.server == "database"])
    if str(link) in stage.broken:
        return None
    link.proxy.cut_answer_to(b"COMMIT", dice.randint(1, 6))
    return Struck(str(link), 3, link.proxy.heal)


# Messages.


def duplicate_messages(stage: Stage, dice: random.Random) -> Struck | None:
    """Messages of tasks in every state arrive again, as first sent and as a wake."""
    tables = stage.observer.latest
    if tables is None or stage.broker.name in stage.broken:
        return None
    rows = [row for row in tables.rows.values() if row["body"] and row["status"] != "outbox"]
    app = stage.bench.app()
    copies = 0
    with suppress(*BROKER_ERRORS), app.connection_for_write(connect_timeout=2) as connection:
        producer = app.amqp.Producer(connection)
        for row in dice.sample(rows, min(10, len(rows))):
            producer.publish(**_copy_of(row, is_wake=dice.random() < 0.5))
            copies += 1
    return Struck("messages", 0, nothing, f"{copies} copies") if copies else None


def _copy_of(row: Row, *, is_wake: bool) -> dict[str, Any]:
    headers = json.loads(row["headers"])
    headers["durable"] = {"send_id": row["send_id"]}
    if is_wake:
        headers["durable"] |= {"version": row["message_version"], "wake": max(1, row["sends"])}
    names = ("content_type", "content_encoding", "exchange", "routing_key")
    return {"body": row["body"], "headers": headers, **{name: row[name] for name in names}}


#: Every kind with how often it comes, compared with the others.
FAULTS: dict[str, tuple[int, Fault]] = {
    "pool child killed": (6, kill_child),
    "worker killed": (4, kill_worker),
    "worker's main process killed": (3, kill_main_process),
    "scheduler killed": (4, kill_beat),
    "deploy (TERM, then KILL)": (4, deploy),
    "cold shutdown": (2, quit_worker),
    "worker frozen": (4, freeze_worker),
    "pool child frozen": (5, freeze_child),
    "worker's main process frozen": (3, freeze_main_process),
    "scheduler frozen": (4, freeze_beat),
    "process with a wrong clock": (3, wrong_clock),
    "broker frozen": (3, freeze_broker),
    "database frozen": (4, freeze_database),
    "broker killed": (2, kill_broker),
    "database killed": (2, kill_database),
    "database shut down at once": (2, restart_database),
    "broker lost all messages": (2, flush_broker),
    "network cut": (5, cut_network),
    "connections broken": (5, break_connections),
    "commits of unknown outcome": (4, unknown_commits),
    "messages doubled": (5, duplicate_messages),
}
