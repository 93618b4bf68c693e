"""Workers and schedulers of the model: what they know, and what they do with the store at each move.

Every move that writes may be cut by a death: ``before`` its commit, or ``after`` it, when the answer is lost.
A process that is not moved for a while is a frozen one: it goes on believing in what it knew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from celery_durable.records import (
    Claim,
    Delivery,
    Due,
    Ended,
    Follower,
    JournalEntry,
    Kind,
    LeaseKey,
    Outcome,
    OutcomeKind,
    Outgoing,
    Status,
)
from tests.model.programs import STATUS_OF, Call, Program, first_delivery, message_for, wake_of
from tests.model.world import MAX_CRASHES, RESEND, TTL, World

Answer = TypeVar("Answer")

#: Where a move is cut by the death of its process. AGAIN: the answer is lost, and the process asks again.
BEFORE, AFTER, NEVER, AGAIN = "before", "after", "never", "again"


class Died(Exception):
    """The process that made this move is gone."""


@dataclass
class Arrival:
    """A message in a worker. Once acknowledged the broker does not have it any more."""

    delivery: Delivery
    acknowledged: bool = False


@dataclass
class Run:
    """One claimed run, as far as its process knows."""

    key: LeaseKey
    delivery: Delivery
    program: Program
    outcome: Outcome | None
    journal: dict[int, JournalEntry]
    position: int = 0
    #: Followers that were written and are to be sent by this process.
    unsent: list[Outgoing] = field(default_factory=list)
    is_told: bool = False

    @property
    def next_call(self) -> Call | None:
        calls = self.program.calls
        return calls[self.position] if self.position < len(calls) else None


class Worker:
    """A worker process: messages that arrived, runs that it believes in."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.arrivals: list[Arrival] = []
        self.runs: list[Run] = []
        self.owner = self._new_owner()

    def _new_owner(self) -> str:
        return f"{self.name}:{self.world.number(self.name)}"

    def die(self) -> None:
        """kill -9: the broker delivers again what was not acknowledged."""
        self.world.broker += [a.delivery for a in self.arrivals if not a.acknowledged]
        self.arrivals, self.runs = [], []
        self.owner = self._new_owner()
        self.world.faults["worker died"] += 1

    def fenced(
        self,
        key: LeaseKey,
        statement: Callable[[], Answer],
        is_accepted: Callable[[Answer], bool],
        *,
        before_outcome: bool,
        death: str,
    ) -> Answer:
        """Run a fenced statement, and hold its answer against who owns the row.

        ``before_outcome``: it is for those only who have no outcome yet.
        """
        if death == BEFORE:
            raise Died
        world = self.world
        before = world.state(key.task_id)
        answer = statement()
        is_ours = world.holds(before[0], key) and not (before_outcome and before[0].outcome is not None)
        assert is_accepted(answer) == is_ours, f"{key} was answered {answer!r} on {before[0]}"
        if not is_ours:
            assert world.state(key.task_id) == before, f"{key} has changed {before[0]}"
        return answer

    # -- messages --------------------------------------------------------------------------------

    def claim(self, arrival: Arrival, death: str) -> None:
        """Claim a message, in whatever order they came."""
        if death == BEFORE:
            raise Died
        world, delivery = self.world, arrival.delivery
        before = world.row(delivery.task_id)
        claim = world.store.claims.claim(delivery, self.owner, TTL, MAX_CRASHES)
        if isinstance(claim, Claim):
            world.check_claim(before, delivery, claim)
        if death == AFTER:
            raise Died
        self.arrivals.remove(arrival)
        if not isinstance(claim, Claim):
            return
        ledger = world.tasks[delivery.task_id]
        journal = {entry.position: entry for entry in claim.journal}
        self.runs.append(Run(claim.key, delivery, ledger.program, claim.outcome, journal))

    def adopt(self, arrival: Arrival) -> None:
        """Make a row of a message that waits here."""
        world, task_id = self.world, arrival.delivery.task_id
        before = world.row(task_id)
        world.store.claims.keep(arrival.delivery, RESEND)
        if before is not None and world.row(task_id).nesting > before.nesting:
            # The successor of a replaced task has taken the row over before it runs.
            world.tasks[task_id].start_anew()
            world.tasks[task_id].is_pruned = False
        arrival.acknowledged = True

    # -- the body --------------------------------------------------------------------------------

    def advance(self, run: Run, death: str) -> None:
        """The next durable call of a run, or its end."""
        call = run.next_call
        if run.outcome is not None:
            self.tell(run, death)
        elif call is None:
            self._leave_body(run, death)
        elif (recorded := run.journal.get(run.position + 1)) is not None:
            self._replay(run, call, recorded, death)
        elif call.kind == Kind.STEP:
            self._step(run, call, death)
        elif call.parks:
            self._park(run, [self._entry(run, call)], Due(seconds=call.seconds), death)
        else:
            self._nap(run, call, death)

    def _entry(self, run: Run, call: Call) -> JournalEntry:
        payload = f"{run.key.token}".encode() if call.kind == Kind.STEP else None
        return JournalEntry(run.position + 1, call.kind, call.name, payload=payload)

    def _replay(self, run: Run, call: Call, recorded: JournalEntry, death: str) -> None:
        assert (recorded.kind, recorded.name) == (call.kind, call.name)
        if recorded.kind == Kind.STEP or recorded.is_over:
            run.position += 1
        elif call.parks:
            self._park(run, [], Due(at=recorded.due_at), death)
        else:
            assert recorded.due_at is not None
            self.world.skip(max((recorded.due_at - self.world.now()).total_seconds(), 0.0))
            run.position += 1

    def _step(self, run: Run, call: Call, death: str) -> None:
        world, entry = self.world, self._entry(run, call)
        world.ran[run.key.task_id, entry.position] += 1
        if self.fenced(
            run.key,
            lambda: world.store.runs.record(run.key, [entry]),
            bool,
            before_outcome=True,
            death=death,
        ):
            world.accept(run.key, [entry])
            run.position += 1
            if death == AGAIN:
                assert world.store.runs.record(run.key, [entry])
        else:
            self.runs.remove(run)
        if death == AFTER:
            raise Died

    def _nap(self, run: Run, call: Call, death: str) -> None:
        world, entry = self.world, self._entry(run, call)
        due_at = self.fenced(
            run.key,
            lambda: world.store.runs.record_sleep(run.key, [entry], Due(seconds=call.seconds)),
            lambda answer: answer is not None,
            before_outcome=True,
            death=death,
        )
        if due_at is None:
            self.runs.remove(run)
            return
        world.accept(run.key, [entry], due_at)
        if death == AFTER:
            raise Died
        world.skip(call.seconds + 0.01)
        run.position += 1

    def _park(self, run: Run, entries: list[JournalEntry], due: Due, death: str) -> None:
        world = self.world
        due_at = self.fenced(
            run.key,
            lambda: world.store.runs.park(run.key, due, entries=entries),
            lambda answer: answer is not None,
            before_outcome=True,
            death=death,
        )
        if due_at is not None:
            world.accept(run.key, entries, due_at)
        self.runs.remove(run)
        if death == AFTER:
            raise Died

    # -- the end ---------------------------------------------------------------------------------

    def _leave_body(self, run: Run, death: str) -> None:
        program = run.program
        if run.delivery.nesting < program.replaces:
            self._replace(run, death)
        elif run.delivery.version < program.retries:
            self._retry(run, death)
        else:
            self._end(run, death)

    def _retry(self, run: Run, death: str) -> None:
        world, restart = self.world, run.program.restarts
        message = message_for(run.key.task_id, run.delivery.nesting)
        due_at = self.fenced(
            run.key,
            lambda: world.store.runs.park(
                run.key, Due(seconds=10), status=Status.RETRYING, message=message, restart=restart
            ),
            lambda answer: answer is not None,
            before_outcome=True,
            death=death,
        )
        if due_at is not None and restart:
            world.tasks[run.key.task_id].start_anew()
        self.runs.remove(run)
        if death == AFTER:
            raise Died

    def _replace(self, run: Run, death: str) -> None:
        """Celery sends the successor, then the row is ended."""
        world, task_id = self.world, run.key.task_id
        if death == BEFORE:
            raise Died
        successor = first_delivery(task_id, run.delivery.send_id or "", nesting=run.delivery.nesting + 1)
        world.broker.append(replace(successor, predecessor=run.key.token))
        if death == AFTER:
            raise Died
        self.fenced(
            run.key,
            lambda: world.store.runs.finish(run.key, Status.REPLACED),
            bool,
            before_outcome=False,
            death=NEVER,
        )
        self.runs.remove(run)

    def _end(self, run: Run, death: str) -> None:
        world, task_id = self.world, run.key.task_id
        ledger = world.tasks[task_id]
        outcome = Outcome(run.program.outcome, f"by {run.key.token}", b"42")
        followers = self._followers(run) if outcome.kind == OutcomeKind.VALUE else []
        ended: Ended | None = self.fenced(
            run.key,
            lambda: world.store.runs.end(run.key, outcome, TTL, followers=followers),
            lambda answer: answer is not None,
            before_outcome=True,
            death=death,
        )
        if ended is None:
            self.runs.remove(run)
            return
        ledger.outcome = run.outcome = outcome
        for follower in followers:
            if follower.is_durable:
                world.register(follower.key, Program((Call(Kind.STEP),)))
            else:
                world.plain_written.add(follower.delivery.task_id)
        run.unsent = list(ended.outgoing)
        if death == AGAIN:
            # What is to be sent is known from the first answer only: the scheduler sends it.
            again = world.store.runs.end(run.key, outcome, TTL, followers=followers)
            assert again == Ended((), ())
            run.unsent = []
        if death == AFTER:
            raise Died

    def _followers(self, run: Run) -> list[Follower]:
        found = []
        for number, kind in enumerate(run.program.followers):
            task_id = f"{run.key.task_id}-{run.key.token}-{kind}{number}"
            delivery = first_delivery(task_id, f"send-{task_id}")
            found.append(Follower(task_id, kind == "durable", delivery))
        return found

    def send_followers(self, run: Run, death: str) -> None:
        """The one try of the worker itself."""
        sent, run.unsent = run.unsent, []
        publish(self.world, sent)
        if death != NEVER:
            raise Died
        self.world.store.due.confirm(sent, RESEND)

    def tell(self, run: Run, death: str) -> None:
        """Tell the outcome; then end the row."""
        world, task_id = self.world, run.key.task_id
        outcome = run.outcome
        assert outcome is not None
        if not run.is_told:
            if death == BEFORE:
                raise Died
            world.tasks[task_id].told.append(outcome)
            run.is_told = True
            if death == AFTER:
                raise Died
            return
        self.fenced(
            run.key,
            lambda: world.store.runs.finish(run.key, STATUS_OF[outcome.kind]),
            bool,
            before_outcome=False,
            death=death,
        )
        self.runs.remove(run)
        if death == AFTER:
            raise Died

    # -- the lease -------------------------------------------------------------------------------

    def renew(self) -> None:
        """One renewal of all leases. Those that are not ours any more are lost."""
        world, keys = self.world, [run.key for run in self.runs]
        rows = {key: world.row(key.task_id) for key in keys}
        renewed = world.store.heartbeats.renew(keys, TTL)
        assert renewed == {key for key, row in rows.items() if world.holds(row, key)}
        # A process may hold a lease again that it had lost: its renewal moves the row of both.
        moved = {key.task_id for key in renewed}
        for key in set(keys) - renewed:
            assert key.task_id in moved or world.row(key.task_id) == rows[key]
        self.runs = [run for run in self.runs if run.key in renewed]

    def hand_back(self, run: Run) -> None:
        self.fenced(
            run.key,
            lambda: self.world.store.leases.hand_back(run.key),
            bool,
            before_outcome=False,
            death=NEVER,
        )
        self.runs.remove(run)

    def lose_child(self, run: Run) -> None:
        """The process of a run dies alone, and the main process takes its lease from it."""
        self.fenced(
            run.key,
            lambda: self.world.store.leases.recover(run.key, MAX_CRASHES),
            lambda answer: answer is not False,
            before_outcome=False,
            death=NEVER,
        )
        self.world.note_outcome(run.key.task_id)
        self.runs.remove(run)

    def hit_limit(self, run: Run, death: str) -> None:
        """A hard time limit: the main process takes the run from its child, with the outcome."""
        world, outcome = self.world, Outcome(OutcomeKind.EXCEPTION, "time limit", b"43")
        taken: LeaseKey | None = self.fenced(
            run.key,
            lambda: world.store.leases.take_from_child(run.key, self.owner, TTL, outcome),
            lambda answer: answer is not None,
            before_outcome=True,
            death=death,
        )
        if taken is None:
            self.runs.remove(run)
            return
        ledger = world.tasks[run.key.task_id]
        assert taken.token == ledger.token + 1
        ledger.token, ledger.outcome = taken.token, outcome
        run.key, run.outcome, run.unsent = taken, outcome, []
        if death == AFTER:
            raise Died

    def set_aside(self, run: Run, death: str) -> None:
        """The code does not fit the journal."""
        self.fenced(
            run.key,
            lambda: self.world.store.runs.set_aside(run.key),
            bool,
            before_outcome=True,
            death=death,
        )
        self.runs.remove(run)
        if death == AFTER:
            raise Died


