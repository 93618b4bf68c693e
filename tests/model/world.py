"""The world of the model: one database, one broker, and a ledger of what was accepted and what was told."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import Connection, delete, func, or_, select

from celery_durable.records import (
    Claim,
    Delivery,
    JournalEntry,
    Kind,
    LeaseKey,
    Outcome,
    OutcomeKind,
    Status,
)
from celery_durable.store import Store
from celery_durable.store.base import outcome_from_text
from tests.model.looks import Looks
from tests.model.programs import STATUS_OF, Program

TTL = 60.0
MAX_CRASHES = 3
RESEND = 120.0
#: The database's clock stands still but for what moves it: an example is the same on a slow machine.
BEGINNING = datetime(2030, 1, 1, tzinfo=timezone.utc)
LIVE = (*Status.LIVE, Status.OUTBOX)


@dataclass
class Accepted:
    """A journal entry that the database has taken."""

    token: int
    kind: str
    name: str
    payload: bytes | None
    due_at: datetime | None = None


@dataclass
class Ledger:
    """What is known of one task id from the answers of the database alone."""

    program: Program
    #: Entries of the journal as it stands, by position; a new journal empties it.
    entries: dict[int, Accepted] = field(default_factory=dict)
    outcome: Outcome | None = None
    token: int = 0
    #: Outcomes that were told, and how often.
    told: list[Outcome] = field(default_factory=list)
    #: Its row was emptied, so its journal and its outcome are not there any more.
    is_pruned: bool = False

    def start_anew(self) -> None:
        self.entries, self.outcome = {}, None


class World:
    """A store, a broker, and what is to be true of them at every moment."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.executions = store.context.schema.executions
        self.journal = store.context.schema.journal
        self.broker: list[Delivery] = []
        self.tasks: dict[str, Ledger] = {}
        #: Messages of plain tasks that were written and those that the broker got, by id.
        self.plain_written: set[str] = set()
        self.plain_sent: Counter[str] = Counter()
        self.ran: Counter[tuple[str, int]] = Counter()
        self.faults: Counter[str] = Counter()
        #: As the last check has found them.
        self.statuses: dict[str, str] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._looks = Looks(store)
        self.clear()

    def clear(self) -> None:
        self.store.stopped_at[:] = [BEGINNING]
        with self.store.database.transaction() as connection:
            connection.execute(delete(self.journal))
            connection.execute(delete(self.executions))

    def number(self, what: str) -> int:
        """1, 2, 3 …"""
        self._numbers[what] += 1
        return self._numbers[what]

    def skip(self, seconds: float) -> None:
        self.store.stopped_at[0] += timedelta(seconds=seconds)

    # -- looking ---------------------------------------------------------------------------------

    def now(self) -> datetime:
        return self.store.stopped_at[0]

    def row(self, task_id: str) -> Any:
        """The row as it stands, None where there is none."""
        with self.store.database.statements() as connection:
            return self._row(connection, task_id)

    def state(self, task_id: str) -> tuple[Any, Any]:
        """Row and journal as they stand."""
        with self.store.database.statements() as connection:
            return self._row(connection, task_id), self._looks.journal(connection, task_id=task_id)

    def _row(self, connection: Connection, task_id: str) -> Any:
        found = self._looks.row(connection, task_id=task_id)
        return found[0] if found else None

    def with_status(self, *statuses: str) -> list[str]:
        """The ids of the rows that had one of these at the last check."""
        return [task_id for task_id, status in self.statuses.items() if status in statuses]

    def holds(self, row: Any, key: LeaseKey) -> bool:
        return row is not None and (row.owner, row.token) == (key.owner, key.token)

    # -- checking --------------------------------------------------------------------------------

    def check_claim(self, before: Any, delivery: Delivery, claim: Claim) -> None:
        """A claim was granted: nobody's live lease was taken, no sleep was cut, nothing was forgotten."""
        ledger, now = self.tasks[delivery.task_id], self.now()
        is_live = before is not None and before.status in Status.LIVE
        is_successor = before is not None and delivery.nesting > before.nesting
        assert claim.key.token > ledger.token
        if is_live and not is_successor:
            assert before.wake_at <= now or (before.owner is None and before.sends > 0)
            assert delivery.version == before.message_version
        if is_successor:
            assert delivery.predecessor == before.token, "a run that had lost its lease has replaced it"
        if not is_live or is_successor:
            ledger.start_anew()
            ledger.is_pruned = False
        ledger.token = claim.key.token
        if claim.outcome is not None:
            assert claim.outcome == (ledger.outcome or claim.outcome)
            ledger.outcome = claim.outcome
            return
        assert ledger.outcome is None
        assert {entry.position for entry in claim.journal} == ledger.entries.keys()
        for entry in claim.journal:
            self._check_entry(entry, ledger.entries[entry.position], now)
        if is_live and before.status == Status.SLEEPING and not is_successor:
            assert all(entry.is_over for entry in claim.journal if entry.kind == Kind.SLEEP)

    def _check_entry(self, entry: JournalEntry, accepted: Accepted, now: datetime) -> None:
        assert (entry.kind, entry.name, entry.payload) == (accepted.kind, accepted.name, accepted.payload)
        assert entry.due_at == accepted.due_at
        assert not entry.is_over or (entry.due_at is not None and entry.due_at <= now)

    def accept(self, key: LeaseKey, entries: list[JournalEntry], due_at: datetime | None = None) -> None:
        """The database has taken these entries, each at a position that nobody had before."""
        ledger = self.tasks[key.task_id]
        for entry in entries:
            assert entry.position not in ledger.entries
            due = due_at if entry.kind == Kind.SLEEP else None
            ledger.entries[entry.position] = Accepted(key.token, entry.kind, entry.name, entry.payload, due)

    def check_all(self) -> None:
        """What is true at every moment."""
        with self.store.database.statements() as connection:
            rows = self._looks.all_rows(connection)
        self.statuses = {row.task_id: row.status for row in rows}
        for row in rows:
            assert (row.wake_at is not None) == (row.status in LIVE), f"a live row without its time: {row}"
            if row.status == Status.OUTBOX:
                continue
            ledger = self.tasks[row.task_id]
            assert row.token == ledger.token, f"nobody has claimed it: {row}"
            assert row.owner is None or row.status in (Status.RUNNING, Status.ENDING)
            assert row.outcome is not None or row.crashes < MAX_CRASHES or ledger.is_pruned
            if ledger.outcome is not None and row.outcome is not None:
                assert outcome_from_text(row.outcome) == ledger.outcome, f"its outcome has changed: {row}"

    def count_waiting(self) -> int:
        with self.store.database.statements() as connection:
            found: int = connection.execute(
                select(func.count()).where(
                    or_(self.executions.c.wake_at.is_not(None), self.executions.c.status.in_(LIVE))
                )
            ).scalar_one()
        return found

    # -- noting ----------------------------------------------------------------------------------

    def register(self, task_id: str, program: Program) -> None:
        """A task was sent."""
        self.tasks[task_id] = Ledger(program)

    def note_outcome(self, task_id: str) -> None:
        """An outcome that no run has written (a verdict) stands in the row, or none does."""
        row, ledger = self.row(task_id), self.tasks[task_id]
        if row is not None and row.outcome is not None and ledger.outcome is None:
            ledger.outcome = outcome_from_text(row.outcome)

    def forget_pruned(self) -> None:
        """Rows that were emptied say nothing of how they ended."""
        for task_id, ledger in self.tasks.items():
            row = self.row(task_id)
            if row is not None and row.status in Status.ENDED and row.body is None and row.token:
                ledger.start_anew()
                ledger.is_pruned = True

    def release_all(self) -> None:
        """Somebody mends the code of whatever was set aside, as the last check has found it."""
        if Status.QUARANTINED not in self.statuses.values():
            return
        with self.store.database.statements() as connection:
            aside = connection.execute(
                select(self.executions.c.task_id).where(
                    self.executions.c.status == Status.QUARANTINED, self.executions.c.outcome.is_(None)
                )
            ).scalars()
            task_ids = [task_id for task_id in aside if not self.tasks[task_id].is_pruned]
        self.store.verdicts.release(task_ids)

    def check_ends(self) -> None:
        """Faults have stopped and nothing waits: every task has come to its one end, and it was told."""
        for task_id, ledger in self.tasks.items():
            if ledger.is_pruned:
                continue
            row = self.row(task_id)
            assert row is not None, f"{task_id} is lost"
            assert row.status in Status.ENDED, f"{task_id} has not ended: {row}"
            outcome = ledger.outcome
            assert outcome is not None
            assert row.status == STATUS_OF[outcome.kind]
            assert outcome in ledger.told, f"{task_id} has ended untold: {row}"
            assert all(told == outcome for told in ledger.told if told.kind != OutcomeKind.QUARANTINED)
            if outcome.reason != "time limit" and outcome.kind == ledger.program.outcome:
                assert ledger.entries.keys() == set(range(1, len(ledger.program.calls) + 1))
        for task_id in self.plain_written:
            assert self.plain_sent[task_id] >= 1, f"{task_id} was never sent"
