"""``upgrade``, ``prune``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click
from celery.bin.base import handle_preload_options

from celery_durable.cli.base import DurableCommand, extension, say, say_json
from celery_durable.cli.values import span
from celery_durable.store.upgrade import current_version


@click.command(cls=DurableCommand)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
@handle_preload_options
def upgrade(ctx: click.Context, as_json: bool, **_: Any) -> None:
    """Create the tables, or bring them to this release's version."""
    durable = extension(ctx, checked=False)
    before = current_version(durable.store.context)
    durable.upgrade()
    after = current_version(durable.store.context)
    if as_json:
        say_json(ctx, {"before": before, "after": after})
    elif before == after:
        say(ctx, f"The tables are at version {after} already.")
    else:
        say(ctx, f"The tables are at version {after} now; before, {before or 'there were none'}.")


@click.command(cls=DurableCommand)
@click.option(
    "--older-than",
    type=span,
    metavar="SPAN",
    help="What ended longer ago than this, in place of the settings.",
)
@click.option("--dry-run", is_flag=True, help="Only tell how many there are.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
@handle_preload_options
def prune(ctx: click.Context, older_than: timedelta | None, dry_run: bool, as_json: bool, **_: Any) -> None:
    """Throw away what has ended and is past its retention. Schedulers do so by themselves now and then."""
    durable = extension(ctx)
    if dry_run:
        count = durable.store.queries.prunable(*durable.retentions(older_than))
    else:
        count = durable.prune(older_than=older_than)
    if as_json:
        say_json(ctx, {"would_be_pruned" if dry_run else "pruned": count})
    else:
        say(ctx, f"{count} rows {'would be' if dry_run else 'were'} pruned.")
