"""``upgrade``, ``prune``, ``scheduler``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from celery.bin.base import LOG_LEVEL, handle_preload_options

from celery_durable.cli.base import DurableCommand, extension, say, say_json
from celery_durable.cli.values import span
from celery_durable.scheduler import run_scheduler
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
    if older_than is not None and older_than < timedelta(0):
        raise click.UsageError("--older-than must not be negative.", ctx)
    durable = extension(ctx)
    if dry_run:
        count = durable.store.queries.prunable(*durable.retentions(older_than))
    else:
        count = durable.prune(older_than=older_than)
    if as_json:
        say_json(ctx, {"would_be_pruned" if dry_run else "pruned": count})
    else:
        say(ctx, f"{count} rows {'would be' if dry_run else 'were'} pruned.")


@click.command(cls=DurableCommand)
@click.option("--loglevel", "-l", type=LOG_LEVEL, default="INFO", show_default=True, help="What is logged.")
@click.option("--logfile", "-f", help="Where to; stderr by default.")
@click.option(
    "--health-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file that is written at every round, for a health probe to look at.",
)
@click.pass_context
@handle_preload_options
def scheduler(
    ctx: click.Context, loglevel: int, logfile: str | None, health_file: Path | None, **_: Any
) -> None:
    """Wake what is due, beside another beat (django-celery-beat, RedBeat). Run as many as you like."""
    durable = extension(ctx, checked=False)
    durable.app.log.setup(loglevel=loglevel, logfile=logfile)
    run_scheduler(durable.app, health_file=health_file)
