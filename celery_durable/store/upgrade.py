"""Creating and migrating the tables."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, select, text
from sqlalchemy.schema import CreateSchema

from celery_durable.errors import ConfigurationError
from celery_durable.store.base import Context

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

MIGRATIONS = Path(__file__).parent / "migrations"

logger = logging.getLogger(__name__)

#: Where Alembic says something in the course of an upgrade.
_ALEMBIC_LOGGERS = ("alembic.runtime.migration", "alembic.runtime.plugins", "alembic.ddl.impl")

#: Alembic keeps what it works on in module globals.
_alembic = threading.Lock()


def upgrade(context: Context) -> None:
    """Bring the tables to the newest version. Safe when many processes do it at once.

    Raises:
        ConfigurationError: the tables are of a later release than this one.
    """
    if current_version(context) == newest_version():
        return
    with _alembic, context.database.transaction() as connection:
        _lock(connection, context)
        found = _version(connection, context)
        if found is not None and found not in _known_versions():
            raise ConfigurationError(
                f"the tables in {context.database.url} are at version {found}, which this release does not"
                f" know (its own is {newest_version()}): a later one has upgraded them, install that one"
            )
        _create_schema(connection, context)
        if found != newest_version():
            _migrate(connection, context)
            logger.info("The tables are at version %s now; before, %s", newest_version(), found or "none")


def check(context: Context) -> None:
    """Refuse to go on with tables of another version.

    Raises:
        ConfigurationError: the tables are missing, or older or newer than this release.
    """
    found, wanted = current_version(context), newest_version()
    if found is None:
        raise ConfigurationError(
            f"there are no tables in {context.database.url} yet: run `celery -A <your app> durable upgrade`;"
            " a worker or a beat with durable_auto_upgrade = True makes them when it starts"
        )
    if found != wanted:
        raise ConfigurationError(
            f"the tables in {context.database.url} are at version {found}, this release needs"
            f" {wanted}: run `celery -A <your app> durable upgrade`, or set durable_auto_upgrade = True"
        )


def newest_version() -> str:
    """The version that this release brings."""
    head = _scripts().get_current_head()
    assert head is not None
    return head


def current_version(context: Context) -> str | None:
    """The version of the tables as they are, None where there are none."""
    with context.database.statements() as connection:
        return _version(connection, context)


def _known_versions() -> set[str]:
    return {script.revision for script in _scripts().walk_revisions()}


def _scripts() -> ScriptDirectory:
    with _alembic_is_quiet():
        from alembic.script import ScriptDirectory  # noqa: PLC0415 - it logs when it is imported

    return ScriptDirectory(str(MIGRATIONS))


def _version(connection: Connection, context: Context) -> str | None:
    # Alembic's own way to ask writes two lines into the log of every worker.
    metadata = MetaData(schema=context.schema.metadata.schema)
    table = Table(context.schema.version_table, metadata, Column("version_num", String(32)))
    if not inspect(connection).has_table(table.name, schema=metadata.schema):
        return None
    found: str | None = connection.execute(select(table.c.version_num)).scalar()
    return found


@contextmanager
def _alembic_is_quiet() -> Iterator[None]:
    """Within this block, of this thread, Alembic has only warnings to say.

    Its level and its handlers are the application's, which may use it itself.
    """
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    # A filter of a logger does not see what its children are told.
    loggers = [logging.getLogger(name) for name in _ALEMBIC_LOGGERS]
    for alembic_logger in loggers:
        alembic_logger.addFilter(passes)
    try:
        yield
    finally:
        for alembic_logger in loggers:
            alembic_logger.removeFilter(passes)


def _lock(connection: Connection, context: Context) -> None:
    """One at a time: SQLite's transaction holds the write lock already."""
    if connection.dialect.name == "postgresql":
        name = f"celery_durable/{context.schema.metadata.schema}/{context.schema.version_table}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def _create_schema(connection: Connection, context: Context) -> None:
    # Only where it is missing: to say IF NOT EXISTS takes the right to create schemas even if it is there.
    schema = context.schema.metadata.schema
    if schema is not None and not inspect(connection).has_schema(schema):
        connection.execute(CreateSchema(schema))


def _migrate(connection: Connection, context: Context) -> None:
    with _alembic_is_quiet():
        from alembic import command  # noqa: PLC0415 - it logs when it is imported

        command.upgrade(_config(connection, context), "head")


def _config(connection: Connection, context: Context) -> Config:
    from alembic.config import Config  # noqa: PLC0415 - as above

    config = Config()
    # A % in the path would be read as the start of a placeholder.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["schema"] = context.schema
    return config
