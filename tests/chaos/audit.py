"""Afterwards: each task against the witness, the tables and the result store."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from celery_durable.chords import CHORD_UNLOCK
from tests.chaos.record import Line
from tests.chaos.rows import ENDED, Row, Tables
from tests.chaos.traffic import Sent

#: Seconds by which two clocks of one machine may seem to differ.
BLUR = 0.01
#: Operations that leave a journal entry, and its kind.
KINDS = {"step": "step", "trip": "error", "sleep": "sleep", "nap": "sleep"}


@dataclass
class Findings:
    """What the audit has come to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    double_writes: list[str] = field(default_factory=list)
    #: Whatever else is not as it must be.
    others: list[str] = field(default_factory=list)
    #: Result states that a dying process left over the outcome: told in the documentation.
    stale_states: list[str] = field(default_factory=list)
    #: Tasks that a broker lost before anybody had claimed them.
    unclaimed: list[str] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    runs: int = 0
    replays: int = 0

    @property
    def complaints(self) -> list[str]:
        return [*self.lost, *self.double_writes, *self.others]


@dataclass
class Audit:
    """All there is to know about a run. `states`: each task's state and result in the result store."""

    sent: dict[str, Sent]
    lines: dict[str, list[Line]]
    tables: Tables
    states: dict[str, tuple[str, Any]]
    #: When the broker may have lost a message that nobody had claimed.
    losses: list[float]
    findings: Findings = field(default_factory=Findings)

    def run(self) -> Findings:
        for sent in self.sent.values():
            self._check(sent)
        for task_id, row in self.tables.rows.items():
            if row["task_name"] == CHORD_UNLOCK:
                # Of a chord that has lost a member it is asked for ever. A body that should have begun is
                # missed by itself.
                continue
            if row["wake_at"] is not None or row["owner"] is not None:
                self._lose(task_id, f"is stuck at {row['status']}", row)
        return self.findings

    # One task.

    def _check(self, sent: Sent) -> None:
        row = self.tables.rows.get(sent.task_id)
        lines = self.lines.get(sent.task_id, [])
        if row is None or not row["headers"]:
            self._check_absent(sent, row, lines)
            return
        self.findings.outcomes[row["status"]] += 1
        entered = [line for line in lines if line.what == "entered"]
        self.findings.runs += len(entered)
        self.findings.replays += max(0, len(entered) - 1)
        for complaint in self._complaints(sent, row, lines):
            self._say(self.findings.others, sent.task_id, complaint)
        for complaint in _double_writes(sent, lines, self.tables.journal.get(sent.task_id, [])):
            self._say(self.findings.double_writes, sent.task_id, complaint)
        self._check_state(sent, row)

    def _check_absent(self, sent: Sent, row: Row | None, lines: list[Line]) -> None:
        """A task without a row: nobody has claimed it, or a cancel came before."""
        if lines:
            self._lose(sent.task_id, "has run, and has no row", row)
        elif row is not None:
            self.findings.outcomes[f"{row['status']} before it began"] += 1
            if row["status"] != "cancelled" or not sent.cancels:
                self._say(self.findings.others, sent.task_id, f"has a bare row: {row}")
        elif not self._must_have_begun(sent):
            self.findings.outcomes["not to be begun"] += 1
        elif not sent.is_accepted:
            self.findings.outcomes["send failed"] += 1
        elif not sent.is_row and sent.after is None and any(at > sent.sent_at for at in self.losses):
            self.findings.outcomes["lost by the broker, unclaimed"] += 1
            self.findings.unclaimed.append(sent.task_id)
        else:
            self._lose(sent.task_id, "was sent, and never began")

    def _must_have_begun(self, sent: Sent) -> bool:
        before = [sent.after] if sent.after else sent.members
        return all(self._status(task_id) == "succeeded" for task_id in before)

    def _status(self, task_id: str) -> str | None:
        row = self.tables.rows.get(task_id)
        return None if row is None else row["status"]

    def _complaints(self, sent: Sent, row: Row, lines: list[Line]) -> Iterator[str]:
        journal = self.tables.journal.get(sent.task_id, [])
        status = row["status"]
        if status not in ENDED:
            self._lose(sent.task_id, f"has not ended: {status}", row)
            return
        yield from self._wrong_end(sent, row, lines)
        yield from _wrong_journal(sent, status, journal)
        yield from _runs_after_it_was_kept(sent, lines)
        yield from _early_wakes(sent, lines, journal, self.findings.lateness)
        yield from _two_owners(lines, row)
        yield from self._wrong_start(sent, lines)

    def _wrong_end(self, sent: Sent, row: Row, lines: list[Line]) -> Iterator[str]:
        status, seen = row["status"], Counter(line.what for line in lines)
        if True in sent.cancels and status != "cancelled":
            yield f"was cancelled, and is {status}"
        if status == "cancelled" and not sent.cancels:
            yield "nobody has cancelled it"
        if status not in ("cancelled", "failed" if sent.fails else "succeeded"):
            yield f"should have {'failed' if sent.fails else 'succeeded'}, and is {status}: {row['outcome']}"
        if status == "succeeded" and not seen["returns"]:
            yield "has succeeded, and no run has come to its return"
        sent_safely = all(at < min((line.time for line in lines), default=0) for at in self.losses)
        if status == "succeeded" and sent.has_follower and sent_safely and not seen["plain follower"]:
            yield "its plain follower has not run"
        if status != "succeeded" and seen["plain follower"]:
            yield f"is {status}, and its follower has run"
        if status == "failed" and sent.has_errback and not seen["errback"]:
            yield "its errback has not run"
        if status != "failed" and seen["errback"]:
            yield f"is {status}, and its errback has run"

    def _wrong_start(self, sent: Sent, lines: list[Line]) -> Iterator[str]:
        """Who follows gets what those before have come to, and never starts otherwise."""
        before = [sent.after] if sent.after else sent.members
        if not before:
            return
        bad = [task_id for task_id in before if self._status(task_id) != "succeeded"]
        entered = [line for line in lines if line.what == "entered"]
        if bad and entered:
            yield f"has begun, though {bad} did not succeed"
            return
        values = [self.value_of(task_id) for task_id in before]
        wanted = values if sent.after else [values]
        for line in entered:
            if line.value != wanted:
                yield f"was given {line.value} instead of {wanted}"

    def value_of(self, task_id: str) -> Any:
        """What a task has returned, by its row."""
        row = self.tables.rows[task_id]
        return json.loads(json.loads(row["outcome"])["payload"])

    def _check_state(self, sent: Sent, row: Row) -> None:
        state, result = self.states[sent.task_id]
        wanted = {"succeeded": "SUCCESS", "failed": "FAILURE", "cancelled": "REVOKED"}.get(row["status"])
        if state in ("SLEEPING", "RETRY", "STARTED") and wanted:
            self._say(self.findings.stale_states, sent.task_id, f"state {state}, row {row['status']}")
        elif state != wanted:
            self._say(self.findings.others, sent.task_id, f"is {row['status']}, and its state is {state}")
        elif state == "SUCCESS":
            kept = {line.nonce for line in self.lines.get(sent.task_id, []) if line.what == "kept"}
            if not kept <= set(result["kept"]):
                self._say(self.findings.others, sent.task_id, f"result {result} lacks some of {kept}")

    def _lose(self, task_id: str, what: str, row: Row | None = None) -> None:
        self._say(self.findings.lost, task_id, what if row is None else f"{what}: {_brief(row)}")

    def _say(self, where: list[str], task_id: str, what: str) -> None:
        sent = self.sent.get(task_id)
        about = f" ({sent.kind}, {json.dumps(sent.program)})" if sent else ""
        where.append(f"{task_id}{about} {what}")


