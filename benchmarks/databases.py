"""The database of a site, as the benchmark looks into it and fills it."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any, Protocol

import psycopg

from tests.nodes import PostgresServer

_UNSETTLED = """
    SELECT count(*) FROM durable_executions
    WHERE namespace = 'bench' AND wake_at < clock_timestamp() + interval '1 hour'
"""


class Database(Protocol):
    """What every database can tell."""

    url: str

    def unsettled(self) -> int:
        """How many executions run, or are about to; those that sleep for an hour or more do not count."""

    def close(self) -> None:
        """Drop it."""


class SqliteDatabase:
    """A file in the folder of an embedded application."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "celery-durable.db"
        self.url = f"sqlite:///{self._path}"

    def unsettled(self) -> int:
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            found = connection.execute(
                "SELECT count(*) FROM durable_executions WHERE status IN ('running', 'ending')"
            ).fetchone()
            return int(found[0])
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing: the folder goes with the site."""


class PostgresDatabase:
    """A new database of a private server."""

    def __init__(self, server: PostgresServer, *, log_statements: bool = False) -> None:
        self._server = server
        self.name = server.create_database()
        self.url = server.url(self.name)
        if log_statements:
            server.execute(f"ALTER DATABASE {self.name} SET log_statement = 'all'")
        self._asked = 0
        self._connection = self._connect()

    def _connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self._server.url(self.name, "postgresql"), autocommit=True)
        # What the benchmark asks is not to be counted.
        connection.execute("SET log_statement = 'none'")
        self._asked += 1
        return connection

    def unsettled(self) -> int:
        return int(self.ask(_UNSETTLED))

    def ask(self, statement: str) -> Any:
        """The first value that a query gives."""
        self._asked += 1
        found = self._connection.execute(statement.encode()).fetchone()
        assert found is not None
        return found[0]

    def execute(self, statement: str, arguments: tuple[Any, ...] = ()) -> int:
        """Run a statement; how many rows it touched."""
        self._asked += 1
        return self._connection.execute(statement.encode(), arguments).rowcount

    def commits(self) -> int:
        """How many transactions have been committed here so far, without the benchmark's own.

        Connections tell theirs when they end: whoever is to be counted has stopped.
        """
        self._connection.close()
        question = f"SELECT xact_commit FROM pg_stat_database WHERE datname = '{self.name}'"
        last = -1
        while (found := int(self._server.execute(question)[0][0])) != last:
            last = found
            time.sleep(0.3)
        self._connection = self._connect()
        return found - self._asked + 1

    def statements(self) -> int:
        """How many statements clients have sent since the server started, where they are logged."""
        log = self._server.logs()
        return log.count("LOG:  statement: ") + log.count("LOG:  execute ")

    def clone(self, task_id: str, count: int, due_in: float) -> None:
        """Copy a parked execution with its journal, ``count`` times, all due in so many seconds.

        The copies are what as many sends of the same task would have become: each has an id of its own,
        in its row and in its message.
        """
        at = "(SELECT at FROM clone_due)"
        self.execute("DROP TABLE IF EXISTS clones, clone_due")
        self.execute(f"CREATE TEMP TABLE clone_due AS SELECT now() + interval '{due_in} s' AS at")
        self.execute(
            "CREATE TEMP TABLE clones AS SELECT gen_random_uuid()::text AS id,"
            f" gen_random_uuid()::text AS timer FROM generate_series(1, {count})"
        )
        self._copy(
            "durable_executions",
            task_id,
            {
                "task_id": "clones.id",
                "wake_at": at,
                "headers": "replace(t.headers, t.task_id, clones.id)",
                "properties": "replace(t.properties, t.task_id, clones.id)",
            },
        )
        self._copy(
            "durable_journal",
            task_id,
            {
                "task_id": "clones.id",
                "due_at": f"CASE WHEN t.kind = 'sleep' THEN {at} END",
                "timer_id": "clones.timer",
            },
        )
        self.tidy()

    def _copy(self, table: str, task_id: str, changed: dict[str, str]) -> None:
        columns = [
            name
            for (name,) in self._connection.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
                " AND NOT attisdropped ORDER BY attnum",
                (table,),
            ).fetchall()
        ]
        values = ", ".join(changed.get(column, f"t.{column}") for column in columns)
        self.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} t, clones"
            " WHERE t.task_id = %s",
            (task_id,),
        )

    def status(self, task_id: str) -> str | None:
        """The status of an execution; None where there is no row."""
        found: str | None = self.ask(
            f"SELECT max(status) FROM durable_executions WHERE task_id = '{task_id}'"
        )
        return found

    def sleeping(self) -> int:
        """How many executions sleep."""
        return int(self.ask("SELECT count(*) FROM durable_executions WHERE status = 'sleeping'"))

    def forget_parked(self) -> None:
        """Remove all that sleeps or waits for its first start."""
        parked = "status IN ('sleeping', 'scheduled')"
        self.execute(
            "DELETE FROM durable_journal j USING durable_executions e"
            f" WHERE e.namespace = j.namespace AND e.task_id = j.task_id AND e.{parked}"
        )
        self.execute(f"DELETE FROM durable_executions WHERE {parked}")
        self.tidy()

    def tidy(self) -> None:
        """What autovacuum would do within a minute."""
        self.execute("VACUUM (ANALYZE) durable_executions, durable_journal")

    def close(self) -> None:
        self._connection.close()
        self._server.drop_database(self.name)
