"""``celery -A proj durable …``: see what sleeps, move it, stop it, and look after the tables.

Exit codes: 0 done; 1 not found, refused or a failed check; 2 a mistake in the command line; 3 the
database is away.
"""

from __future__ import annotations

from celery_durable.cli.base import durable
from celery_durable.cli.changing import cancel, postpone, release, wake
from celery_durable.cli.checking import check
from celery_durable.cli.looking import list_, show, stats
from celery_durable.cli.tending import prune, scheduler, upgrade

__all__ = ["durable"]

for command in (list_, show, stats, wake, postpone, cancel, release, check, upgrade, prune, scheduler):
    durable.add_command(command)