def _brief(row: Row) -> dict[str, Any]:
    names = ("status", "token", "owner", "wake_at", "sends", "crashes", "failures", "outcome", "updated_at")
    return {name: row[name] for name in names} | {"read_at": row.get("read_at")}


def _durable_places(sent: Sent) -> list[int]:
    return [place for place, (operation, _) in enumerate(sent.program) if operation in KINDS]


def _wrong_journal(sent: Sent, status: str, journal: list[Row]) -> Iterator[str]:
    wanted = [KINDS[sent.program[place][0]] for place in _durable_places(sent)]
    found = [entry["kind"] for entry in journal]
    if [entry["position"] for entry in journal] != list(range(1, len(journal) + 1)):
        yield f"positions {[entry['position'] for entry in journal]}"
    if wanted[: len(found)] != found:
        yield f"its journal is {found}, its program {wanted}"
    elif status == "succeeded" and wanted != found:
        yield f"has succeeded with {found} in its journal instead of {wanted}"


def _double_writes(sent: Sent, lines: list[Line], journal: list[Row]) -> Iterator[str]:
    """Each accepted write of a step has given its value to the body: all of a place are one value."""
    kept: dict[int, set[str]] = defaultdict(set)
    for line in lines:
        if line.what == "kept":
            kept[line.place].add(line.nonce)
    entries = dict(zip(_durable_places(sent), journal, strict=False))
    for place, nonces in kept.items():
        if len(nonces) > 1:
            yield f"step {place} was accepted with {len(nonces)} values: {sorted(nonces)}"
        elif place not in entries:
            yield f"step {place} was accepted, and is not in the journal"
        elif next(iter(nonces)).encode() not in bytes(entries[place]["payload"] or b""):
            yield f"step {place} was accepted as {nonces}, journaled is {bytes(entries[place]['payload'])!r}"


