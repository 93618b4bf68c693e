"""How the model looks at the tables.

Half of all statements are these, so they are compiled once and handed to the driver as they are: SQLAlchemy
takes several times as long for each of them as an SQLite in memory does.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from sqlalchemy import Connection, Dialect, Select, bindparam, select

from celery_durable.store import Store


class Look:
    """One query. Its rows have their columns as attributes; times are instants."""

    def __init__(self, statement: Select[Any], dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        self._text = str(compiled)
        self._order = compiled.positiontup
        columns = list(statement.selected_columns)
        self._row: Any = namedtuple("Row", [column.key for column in columns])  # type: ignore[misc]
        found = [
            (n, c.type.dialect_impl(dialect).result_processor(dialect, None)) for n, c in enumerate(columns)
        ]
        self._conversions = [(number, convert) for number, convert in found if convert is not None]

    def __call__(self, connection: Connection, **values: Any) -> list[Any]:
        parameters: Any = values if self._order is None else tuple(values[name] for name in self._order)
        cursor = connection.connection.cursor()
        cursor.execute(self._text, parameters)
        rows = [list(row) for row in cursor.fetchall()]
        cursor.close()
        for row in rows:
            for number, convert in self._conversions:
                row[number] = convert(row[number])
        return [self._row(*row) for row in rows]


class Looks:
    """What the model asks of the database."""

    def __init__(self, store: Store) -> None:
        context, dialect = store.context, store.database.engine.dialect
        executions, journal = context.schema.executions, context.schema.journal
        columns = executions.c
        #: The execution of ``task_id``.
        self.row = Look(select(executions).where(columns.task_id == bindparam("task_id")), dialect)
        #: Its journal, in order.
        self.journal = Look(
            select(journal).where(journal.c.task_id == bindparam("task_id")).order_by(journal.c.position),
            dialect,
        )
        #: All executions, with what every check asks of them.
        self.all_rows = Look(
            select(
                columns.task_id,
                columns.status,
                columns.token,
                columns.owner,
                columns.wake_at,
                columns.crashes,
                columns.outcome,
            ).order_by(columns.task_id),
            dialect,
        )
