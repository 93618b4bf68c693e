"""The tables as they are, read past the product; and an observer that looks at them all the time."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row

LIVE = frozenset({"scheduled", "sleeping", "retrying", "running", "ending"})
ENDED = frozenset({"succeeded", "failed", "cancelled", "replaced", "quarantined"})

Row = dict[str, Any]


@dataclass
class Tables:
    """What the database held at one instant."""

    #: The database's time of the reading.
    now: datetime
    rows: dict[str, Row]
    #: A task's journal in order.
    journal: dict[str, list[Row]]


def read(url: str) -> Tables:
    """All rows in one snapshot. `url`: SQLAlchemy's."""
    with psycopg.connect(
        url.replace("+psycopg", ""),
        connect_timeout=2,
        row_factory=dict_row,
        options="-c statement_timeout=5s",
    ) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        rows = connection.execute("SELECT *, clock_timestamp() AS read_at FROM durable_executions").fetchall()
        entries = connection.execute(
            "SELECT task_id, position, kind, name, timer_id, due_at, payload, recorded_at "
            "FROM durable_journal ORDER BY task_id, position"
        ).fetchall()
        now = connection.execute("SELECT clock_timestamp() AS now").fetchone()
    journal = defaultdict(list)
    for entry in entries:
        journal[entry["task_id"]].append(entry)
    assert now is not None
    return Tables(now["now"], {row["task_id"]: row for row in rows}, journal)


@dataclass
class Observer:
    """A thread that reads the tables again and again, and notes what must never be."""

    url: str
    complaints: list[str] = field(default_factory=list)
    #: How often it could read them.
    looks: int = 0
    latest: Tables | None = None

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._said: set[tuple[str, str]] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stopping.wait(0.4):
            with suppress(psycopg.Error):
                self.look()

    def look(self) -> Tables:
        """Read the tables now, and compare them with the last time. Raises `psycopg.Error`."""
        tables = read(self.url)
        self.looks += 1
        for task_id, row in tables.rows.items():
            if row["status"] in LIVE and row["wake_at"] is None:
                self._complain(task_id, "a live row without wake_at", row)
            if self.latest is not None and task_id in self.latest.rows:
                self._compare(task_id, self.latest.rows[task_id], row)
                self._compare_journal(task_id, self.latest, tables)
        if self.latest is not None:
            for task_id, row in self.latest.rows.items():
                if row["status"] != "outbox" and task_id not in tables.rows:
                    self._complain(task_id, "its row is gone", row)
        self.latest = tables
        return tables

    def _compare(self, task_id: str, before: Row, after: Row) -> None:
        if after["token"] < before["token"]:
            self._complain(task_id, "its token went back", before, after)
        if before["outcome"] is not None and _essence(after) != _essence(before):
            self._complain(task_id, "its outcome has changed", before, after)
        # A database that is killed may forget the write that ends a row: it is told again.
        if before["status"] in ENDED and after["status"] not in (before["status"], "ending"):
            self._complain(task_id, "it had ended", before, after)

    def _compare_journal(self, task_id: str, before: Tables, after: Tables) -> None:
        old, new = before.journal.get(task_id, []), after.journal.get(task_id, [])
        if new[: len(old)] != old:
            self._complain(task_id, "what was journaled has changed", *old, "→", *new)

    def _complain(self, task_id: str, what: str, *evidence: Any) -> None:
        if (task_id, what) not in self._said:
            self._said.add((task_id, what))
            shown = "\n    ".join(str(item) for item in evidence)
            self.complaints.append(f"{task_id}: {what} (seen at {time.time():.3f})\n    {shown}")


def _essence(row: Row) -> Any:
    """An outcome without its reason, which is for people."""
    outcome = json.loads(row["outcome"] or "null")
    return outcome and (outcome["kind"], outcome.get("payload"))