def _runs_after_it_was_kept(sent: Sent, lines: list[Line]) -> Iterator[str]:
    """A run with a later token than one that came past a place never runs that place's step."""
    past: dict[int, int] = {}
    for line in lines:
        if line.what in ("kept", "woke"):
            for place in range(line.place + 1):
                past[place] = min(past.get(place, line.token), line.token)
    runs = Counter((line.place, line.token) for line in lines if line.what == "ran")
    for (place, token), count in runs.items():
        if token > past.get(place, token):
            yield f"step {place} ran with token {token}, journaled with {past[place]}"
        if count > 1:
            yield f"step {place} ran {count} times with token {token}"


def _early_wakes(sent: Sent, lines: list[Line], journal: list[Row], lateness: list[float]) -> Iterator[str]:
    entries = dict(zip(_durable_places(sent), journal, strict=False))
    for place, (operation, seconds) in enumerate(sent.program):
        if operation not in ("sleep", "nap") or place not in entries:
            continue
        due = entries[place]["due_at"].timestamp()
        began = [line.time for line in lines if line.what == "sleeps" and line.place == place]
        woke = [line.time for line in lines if line.what == "woke" and line.place == place]
        if not began:
            yield f"sleep {place} was journaled, and nobody began it"
            continue
        if due < min(began) + seconds - BLUR:
            yield f"sleep {place} of {seconds} s was due {due - min(began):.3f} s after it began"
        if woke:
            lateness.append(min(woke) - due)
            if min(woke) < due - BLUR:
                yield f"sleep {place} ended {due - min(woke):.3f} s early"


def _two_owners(lines: list[Line], row: Row) -> Iterator[str]:
    owners: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        if line.what == "entered":
            owners[line.token].add(line.pid)
    for token, pids in owners.items():
        if len(pids) > 1:
            yield f"token {token} was given to processes {sorted(pids)}"
        if token > row["token"]:
            yield f"ran with token {token}, its row has {row['token']}"
    entered = [line.token for line in lines if line.what == "entered"]
    if len(set(entered)) < len(entered):
        yield f"a token has run twice: {entered}"
