"""A row remembers which sends have used its id before the one at hand."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    schema = context.config.attributes["schema"]
    prefix = schema.version_table.removesuffix("version")
    op.add_column(f"{prefix}executions", sa.Column("past_sends", sa.Text), schema=schema.metadata.schema)
