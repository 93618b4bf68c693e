"""Creating and migrating the tables."""

from __future__ import annotations

import hashlib
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from celery_durable.errors import ConfigurationError
from celery_durable.store.base import Context

MIGRATIONS = Path(__file__).parent / "migrations"


def upgrade(context: Context) -> None:
    """Bring the tables to the newest version. Safe when many processes do it at once."""
    if current_version(context) == newest_version():
        return
    with context.database.transaction() as connection:
        _lock(connection, context)
        if _version(connection, context) != newest_version():
            command.upgrade(_config(connection, context), "head")


def check(context: Context) -> None:
    """Refuse to go on with tables of another version.

    Raises:
        ConfigurationError: the tables are missing, or older or newer than this release.
    """
    found, wanted = current_version(context), newest_version()
    if found != wanted:
        raise ConfigurationError(
            f"the tables in {context.database.url} are at version {found or 'none'}, this release needs"
            f" {wanted}: run `celery -A <your app> durable upgrade`, or set durable_auto_upgrade = True"
        )


def newest_version() -> str:
    """The version that this release brings."""
    head = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert head is not None
    return head


def current_version(context: Context) -> str | None:
    """The version of the tables as they are, None where there are none."""
    with context.database.transaction() as connection:
        return _version(connection, context)


def _version(connection: Connection, context: Context) -> str | None:
    migrations = MigrationContext.configure(
        connection,
        opts={
            "version_table": context.schema.version_table,
            "version_table_schema": context.schema.metadata.schema,
        },
    )
    return migrations.get_current_revision()


def _lock(connection: Connection, context: Context) -> None:
    """One at a time: SQLite's transaction holds the write lock already."""
    if connection.dialect.name == "postgresql":
        name = f"celery_durable/{context.schema.metadata.schema}/{context.schema.version_table}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def _config(connection: Connection, context: Context) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    config.attributes["schema"] = context.schema
    return config
