"""The state machine: anything may happen in any order; then the faults stop, and every task ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from celery_durable.records import Delivery, Due, Outcome, OutcomeKind, Status
from celery_durable.store import Store
from tests.model.processes import (
    AFTER,
    AGAIN,
    BEFORE,
    NEVER,
    Arrival,
    Died,
    Run,
    Scheduler,
    Worker,
    moved,
)
from tests.model.programs import LONG_SLEEP, NAP, SLEEP, STEP, Program, first_delivery
from tests.model.world import TTL, World

Item = TypeVar("Item")

TASKS = ("one", "two", "three")
#: More moves than it takes to end three tasks of any program, with all that they have been through.
PATIENCE = 400

deaths = st.sampled_from([NEVER, NEVER, NEVER, NEVER, BEFORE, AFTER, AGAIN])
picks = st.integers(0, 7)
sides = st.integers(0, 1)
programs = st.builds(
    Program,
    calls=st.lists(st.sampled_from([STEP, STEP, NAP, SLEEP, SLEEP, LONG_SLEEP]), max_size=4).map(tuple),
    outcome=st.sampled_from([OutcomeKind.VALUE, OutcomeKind.VALUE, OutcomeKind.EXCEPTION]),
    retries=st.sampled_from([0, 0, 0, 1, 2]),
    restarts=st.booleans(),
    replaces=st.sampled_from([0, 0, 0, 0, 1]),
    followers=st.lists(st.sampled_from(["durable", "plain"]), max_size=2).map(tuple),
)
#: By which a sleep is moved; 0: it is woken.
moves = st.sampled_from([0.0, -100.0, 25.0, 7000.0])
#: Shorter and longer than a dispatch lease, a lease, a resend, any sleep.
skips = st.sampled_from([0.6, 11.0, 31.0, 61.0, 130.0, 6000.0])


def choose(items: Sequence[Item], pick: int) -> Item:
    return items[pick % len(items)]


def is_known(row: Any, delivery: Delivery) -> bool:
    """Whether the row will bring the task back without this message."""
    return row is not None and row.body is not None and delivery.nesting <= row.nesting


class Machine(RuleBasedStateMachine):
    """Two workers, two schedulers, one client, one broker that doubles and loses, one database."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.store)
        self.workers = [Worker(self.world, "w1"), Worker(self.world, "w2")]
        self.schedulers = [Scheduler(self.world, "s1"), Scheduler(self.world, "s2")]

    # -- clients ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.tasks) < len(TASKS))
    @rule(
        program=programs,
        how=st.sampled_from(["now", "now", "now", "countdown", "eta", "expires", "cancelled before"]),
    )
    def publish(self, program: Program, how: str) -> None:
        """Send a task."""
        world = self.world
        task_id = TASKS[world.number("task") - 1]
        delivery = first_delivery(task_id, f"send-{task_id}")
        world.register(task_id, program)
        if how == "cancelled before":
            assert world.store.verdicts.cancel([task_id])
            world.tasks[task_id].outcome = Outcome(OutcomeKind.CANCELLED)
        if how == "countdown":
            assert world.store.claims.schedule(delivery, Due(seconds=20)) is None
            return
        if how == "eta":
            delivery = replace(delivery, eta=world.now() + timedelta(seconds=20))
        if how == "expires":
            delivery = replace(delivery, expires=world.now() + timedelta(seconds=100))
        world.broker.append(delivery)

    @precondition(lambda self: self.world.statuses)
    @rule(pick=picks, what=st.sampled_from(["move", "move", "cancel", "prune", "release"]), seconds=moves)
    def operate(self, pick: int, what: str, seconds: float) -> None:
        """An operator moves what waits, cancels, releases; what has ended is emptied."""
        if what == "prune":
            self.world.store.queries.prune(0.0, 0.0, 10)
            self.world.forget_pruned()
            return
        wanted = {"move": Status.PARKED, "cancel": Status.LIVE, "release": {Status.QUARANTINED}}[what]
        found = [id_ for id_ in self.world.with_status(*wanted) if not self.world.tasks[id_].is_pruned]
        operations = {"move": self._move_sleep, "cancel": self._cancel, "release": self._release}
        if found:
            operations[what](choose(found, pick), seconds)

    def _move_sleep(self, task_id: str, seconds: float) -> None:
        assert self.world.store.verdicts.move([task_id], Due(seconds=seconds), relative=bool(seconds))
        moved(self.world, task_id)

    def _cancel(self, task_id: str, _: float) -> None:
        world = self.world
        before = world.row(task_id)
        cancelled = world.store.verdicts.cancel([task_id])
        assert (task_id in cancelled) == (before.outcome is None)
        world.note_outcome(task_id)

    def _release(self, task_id: str, _: float) -> None:
        assert self.world.store.verdicts.release([task_id])
        self.world.tasks[task_id].outcome = None

    # -- the broker ------------------------------------------------------------------------------

    @precondition(lambda self: self.world.broker)
    @rule(pick=picks, side=sides, death=deaths)
    def deliver(self, pick: int, side: int, death: str) -> None:
        """A message comes to a worker, not necessarily the oldest, and is claimed at once."""
        worker = self._arrive(pick, side)
        self._move(worker, lambda: worker.claim(worker.arrivals[-1], death))

    @precondition(lambda self: self.world.broker)
    @rule(pick=picks, side=sides, adopt=st.booleans())
    def keep_waiting(self, pick: int, side: int, adopt: bool) -> None:
        """A message comes to a worker that has no slot for it; perhaps it becomes a row."""
        worker = self._arrive(pick, side)
        if adopt:
            worker.adopt(worker.arrivals[-1])

    def _arrive(self, pick: int, side: int) -> Worker:
        worker = self.workers[side]
        worker.arrivals.append(Arrival(self.world.broker.pop(pick % len(self.world.broker))))
        return worker

    @precondition(lambda self: self.world.broker)
    @rule(pick=picks)
    def duplicate(self, pick: int) -> None:
        self.world.broker.append(self.world.broker[pick % len(self.world.broker)])

    @precondition(lambda self: self._waiting())
    @rule(pick=picks)
    def redeliver(self, pick: int) -> None:
        """The broker loses patience with a worker, and gives its message to others as well."""
        waiting = [arrival for _, arrival in self._waiting() if not arrival.acknowledged]
        if waiting:
            self.world.broker.append(waiting[pick % len(waiting)].delivery)

    @precondition(lambda self: self.world.broker)
    @rule()
    def lose_everything(self) -> None:
        """The broker loses its messages; those that nobody has ever claimed are lost with it."""
        world = self.world
        rows = {delivery.task_id: world.row(delivery.task_id) for delivery in world.broker}
        world.broker = [d for d in world.broker if not is_known(rows[d.task_id], d)]

    # -- workers ---------------------------------------------------------------------------------

    def _waiting(self) -> list[tuple[Worker, Arrival]]:
        return [(worker, arrival) for worker in self.workers for arrival in worker.arrivals]

    def _runs(self) -> list[tuple[Worker, Run]]:
        return [(worker, run) for worker in self.workers for run in worker.runs]

    def _bodies(self) -> list[tuple[Worker, Run]]:
        return [(worker, run) for worker, run in self._runs() if run.outcome is None]

    def _senders(self) -> list[tuple[Worker, Run]]:
        return [(worker, run) for worker, run in self._runs() if run.unsent]

    def _move(self, worker: Worker, move: Callable[[], None]) -> None:
        try:
            move()
        except Died:
            worker.die()

    @precondition(lambda self: self._waiting())
    @rule(pick=picks, death=deaths)
    def claim(self, pick: int, death: str) -> None:
        worker, arrival = choose(self._waiting(), pick)
        self._move(worker, lambda: worker.claim(arrival, death))

    @precondition(lambda self: self._runs())
    @rule(pick=picks, death=deaths)
    def advance(self, pick: int, death: str) -> None:
        """The usual thing: a run goes on."""
        worker, run = choose(self._runs(), pick)
        self._move(worker, lambda: worker.advance(run, death))

    @precondition(lambda self: self._runs())
    @rule(pick=picks, moves=st.integers(2, 6))
    def advance_far(self, pick: int, moves: int) -> None:
        worker, run = choose(self._runs(), pick)
        for _ in range(moves):
            if run in worker.runs:
                worker.advance(run, NEVER)

    @precondition(lambda self: self._senders())
    @rule(pick=picks, death=st.sampled_from([NEVER, NEVER, AFTER]))
    def send_followers(self, pick: int, death: str) -> None:
        worker, run = choose(self._senders(), pick)
        self._move(worker, lambda: worker.send_followers(run, death))

    @precondition(lambda self: self._runs())
    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        worker, _ = choose(self._runs(), pick)
        worker.renew()

    @precondition(lambda self: self._runs())
    @rule(pick=picks, how=st.sampled_from(["hand back", "lose child", "drain", "die", "die"]))
    def leave(self, pick: int, how: str) -> None:
        """A run ends before its time: in order, or with its process, or with its worker."""
        worker, run = choose(self._runs(), pick)
        if how == "hand back":
            worker.hand_back(run)
        elif how == "lose child":
            worker.lose_child(run)
        else:
            if how == "drain":
                self.world.store.leases.mark_draining([run.key for run in worker.runs])
            worker.die()

    @precondition(lambda self: self._runs())
    @rule(pick=picks)
    def overtake(self, pick: int) -> None:
        """A worker freezes until its lease has run out, and another one takes the task."""
        slow, run = choose(self._runs(), pick)
        fast = self.workers[1 - self.workers.index(slow)]
        self.world.skip(TTL + 1)
        self.schedulers[0].dispatch()
        for delivery in [d for d in self.world.broker if d.task_id == run.key.task_id]:
            self.world.broker.remove(delivery)
            fast.arrivals.append(Arrival(delivery))
            fast.claim(fast.arrivals[-1], NEVER)

    @precondition(lambda self: self._bodies())
    @rule(pick=picks, death=deaths, diverges=st.booleans())
    def stop_body(self, pick: int, death: str, diverges: bool) -> None:
        """A hard time limit; or its code does not fit its journal."""
        worker, run = choose(self._bodies(), pick)
        stop = worker.set_aside if diverges and run.journal else worker.hit_limit
        self._move(worker, lambda: stop(run, death))

    # -- schedulers ------------------------------------------------------------------------------

    def _dispatchers(self) -> list[Scheduler]:
        return [scheduler for scheduler in self.schedulers if scheduler.batches]

    @precondition(lambda self: self.world.statuses)
    @rule(side=sides, limit=st.sampled_from([1, 10]), count=st.sampled_from([0, 1, 10]), note=st.booleans())
    def dispatch(self, side: int, limit: int, count: int, note: bool) -> None:
        """A pass, or the beginning of one."""
        scheduler = self.schedulers[side]
        scheduler.take(limit)
        if scheduler.batches and count:
            scheduler.send(count)
        if scheduler.batches and note:
            scheduler.note()

    @precondition(lambda self: self._dispatchers())
    @rule(pick=picks, count=st.sampled_from([1, 10]))
    def send(self, pick: int, count: int) -> None:
        choose(self._dispatchers(), pick).send(count)

    @precondition(lambda self: self._dispatchers())
    @rule(pick=picks)
    def note(self, pick: int) -> None:
        choose(self._dispatchers(), pick).note()

    @precondition(lambda self: self._dispatchers())
    @rule(pick=picks)
    def kill_scheduler(self, pick: int) -> None:
        choose(self._dispatchers(), pick).die()

    @precondition(lambda self: self.world.statuses)
    @rule(seconds=skips)
    def skip_time(self, seconds: float) -> None:
        self.world.skip(seconds)

    # -- what is true at every moment, and in the end -----------------------------------------------

    @invariant()
    def nothing_is_amiss(self) -> None:
        self.world.check_all()

    def teardown(self) -> None:
        """The faults stop: with one worker and one scheduler everything comes to its end."""
        for worker in self.workers:
            worker.die()
        for scheduler in self.schedulers:
            scheduler.die()
        self._settle()
        self.world.check_ends()

    def _settle(self) -> None:
        world, worker = self.world, self.workers[0]
        for _ in range(PATIENCE):
            if worker.runs:
                run = worker.runs[0]
                if run.unsent:
                    worker.send_followers(run, NEVER)
                worker.advance(run, NEVER)
            elif world.broker:
                worker.arrivals.append(Arrival(world.broker.pop(0)))
                worker.claim(worker.arrivals[0], NEVER)
            elif not self._send_next():
                return
        raise AssertionError(f"{world.count_waiting()} rows still wait")

    def _send_next(self) -> bool:
        """Go to the time of the next row, and send what is due. False: nothing waits."""
        world = self.world
        world.check_all()
        world.release_all()
        outlook = world.store.due.poll()
        if outlook.due_in is None:
            return False
        world.skip(max(outlook.due_in, 0.0) + 0.01)
        self.schedulers[0].dispatch()
        return True
