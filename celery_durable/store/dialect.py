"""Every difference between the databases, in one place.

Time is the database's: ``now()`` is evaluated there, in the statement that decides by it.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import Dialect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import expression
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.types import TIMESTAMP, Boolean, String, TypeDecorator, TypeEngine


class UtcDateTime(TypeDecorator[datetime]):
    """An instant: aware and in UTC on the way in and out.

    PostgreSQL keeps a ``timestamptz``. SQLite keeps text with milliseconds, which sorts as time does
    and is what its own ``strftime('%Y-%m-%d %H:%M:%f')`` writes.
    """

    impl = TIMESTAMP(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(String(32))
        return dialect.type_descriptor(TIMESTAMP(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return value
        return to_sqlite(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if isinstance(value, str):
            return _from_sqlite(value)
        instant: datetime = value
        return instant.astimezone(timezone.utc)


def to_sqlite(value: datetime) -> str:
    """The stored text of an instant, rounded up to a millisecond: a due time is never early."""
    utc = value.astimezone(timezone.utc)
    micros = -utc.microsecond % 1000
    try:
        utc += timedelta(microseconds=micros)
    except OverflowError:
        utc = utc.replace(microsecond=999_000)
    return f"{utc.year:04d}" + utc.strftime("-%m-%d %H:%M:%S") + f".{utc.microsecond // 1000:03d}"


def _from_sqlite(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    except ValueError:
        # Somebody wrote nonsense by hand: that row has no readable time, the others still have theirs.
        return None


# A day within what Python can say: a driver shows an instant in some local time first.
_FIRST, _LAST = "0001-01-02 00:00:00.000", "9999-12-30 00:00:00.000"
#: More seconds than there are until then. The databases cannot add just any number to a time.
MOST_SECONDS = 3e11


class now_plus(expression.FunctionElement[datetime]):  # noqa: N801 - reads as SQL
    """The database's time plus a number of seconds (at most MOST_SECONDS), within the years Python knows."""

    type = UtcDateTime()
    inherit_cache = True
    name = "now_plus"


@compiles(now_plus, "postgresql")
def _now_plus_postgresql(element: now_plus, compiler: SQLCompiler, **kw: Any) -> str:
    # clock_timestamp() moves within a transaction, now() does not: a wait for a lock must count.
    seconds = compiler.process(element.clauses, **kw)
    moved = f"clock_timestamp() + make_interval(secs => CAST({seconds} AS double precision))"
    return f"least({moved}, '{_LAST}+00'::timestamptz)"


@compiles(now_plus, "sqlite")
def _now_plus_sqlite(element: now_plus, compiler: SQLCompiler, **kw: Any) -> str:
    # CURRENT_TIMESTAMP has whole seconds only; %f has milliseconds. 'now' is one instant per statement.
    # || binds more tightly than arithmetic does.
    seconds = compiler.process(element.clauses, **kw)
    # A live row whose time is NULL would never be found: past the year 9999 strftime answers just that.
    return f"coalesce(strftime('%Y-%m-%d %H:%M:%f', 'now', ({seconds}) || ' seconds'), '{_LAST}')"


class shifted(expression.FunctionElement[datetime]):  # noqa: N801 - reads as SQL
    """A stored instant plus a number of seconds, kept within the years that Python knows."""

    type = UtcDateTime()
    inherit_cache = True
    name = "shifted"


@compiles(shifted, "postgresql")
def _shifted_postgresql(element: shifted, compiler: SQLCompiler, **kw: Any) -> str:
    instant, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    moved = f"{instant} + make_interval(secs => CAST({seconds} AS double precision))"
    return f"least(greatest({moved}, '{_FIRST}+00'::timestamptz), '{_LAST}+00'::timestamptz)"


@compiles(shifted, "sqlite")
def _shifted_sqlite(element: shifted, compiler: SQLCompiler, **kw: Any) -> str:
    instant, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    # Past the year 9999 strftime answers NULL; before the year 0 with a sign, which sorts first.
    moved = f"coalesce(strftime('%Y-%m-%d %H:%M:%f', {instant}, ({seconds}) || ' seconds'), '{_LAST}')"
    return f"max({moved}, '{_FIRST}')"


class unhurried_commit(expression.FunctionElement[bool]):  # noqa: N801 - reads as SQL
    """Always true; the transaction of the statement does not wait until it is on the disk.

    For a write whose loss in a crash of the database does no harm, because what it says is found out again.
    """

    type = Boolean()
    inherit_cache = True
    name = "unhurried_commit"


@compiles(unhurried_commit, "postgresql")
def _unhurried_commit_postgresql(_element: unhurried_commit, _compiler: SQLCompiler, **_kw: Any) -> str:
    # The setting holds until the end of the transaction, and the commit looks at it.
    return "set_config('synchronous_commit', 'off', true) IS NOT NULL"


@compiles(unhurried_commit, "sqlite")
def _unhurried_commit_sqlite(_element: unhurried_commit, _compiler: SQLCompiler, **_kw: Any) -> str:
    return "1"


def insert(table: Any, dialect_name: str) -> Any:
    """An INSERT that knows ON CONFLICT (both databases have it, under two names in SQLAlchemy)."""
    if dialect_name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
