"""What operators do with executions, in Python: look, cancel, wake, move, release, count, prune.

Each of the verbs that change something takes one task id, several, or a filter by keywords:

    durable.cancel("8d1f…")
    durable.postpone(task="proj.tasks.onboard", status="sleeping", by=timedelta(hours=1))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict, overload

from celery_durable.control import REASON, store_revoked
from celery_durable.durations import Number, seconds_of
from celery_durable.errors import ExecutionNotFound, OperationRefused
from celery_durable.points import Point, reached
from celery_durable.records import Due, Execution, Status
from celery_durable.store.filters import Filter
from celery_durable.store.statistics import Stats
from celery_durable.texts import flaw_of_id, flaw_of_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_durable.settings import Settings
    from celery_durable.store import Store

#: Words for several states at once.
STATUS_GROUPS = {
    "live": Status.LIVE,
    "parked": Status.PARKED,
    "ended": Status.ENDED,
}
STATUSES = (*sorted(Status.LIVE | Status.ENDED), *STATUS_GROUPS)
#: Rows that one transaction of a prune touches.
PRUNE_BATCH = 1000


class FilterOptions(TypedDict, total=False):
    """Which executions: every given condition must hold. Naive times are read in the app's timezone.

    ``status`` is one of the states, several, or ``"live"``, ``"parked"``, ``"ended"``; ``task`` a task's
    name; ``due_before`` and ``due_after`` find what waits; ``owner`` is the beginning of an owner's name (a
    node name will do); ``text`` any part of the task's id or name.
    """

    status: str | Iterable[str]
    task: str
    due_before: datetime
    due_after: datetime
    owner: str
    text: str


@dataclass(frozen=True, slots=True)
class Changed:
    """What an operation on many has changed, and which of the ids it was given it had to refuse."""

    task_ids: tuple[str, ...]
    refused: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.task_ids)


class Operations:
    """The part of ``Durable`` that people and tools use."""

    if TYPE_CHECKING:
        app: Any

        @property
        def store(self) -> Store: ...
        @property
        def settings(self) -> Settings: ...

        def instant_of(self, when: datetime) -> datetime: ...

    # -- looking ---------------------------------------------------------------------------------

    def get(self, task_id: str) -> Execution:
        """One execution, with its message and its journal.

        Raises:
            ExecutionNotFound: there is none.
        """
        found = self.store.queries.get(task_id) if flaw_of_id(task_id) is None else None
        if found is None:
            raise ExecutionNotFound(task_id)
        return found

    def list(
        self, *, limit: int | None = None, offset: int = 0, **chosen: Unpack[FilterOptions]
    ) -> Iterator[Execution]:
        """Executions, those due first at the head, without message, outcome and journal.

        They are read as they are iterated over, a page at a time: any number can be gone through.
        """
        if offset < 0 or (limit is not None and limit < 0):
            raise ValueError(f"limit and offset must not be negative: {limit}, {offset}")
        return self.store.queries.find(self.filter(**chosen), limit=limit, offset=offset)

    def count(self, **chosen: Unpack[FilterOptions]) -> int:
        """How many executions a filter finds."""
        return self.store.queries.count(self.filter(**chosen))

    def stats(self) -> Stats:
        """The state of the namespace in numbers. A lease counts as near its end in its last third."""
        return self.store.statistics.read(self.settings.lease_ttl / 3, self.settings.resend_delay)

    def filter(self, **chosen: Unpack[FilterOptions]) -> Filter:
        """The filter that some keywords stand for.

        Raises ValueError for a status that there is not, for what is empty and for a text that no row can
        hold, TypeError for an unknown keyword.
        """
        unknown = chosen.keys() - FilterOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"unknown filter: {', '.join(sorted(unknown))}")
        for name in ("task", "owner", "text"):
            value: Any = chosen.get(name)
            flaw = None if value is None else flaw_of_condition(value)
            if flaw is not None:
                raise ValueError(f"{name} {flaw}")
        before, after = chosen.get("due_before"), chosen.get("due_after")
        return Filter(
            statuses=_statuses(chosen.get("status")),
            task_name=chosen.get("task"),
            due_before=None if before is None else self.instant_of(before),
            due_after=None if after is None else self.instant_of(after),
            owner=chosen.get("owner"),
            text=chosen.get("text"),
        )

    # -- changing --------------------------------------------------------------------------------
    # A str is an iterable of str as well: the overloads tell one task from several by their order.

    @overload
    def cancel(self, task_id: str, *, reason: str = ...) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    def cancel(self, task_id: Iterable[str], *, reason: str = ...) -> Changed: ...
    @overload
    def cancel(self, *, reason: str = ..., **chosen: Unpack[FilterOptions]) -> Changed: ...

    def cancel(
        self,
        task_id: str | Iterable[str] | None = None,
        *,
        reason: str = REASON,
        **chosen: Unpack[FilterOptions],
    ) -> bool | Changed:
        """Cancel for good: ``REVOKED`` in the result store, no followers, a chord fails.

        What runs is stopped at its next durable call. An id that no task has yet is remembered, and its
        first message is not run. Of one task: whether it was cancelled; False: it has come to its end.
        """

        def verdict(task_ids: Sequence[str], only: Filter | None) -> Collection[str]:
            cancelled = self.store.verdicts.cancel(task_ids, reason, only=only)
            reached(Point.VERDICT_WRITTEN)
            store_revoked(self.app, cancelled.values())
            reached(Point.VERDICT_STORED)
            return cancelled

        changed = self._on_many(verdict, task_id, chosen)
        return bool(len(changed)) if isinstance(task_id, str) else changed

    @overload
    def wake(self, task_id: str) -> datetime: ...  # type: ignore[overload-overlap]
    @overload
    def wake(self, task_id: Iterable[str]) -> Changed: ...
    @overload
    def wake(self, **chosen: Unpack[FilterOptions]) -> Changed: ...

    def wake(
        self, task_id: str | Iterable[str] | None = None, **chosen: Unpack[FilterOptions]
    ) -> datetime | Changed:
        """Make what sleeps, is scheduled or waits for its retry due now.

        Raises, of one task:
            ExecutionNotFound: there is none.
            OperationRefused: it is running, or has come to its end.
        """
        return self._move("wake", Due(), False, task_id, chosen)

    @overload
    def postpone(  # type: ignore[overload-overlap]
        self, task_id: str, *, until: datetime | None = ..., by: timedelta | Number | None = ...
    ) -> datetime: ...
    @overload
    def postpone(
        self, task_id: Iterable[str], *, until: datetime | None = ..., by: timedelta | Number | None = ...
    ) -> Changed: ...
    @overload
    def postpone(
        self,
        *,
        until: datetime | None = ...,
        by: timedelta | Number | None = ...,
        **chosen: Unpack[FilterOptions],
    ) -> Changed: ...

    def postpone(
        self,
        task_id: str | Iterable[str] | None = None,
        *,
        until: datetime | None = None,
        by: timedelta | Number | None = None,
        **chosen: Unpack[FilterOptions],
    ) -> datetime | Changed:
        """Move what sleeps, is scheduled or waits for its retry: to a time, or by a span from its own.

        A span (a timedelta, or seconds) may be negative. Of one task: its new time.

        Raises, of one task:
            ExecutionNotFound: there is none.
            OperationRefused: it is running, or has come to its end.
        """
        if (until is None) == (by is None):
            raise TypeError("postpone() takes either until or by")
        if until is not None:
            return self._move("postpone", Due(at=self.instant_of(until)), False, task_id, chosen)
        assert by is not None
        return self._move("postpone", Due(seconds=_signed_seconds(by)), True, task_id, chosen)

    @overload
    def release(self, task_id: str) -> None: ...  # type: ignore[overload-overlap]
    @overload
    def release(self, task_id: Iterable[str]) -> Changed: ...
    @overload
    def release(self, **chosen: Unpack[FilterOptions]) -> Changed: ...

    def release(
        self, task_id: str | Iterable[str] | None = None, **chosen: Unpack[FilterOptions]
    ) -> Changed | None:
        """Let what is quarantined run again, at once.

        Raises, of one task:
            ExecutionNotFound: there is none.
            OperationRefused: it is not quarantined.
        """
        changed = self._on_many(
            lambda ids, only: self.store.verdicts.release(ids, only=only), task_id, chosen
        )
        if not isinstance(task_id, str):
            return changed
        if not changed:
            raise self._refusal("release", task_id)
        return None

    def prune(self, *, older_than: timedelta | Number | None = None) -> int:
        """Throw away what has ended longer ago than ``durable_retention`` and ``durable_retention_failed``.

        ``older_than`` (a timedelta, or seconds) stands for both. Returns how many rows were emptied or
        deleted: an emptied one keeps its id for a while, so that a late copy of its message is known.
        """
        retention, retention_failed = self.retentions(older_than)
        total = 0
        while count := self.store.queries.prune(retention, retention_failed, PRUNE_BATCH):
            total += count
        return total

    def retentions(self, older_than: timedelta | Number | None = None) -> tuple[float, float]:
        """For how many seconds ended rows are kept: those that succeeded, and the others."""
        if older_than is None:
            return self.settings.retention, self.settings.retention_failed
        seconds = seconds_of(older_than, {})
        return seconds, seconds

    # -- one, several, or all that a filter finds ------------------------------------------------

    def _move(
        self,
        operation: str,
        due: Due,
        relative: bool,
        task_id: str | Iterable[str] | None,
        chosen: FilterOptions,
    ) -> datetime | Changed:
        moved: dict[str, datetime] = {}

        def verdict(task_ids: Sequence[str], only: Filter | None) -> Collection[str]:
            times = self.store.verdicts.move(task_ids, due, relative=relative, only=only)
            if isinstance(task_id, str):
                moved.update(times)
            return times

        changed = self._on_many(verdict, task_id, chosen)
        if not isinstance(task_id, str):
            return changed
        if task_id not in moved:
            raise self._refusal(operation, task_id)
        return moved[task_id]

    def _on_many(
        self,
        verdict: Callable[[Sequence[str], Filter | None], Collection[str]],
        task_id: str | Iterable[str] | None,
        chosen: FilterOptions,
    ) -> Changed:
        if task_id is None:
            only = self.filter(**chosen)
            if only == Filter():
                # Also where a variable that holds None was given: it must not mean everything.
                raise TypeError('name a task id, or a filter such as status="sleeping"')
            done: list[str] = []
            for page in self.store.queries.id_pages(only):
                done.extend(verdict(page, only))
            return Changed(tuple(done))
        if chosen:
            raise TypeError("give either task ids or a filter, not both")
        task_ids = (task_id,) if isinstance(task_id, str) else tuple(dict.fromkeys(task_id))
        possible = [i for i in task_ids if flaw_of_id(i) is None]
        if isinstance(task_id, str) and not possible:
            raise ExecutionNotFound(task_id)
        accepted = verdict(possible, None)
        return Changed(
            tuple(i for i in task_ids if i in accepted), tuple(i for i in task_ids if i not in accepted)
        )

    def _refusal(self, operation: str, task_id: str) -> ExecutionNotFound | OperationRefused:
        found = self.store.queries.get(task_id)
        if found is None:
            return ExecutionNotFound(task_id)
        return OperationRefused(operation, task_id, _why_not(found))


def flaw_of_condition(text: str) -> str | None:
    """What is wrong with a text that is to choose executions. An empty one would choose all of them."""
    return flaw_of_text(text) if text else "must not be empty"


def _statuses(status: str | Iterable[str] | None) -> tuple[str, ...]:
    if status is None:
        return ()
    found: set[str] = set()
    for name in (status,) if isinstance(status, str) else status:
        if name not in STATUSES:
            raise ValueError(f"there is no status {name!r}: use one of {', '.join(STATUSES)}")
        found |= STATUS_GROUPS.get(name, {name})
    if not found:
        raise ValueError("status must not be empty")
    return tuple(sorted(found))


def _signed_seconds(span: timedelta | Number) -> float:
    """Seconds of a span that may be negative. Raises as ``seconds_of``."""
    number = span.total_seconds() if isinstance(span, timedelta) else span
    seconds = seconds_of(number, {})
    return -seconds_of(-number, {}) if number < 0 else seconds


def _why_not(execution: Execution) -> str:
    """Why an execution cannot be woken, moved or released."""
    status = execution.status
    if status == Status.RUNNING:
        return f"it is running ({execution.owner})" if execution.owner else "it is about to run again"
    if status == Status.ENDING:
        return "it has come to its end, which is being told"
    if status == Status.QUARANTINED:
        return "it is quarantined, and has to be released first"
    if status in Status.PARKED:
        return f"it is {status}"
    return f"it has ended: {status}"
