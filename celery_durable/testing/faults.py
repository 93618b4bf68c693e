"""What a test has ordered to happen at a crash point of a run: its process dies, or its lease is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from celery_durable.points import Point
from celery_durable.run import TaskRun, claimed_run


class Killed(BaseException):
    """The process that was here is dead. Raised again wherever it tries to write something."""


@dataclass
class Order:
    """What happens when a point is reached for the ``countdown``-th time from now."""

    point: str
    countdown: int
    action: Callable[[], None]


class Faults:
    """Called at each point. Nothing happens outside of ``process()``: what the test itself does is spared."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._depth = 0
        self._is_dead = False

    @property
    def is_busy(self) -> bool:
        """Whether a worker or a scheduler is at work."""
        return self._depth > 0

    @contextmanager
    def process(self) -> Iterator[None]:
        """The stretch in which a worker or a scheduler is at work. Swallows its death."""
        self._depth += 1
        try:
            yield
        except Killed:
            pass
        finally:
            self._depth -= 1
            self._is_dead = False

    def __call__(self, point: str) -> None:
        if not self._depth:
            return
        here = [order for order in self._orders if order.point == point]
        for order in here:
            order.countdown -= 1
        for order in [order for order in here if not order.countdown]:
            self._orders.remove(order)
            order.action()

    def may_write(self) -> None:
        """Called before a write to a store or to the broker."""
        if self._is_dead:
            raise Killed

    def why_unreached(self) -> str | None:
        """Says at which points something was to happen, and has not; None: there are none. Says it once."""
        points = ", ".join(order.point for order in self._orders)
        self.forget_orders()
        return f"no run has come to the crash point {points}" if points else None

    def forget_orders(self) -> None:
        """Let nothing more happen."""
        self._orders.clear()

    # -- orders ----------------------------------------------------------------------------------

    def crash_at(self, point: str, nth: int) -> None:
        self._order(point, nth, self._die)

    def lose_lease(self, at: str | None) -> None:
        run = claimed_run()
        if at is None and run is not None:
            lose_lease_of(run)
        else:
            self._order(at or Point.BODY_ENTERED, 1, _lose_lease)

    def _order(self, point: str, nth: int, action: Callable[[], None]) -> None:
        if point not in Point.names():
            raise ValueError(_unknown(point))
        if nth < 1:
            raise ValueError(f"nth counts from 1, not {nth}")
        self._orders.append(Order(point, nth, action))

    def _die(self) -> None:
        self._is_dead = True
        raise Killed


def _unknown(point: str) -> str:
    near = get_close_matches(point, sorted(Point.names()))
    meant = f"did you mean {' or '.join(near)}?" if near else "see celery_durable.points.Point"
    return f"there is no crash point {point!r}: {meant}"


def _lose_lease() -> None:
    run = claimed_run()
    if run is None:
        raise AssertionError("no task is running at this point, so there is no lease to lose")
    lose_lease_of(run)


def lose_lease_of(run: TaskRun) -> None:
    """Take the task from its run: it is due again, for another one."""
    run.runtime.store.leases.hand_back(run.claim.key)
    run.lease.mark_lost("another worker or an operator has taken the task")


#: The ways of a statement into a database.
WAYS_IN = ("statements", "execute", "transaction")


def guard(database: Any, may_write: Callable[[], None]) -> None:
    """Let no statement through from a process that is dead."""
    for name in WAYS_IN:
        setattr(database, name, _guarded(getattr(database, name), may_write))


def _guarded(enter: Callable[..., Any], may_write: Callable[[], None]) -> Callable[..., Any]:
    def enter_alive(*arguments: Any, **options: Any) -> Any:
        may_write()
        return enter(*arguments, **options)

    return enter_alive
