"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from celery_durable.store.dialect import UtcDateTime

revision = "0001"
down_revision = None


def upgrade() -> None:
    schema = context.config.attributes["schema"]
    prefix = schema.version_table.removesuffix("version")
    where = schema.metadata.schema
    _executions(prefix, where)
    _journal(prefix, where)
    _schedule(prefix, where)


def _executions(prefix: str, where: str | None) -> None:
    op.create_table(
        f"{prefix}executions",
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("task_id", sa.String(255), primary_key=True),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("owner", sa.Text),
        sa.Column("wake_at", UtcDateTime),
        sa.Column("sends", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("message_version", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("nesting", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("send_id", sa.Text),
        sa.Column("crashes", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("draining", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("outcome", sa.Text),
        sa.Column("headers", sa.Text),
        sa.Column("properties", sa.Text),
        sa.Column("body", sa.LargeBinary),
        sa.Column("content_type", sa.Text),
        sa.Column("content_encoding", sa.Text),
        sa.Column("compression", sa.Text),
        sa.Column("exchange", sa.Text),
        sa.Column("routing_key", sa.Text),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("updated_at", UtcDateTime, nullable=False),
        sa.Column("finished_at", UtcDateTime),
        schema=where,
    )
    for name, column, condition in (
        ("due", "wake_at", "wake_at IS NOT NULL"),
        ("finished", "finished_at", "finished_at IS NOT NULL AND body IS NOT NULL"),
        ("tombstones", "finished_at", "finished_at IS NOT NULL AND body IS NULL"),
    ):
        op.create_index(
            f"{prefix}executions_{name}",
            f"{prefix}executions",
            ["namespace", column],
            schema=where,
            postgresql_where=sa.text(condition),
            sqlite_where=sa.text(condition),
        )


def _journal(prefix: str, where: str | None) -> None:
    op.create_table(
        f"{prefix}journal",
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("task_id", sa.String(255), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("timer_id", sa.String(36), nullable=False),
        sa.Column("due_at", UtcDateTime),
        sa.Column("payload", sa.LargeBinary),
        sa.Column("content_type", sa.Text),
        sa.Column("content_encoding", sa.Text),
        sa.Column("recorded_at", UtcDateTime, nullable=False),
        schema=where,
    )


def _schedule(prefix: str, where: str | None) -> None:
    op.create_table(
        f"{prefix}schedule",
        sa.Column("namespace", sa.String(255), primary_key=True),
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("last_run_at", UtcDateTime),
        sa.Column("next_run_at", UtcDateTime),
        sa.Column("total_run_count", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("taken_until", UtcDateTime),
        sa.Column("seen_at", UtcDateTime, nullable=False),
        schema=where,
    )
