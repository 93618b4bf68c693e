"""Looks at what really happened: the shop's tables, and the AsyncResults that the caller kept."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from example_project.demo.scene import Act, Run, Scene, Story, Uptime
from example_project.shop import database

if TYPE_CHECKING:
    from celery.result import AsyncResult


@dataclass
class Followed:
    """A task that was sent, with the name of what it acts upon in the shop's log."""

    title: str
    subject: str
    result: AsyncResult[Any]
    dues: dict[str, float] = field(default_factory=dict)
    """Seen in the results while it slept: one due time for each timer."""


class Observer:
    def __init__(self, day_seconds: float) -> None:
        self._began_at = time.time()
        self._day_seconds = day_seconds
        self._followed: list[Followed] = []
        self._sent_at: float | None = None

    def follow(self, title: str, subject: str, result: AsyncResult[Any]) -> None:
        self._sent_at = self._sent_at or time.time()
        self._followed.append(Followed(title, subject, result))

    def look(self, uptimes: Iterable[Uptime]) -> Scene:
        return Scene(
            began_at=self._began_at,
            now=time.time(),
            day_seconds=self._day_seconds,
            uptimes=tuple(uptimes),
            stories=tuple(_story(followed) for followed in self._followed),
            digests=_acts("shop"),
            exports=_acts("export %"),
            sent_at=self._sent_at,
        )


def is_quiet() -> bool:
    """Whether no task's body runs, of those either that nobody follows."""
    with database() as db:
        return db.execute("SELECT 1 FROM runs WHERE ended_at IS NULL").fetchone() is None


def _story(followed: Followed) -> Story:
    meta = followed.result.backend.get_task_meta(followed.result.id)
    state, value = meta["status"], meta["result"]
    if state == "SLEEPING":
        followed.dues.setdefault(value["timer_id"], _seconds(value["due_at"]))
    return Story(
        title=followed.title,
        task_id=followed.result.id,
        state=state,
        result=value,
        dues=tuple(followed.dues.values()),
        runs=_runs(followed.result.id),
        acts=_acts(followed.subject),
    )


def _runs(task_id: str) -> tuple[Run, ...]:
    query = "SELECT pid, started_at, ended_at FROM runs WHERE task_id = ? ORDER BY id"
    with database() as db:
        return tuple(Run(*row) for row in db.execute(query, (task_id,)))


def _acts(subject: str) -> tuple[Act, ...]:
    query = "SELECT done_at, subject, action FROM activity WHERE subject LIKE ? ORDER BY id"
    with database() as db:
        return tuple(Act(*row) for row in db.execute(query, (subject,)))


def _seconds(instant: str | datetime) -> float:
    if isinstance(instant, str):
        # Python 3.10 reads no "Z".
        instant = datetime.fromisoformat(instant.replace("Z", "+00:00"))
    return instant.timestamp()
