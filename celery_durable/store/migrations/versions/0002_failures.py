"""Publishes that the broker did not confirm are counted apart from those that it did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    schema = context.config.attributes["schema"]
    prefix = schema.version_table.removesuffix("version")
    op.add_column(
        f"{prefix}executions",
        sa.Column("failures", sa.Integer, nullable=False, server_default=sa.text("0")),
        schema=schema.metadata.schema,
    )