class Scheduler:
    """A scheduler process: batches that it took, and what it has sent of each."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.batches: list[tuple[list[Outgoing], list[Outgoing]]] = []

    def die(self) -> None:
        self.batches = []
        self.world.faults["scheduler died"] += 1

    def take(self, limit: int) -> None:
        batch = self.world.store.due.take(limit, lambda _name: (MAX_CRASHES, TTL))
        assert not batch.unreadable
        for crashed in batch.crashed:
            self.world.note_outcome(crashed.task_id)
        if batch.outgoing:
            self.batches.append((list(batch.outgoing), []))

    def dispatch(self) -> None:
        """A whole pass, after what was begun before."""
        self.take(10)
        while self.batches:
            self.send(10)
            self.note()

    def send(self, count: int) -> None:
        """Send some messages of the oldest batch."""
        unsent, sent = self.batches[0]
        publish(self.world, unsent[:count])
        sent += unsent[:count]
        del unsent[:count]

    def note(self) -> None:
        """Note what the broker confirmed of the oldest batch, and give the rest back."""
        unsent, sent = self.batches.pop(0)
        world = self.world
        rows = {item.key: world.row(item.key) for item in (*unsent, *sent)}
        world.store.due.confirm(sent, RESEND)
        world.store.due.give_back(unsent)
        for item in (*unsent, *sent):
            row = rows[item.key]
            if row is None or row.owner is not None or row.wake_at != item.taken_until:
                assert world.row(item.key) == row, f"{self.name} was late, and has changed {row}"


def publish(world: World, outgoing: list[Outgoing]) -> None:
    """The broker gets messages."""
    for item in outgoing:
        wake = wake_of(item)
        if item.status == Status.OUTBOX:
            world.plain_sent[wake.task_id] += 1
        else:
            world.broker.append(wake)


def moved(world: World, task_id: str) -> None:
    """An operator has moved a sleep: its due time is another one now."""
    _, entries = world.state(task_id)
    ledger = world.tasks[task_id]
    for entry in entries:
        ledger.entries[entry.position].due_at = entry.due_at
