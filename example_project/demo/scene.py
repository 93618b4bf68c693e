"""What the demo has seen so far, as plain records. Instants are seconds since 1970."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Uptime:
    """One life of a process group: from its start to its kill."""

    name: str
    started_at: float
    ready_at: float | None = None
    killed_at: float | None = None

    def serves_at(self, instant: float) -> bool:
        ready = self.ready_at is not None and self.ready_at <= instant
        return ready and (self.killed_at is None or instant < self.killed_at)


@dataclass(frozen=True)
class Run:
    """One run of a task's body, as Celery's signals told it."""

    pid: int
    started_at: float
    ended_at: float | None = None


@dataclass(frozen=True)
class Act:
    """Something that a step did to the shop."""

    done_at: float
    subject: str
    action: str


@dataclass(frozen=True)
class Story:
    """One durable task that the demo follows. `dues`: when its sleeps end, in their order."""

    title: str
    task_id: str
    state: str = "PENDING"
    result: object = None
    dues: tuple[float, ...] = ()
    runs: tuple[Run, ...] = ()
    acts: tuple[Act, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.state in {"SUCCESS", "FAILURE", "REVOKED", "QUARANTINED"}

    @property
    def action_counts(self) -> Counter[str]:
        return Counter(act.action for act in self.acts)

    @property
    def counts_text(self) -> str:
        return ", ".join(f"{count} × {action}" for action, count in self.action_counts.items())


@dataclass(frozen=True)
class Scene:
    began_at: float
    now: float
    day_seconds: float
    uptimes: tuple[Uptime, ...] = ()
    stories: tuple[Story, ...] = ()
    digests: tuple[Act, ...] = ()
    """What the ordinary entry of the beat schedule did."""
    exports: tuple[Act, ...] = ()
    """What the durable entry of the beat schedule did."""
    sent_at: float | None = None
    """When the tasks were sent: day 0."""

    def day(self, instant: float) -> float:
        return (instant - (self.sent_at or self.began_at)) / self.day_seconds


@dataclass(frozen=True)
class Wake:
    """The end of a sleep. `possible_at`: when it was due, and worker and beat were up."""

    due_at: float
    possible_at: float
    woke_at: float

    @property
    def late_seconds(self) -> float:
        """Since it could wake; negative where it woke before its time."""
        return self.woke_at - self.possible_at

    @property
    def is_early(self) -> bool:
        return self.woke_at < self.due_at

    @property
    def is_overslept(self) -> bool:
        """Whether nobody was there to wake it when it was due."""
        return self.possible_at > self.due_at

    @property
    def text(self) -> str:
        if self.is_early:
            return f"{(self.due_at - self.woke_at) * 1000:.0f} ms too early"
        event = "the restart" if self.is_overslept else "it was due"
        return f"{self.late_seconds * 1000:.0f} ms after {event}"

    @property
    def short_text(self) -> str:
        """For the table: a star where it counts from the restart."""
        return f"{self.late_seconds * 1000:.0f} ms{'*' if self.is_overslept else ''}"


def wakes(story: Story, uptimes: Iterable[Uptime]) -> list[Wake]:
    """The n-th sleep ends with the run after the n-th."""
    known = tuple(uptimes)
    return [
        _wake(due_at, run.started_at, known) for due_at, run in zip(story.dues, story.runs[1:], strict=False)
    ]


def _wake(due_at: float, woke_at: float, uptimes: tuple[Uptime, ...]) -> Wake:
    # What wakes a task is ready, also when its log has not been seen to say so.
    possible_at = min(first_service(due_at, uptimes), max(due_at, woke_at))
    return Wake(due_at, possible_at, woke_at)


def first_service(instant: float, uptimes: tuple[Uptime, ...]) -> float:
    """The first moment from `instant` on at which each kind of process was up; infinity for never."""
    return max((_first_up(instant, name, uptimes) for name in _names(uptimes)), default=instant)


def _names(uptimes: tuple[Uptime, ...]) -> set[str]:
    return {uptime.name for uptime in uptimes}


def _first_up(instant: float, name: str, uptimes: tuple[Uptime, ...]) -> float:
    lives = [uptime for uptime in uptimes if uptime.name == name]
    if any(life.serves_at(instant) for life in lives):
        return instant
    starts = [life.ready_at for life in lives if life.ready_at is not None]
    return min((start for start in starts if start >= instant), default=math.inf)
