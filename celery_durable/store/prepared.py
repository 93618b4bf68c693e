"""Statements of the hot path: built and compiled once, and then only given their values.

A task of a millisecond makes three statements. To build one of them anew, and to find it among those that
SQLAlchemy has compiled before, takes several times as long as the driver needs to send it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.types import TypeEngine

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

    from celery_durable.store.base import Context

Row = dict[str, Any]
Convert = Callable[[Any], Any]


class Prepared:
    """One statement with named values (``bindparam``), in the caller's transaction or as one of its own.

    ``build`` makes it, and may be called again: where tests travel in time, it may be a part of the text.
    """

    def __init__(self, context: Context, build: Callable[[], Any]) -> None:
        self._context = context
        self._build = build
        # By the clock. Two threads that come first together compile it twice, which does no harm.
        self._compiled: dict[str, _Compiled] = {}

    def first(self, values: Mapping[str, Any], connection: Connection | None = None) -> Row | None:
        """The first row that it returns."""
        rows = self.all(values, connection)
        return rows[0] if rows else None

    def all(self, values: Mapping[str, Any], connection: Connection | None = None) -> list[Row]:
        """The rows that it returns."""
        compiled = self._compiled_now()
        rows, _ = self._run(compiled, values, connection)
        return [compiled.decoded(row) for row in rows]

    def count(self, values: Mapping[str, Any], connection: Connection | None = None) -> int:
        """Run it. Returns the number of rows that it has changed."""
        _, changed = self._run(self._compiled_now(), values, connection)
        return changed

    def _run(
        self, compiled: _Compiled, values: Mapping[str, Any], connection: Connection | None
    ) -> tuple[Any, int]:
        parameters = compiled.parameters(values)
        if connection is None:
            database = self._context.database
            return database.execute(compiled.text, parameters, returns_rows=bool(compiled.results))
        result = connection.exec_driver_sql(compiled.text, parameters)
        return (result.all() if result.returns_rows else ()), result.rowcount

    def _compiled_now(self) -> _Compiled:
        clock = self._context.clock_name
        compiled = None if clock is None else self._compiled.get(clock)
        if compiled is None:
            compiled = _Compiled.of(self._build(), self._context.database.engine.dialect)
            if clock is not None:
                self._compiled[clock] = compiled
        return compiled


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The text for one database, with what its driver does to values on their way in and out."""

    text: str
    #: The values that are a part of the statement.
    constants: dict[str, Any]
    #: Those that are asked for anew each time.
    current: tuple[tuple[str, Callable[[], Any]], ...]
    #: The order of the values where the driver counts them; None where it names them.
    order: tuple[str, ...] | None
    binds: tuple[tuple[str, Convert], ...]
    results: tuple[tuple[str, Convert | None], ...]

    @classmethod
    def of(cls, statement: Any, dialect: Dialect) -> _Compiled:
        compiled: SQLCompiler = statement.compile(dialect=dialect)
        constants, current, binds = {}, [], []
        for name, value in compiled.params.items():
            bind = compiled.binds[name]
            convert = _bind_of(bind.type, dialect)
            if not (bind.required or bind.callable):
                constants[name] = value if convert is None else convert(value)
                continue
            if bind.callable:
                current.append((name, bind.callable))
            if convert is not None:
                binds.append((name, convert))
        return cls(
            compiled.string,
            constants,
            tuple(current),
            None if compiled.positiontup is None else tuple(compiled.positiontup),
            tuple(binds),
            tuple((column.key, _result_of(column.type, dialect)) for column in statement.exported_columns),
        )

    def parameters(self, values: Mapping[str, Any]) -> Any:
        given = {**self.constants, **values}
        for name, ask in self.current:
            given[name] = ask()
        for name, convert in self.binds:
            given[name] = convert(given[name])
        return given if self.order is None else tuple(given[name] for name in self.order)

    def decoded(self, row: Any) -> Row:
        return {
            name: value if convert is None else convert(value)
            for (name, convert), value in zip(self.results, row, strict=True)
        }


def _bind_of(kind: TypeEngine[Any], dialect: Dialect) -> Convert | None:
    return kind.dialect_impl(dialect).bind_processor(dialect)


def _result_of(kind: TypeEngine[Any], dialect: Dialect) -> Convert | None:
    return kind.dialect_impl(dialect).result_processor(dialect, None)
