"""A stage for many scenes: a struck process for each, and one worker that takes over from all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from celery_durable.points import CRASH_VARIABLE, FREEZE_VARIABLE, MARKS_VARIABLE
from tests.faults.scenes import Scene, Sent, Times
from tests.nodes import Bench, WaitTimeout, Worker
from tests.nodes.process import LocalProcess
from tests.nodes.workers import ROOT


@dataclass
class Played:
    """A scene on the stage."""

    scene: Scene
    queue: str
    marks: Path
    #: A client starts later.
    process: LocalProcess = None  # type: ignore[assignment]
    sent: Sent = None  # type: ignore[assignment]

    @property
    def mark(self) -> Path:
        return self.marks / self.scene.mark

    def is_struck(self, *, frozen: bool) -> bool:
        """Whether a process has come to the point, and what was to happen to it has happened."""
        if not self.mark.exists():
            return False
        return is_frozen(self.process.pid) if frozen else not self.process.running


class Stage:
    """Plays scenes on a bench.

    What is sent to a scene's queue is first received by its own worker alone; the second worker, which
    listens to all queues, starts when every first one is struck.
    """

    def __init__(self, bench: Bench, scenes: Sequence[Scene], *, frozen: bool) -> None:
        self.bench = bench
        self.frozen = frozen
        self.played = [self._start(scene, f"scene{number}") for number, scene in enumerate(scenes)]
        self.second: Worker | None = None

    def _start(self, scene: Scene, queue: str) -> Played:
        marks = self.bench.folder / f"{queue}-marks"
        marks.mkdir()
        played = Played(scene, queue, marks)
        if scene.client is None:
            played.process = self.bench.worker(
                name=queue, queues=queue, pool=scene.pool, concurrency=1, env=self._env(played), wait=False
            )
        return played

    def _env(self, played: Played) -> dict[str, str]:
        return {**strike(played.scene.point, played.marks, frozen=self.frozen), **played.scene.env}

    def _run_client(self, played: Played) -> None:
        assert played.scene.client is not None
        arguments, env = played.scene.client(played.queue), self._env(played)
        if arguments[0] == "-c":
            command = [sys.executable, *arguments]
            env = {"PYTHONPATH": str(ROOT), **self.bench.env, **env}
            client = LocalProcess(played.queue, command, folder=self.bench.folder, env=env)
            self.bench.processes.append(client)
            played.process = client.start()
        else:
            played.process = self.bench.process(*arguments, name=played.queue, env=env)

    def play(self) -> None:
        """Play all scenes up to the point where each process is struck."""
        for played in self.played:
            if played.scene.client is None:
                played.process.wait_until_ready()
        for played in self.played:
            played.sent = played.scene.act.send(self.bench, played.queue)
            if played.process is None:
                self._run_client(played)
        for played in self.played:
            played.scene.act.lead(self.bench, played.process, played.sent)
        for played in self.played:
            self.bench.wait_for(
                lambda played=played: played.is_struck(frozen=self.frozen),  # type: ignore[misc]
                30,
                f"{played.scene.name} is struck",
            )
            if not self.frozen:
                # Where a main process was struck, its children go with it.
                played.process.kill()
            played.scene.act.follow(self.bench, played.process, played.sent)

    def take_over(self) -> None:
        """Have another worker end what was begun."""
        queues = ",".join(["celery", *(played.queue for played in self.played)])
        self.second = self.bench.worker(name="second", queues=queues)
        for played in self.played:
            played.scene.act.finish(self.bench, self.second, played.sent)
        self.settle()

    def settle(self) -> None:
        """Wait until no row waits for anything, and the broker holds nothing."""
        store = self.bench.app().durable.store
        try:
            self.bench.wait_for(lambda: store.due.poll().wake_at is None, 45, "no row waits")
        except WaitTimeout as timeout:
            waiting = [row for row in self.bench.app().durable.list() if row.wake_at is not None]
            raise AssertionError(f"{timeout}\nstill waiting: {waiting}") from None
        self.bench.wait_for(self.bench.queue_is_empty, 20, "the broker holds nothing")
        for played in self.played:
            self.bench.wait_for(played.sent.result.ready, message=f"{played.scene.name} has its result")

    def thaw(self) -> None:
        """Let the frozen workers go on, and see that each of them is of use."""
        assert self.second is not None
        for played in self.played:
            answer = self.bench.app().control.cancel_consumer(
                played.queue, destination=[self.second.hostname], reply=True, timeout=10
            )
            assert answer, f"{self.second.name} leaves {played.queue} alone"
            played.process.thaw()
        pings = [self.bench.project.say.apply_async((p.queue,), queue=p.queue) for p in self.played]
        for ping, played in zip(pings, self.played, strict=True):
            message = f"the worker of {played.scene.name} goes on"
            self.bench.wait_for(ping.ready, 20, message)
            assert ping.result == played.queue
        self.settle()

    def complaints(self) -> list[str]:
        """Whatever is not as it must be."""
        return [
            f"{played.scene.name}: {complaint}"
            for played in self.played
            for complaint in self._complaints(played)
        ]

    def _complaints(self, played: Played) -> Iterator[str]:
        act, sent = played.scene.act, played.sent
        value = sent.result.result
        if isinstance(value, Exception):
            value = type(value).__name__
        row = self.bench.app().durable.store.queries.get(sent.task_id)
        yield from _differ("state", act.state, sent.result.state)
        yield from _differ("result", act.value, value)
        yield from _differ("status", act.status, row.status)
        yield from _differ("owner and wake_at", (None, None), (row.owner, row.wake_at))
        yield from _differ("journal", act.journal, tuple(entry.kind for entry in row.journal))
        yield from _differ("outcome", True, row.outcome is not None)
        yield from self._early_wakes(sent, row)
        for step, times in played.scene.expected(frozen=self.frozen).items():
            count = self.bench.witness.count(sent.task_id, step)
            if not _fits(count, times):
                seen = self.bench.witness.steps(sent.task_id)
                yield f"{step!r} was seen {count} times instead of {times}: {seen}"

    def _early_wakes(self, sent: Sent, row: Any) -> Iterator[str]:
        """A step that follows a sleep comes after its due time."""
        for sleep, after in zip(row.journal, row.journal[1:], strict=False):
            if sleep.due_at is not None and after.recorded_at < sleep.due_at:
                yield f"went on at {after.recorded_at}, before {sleep.due_at}"


def strike(points: str, marks: Path, *, frozen: bool = False) -> dict[str, str]:
    """The environment of a process that is to be struck at these points, each of them once."""
    return {FREEZE_VARIABLE if frozen else CRASH_VARIABLE: points, MARKS_VARIABLE: str(marks)}


def is_frozen(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def _fits(count: int, times: Times) -> bool:
    least, most = (times, times) if isinstance(times, int) else times
    return least <= count <= most


def _differ(what: str, expected: Any, found: Any) -> Iterator[str]:
    if expected != found:
        yield f"{what} is {found!r} instead of {expected!r}"


def seen(bench: Bench, task_id: str) -> Mapping[str, int]:
    """How often each thing was seen of a task."""
    steps = bench.witness.steps(task_id)
    return {step: steps.count(step) for step in steps}
