"""``check``: whether everything that durable tasks need is there, for people and for health probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from celery_durable.addresses import why_unreachable
from celery_durable.cli.base import AWAY, FAILED, DurableCommand, extension, say, say_json
from celery_durable.cli.tables import facts, span_text
from celery_durable.clock import monotonic
from celery_durable.errors import ConfigurationError, StoreUnavailable, WrongTables
from celery_durable.task import DurableTask

if TYPE_CHECKING:
    from celery_durable.extension import Durable

OK, WARNING, FAILURE = "ok", "warning", "failed"

_REMEDY = "run `celery beat`, or `celery durable scheduler` beside another beat"

#: Seconds by which the clocks of this machine and the database may differ without a word.
SKEW = 5.0
#: Seconds to wait for the broker.
BROKER_TIMEOUT = 5
#: Seconds after which an unseen scheduler, or a due task that nobody has claimed, is worth a word.
PATIENCE = 60.0


@dataclass(frozen=True)
class Finding:
    """What one check has found."""

    name: str
    level: str
    detail: str
    exit_code: int = FAILED


@click.command(cls=DurableCommand)
@click.option("--strict", is_flag=True, help="A warning is a failure.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
@handle_preload_options
def check(ctx: click.Context, strict: bool, as_json: bool, **_: Any) -> None:
    """Check settings, database, tables, clocks, broker and scheduler.

    For a health probe: the exit code is 0 where all is well, 3 where the database is away, else 1.
    """
    findings = list(_findings(extension(ctx, checked=False)))
    if as_json:
        say_json(ctx, [{"check": f.name, "level": f.level, "detail": f.detail} for f in findings])
    else:
        for line in facts((f.name, f"{f.level}: {f.detail}") for f in findings):
            say(ctx, line)
    ill = [f.exit_code for f in findings if f.level == FAILURE or (strict and f.level == WARNING)]
    if ill:
        ctx.exit(max(ill))


def _findings(durable: Durable) -> Iterator[Finding]:
    settings = _settings(durable)
    yield settings
    if settings.level == FAILURE:
        return
    database = _tried("database", durable, _database)
    yield database
    if database.level == OK:
        schema = _tried("tables", durable, _tables)
        yield schema
        yield _tried("clock", durable, _clock)
        if schema.level == OK:
            yield _tried("scheduler", durable, _scheduler)
            yield _tried("lateness", durable, _lateness)
    yield _broker(durable)


def _tried(name: str, durable: Durable, examine: Callable[[Durable], Finding]) -> Finding:
    try:
        return examine(durable)
    except WrongTables as error:
        return Finding(name, FAILURE, str(error))
    except StoreUnavailable as error:
        return Finding(name, FAILURE, error.reason, AWAY)
    except ConfigurationError as error:
        return Finding(name, FAILURE, "; ".join(error.problems))


def _settings(durable: Durable) -> Finding:
    """The settings of the app and of each durable task."""
    app = durable.app
    try:
        app.loader.import_default_modules()
        tasks = [task for task in app.tasks.values() if isinstance(task, DurableTask)]
        for task in tasks:
            durable.limits(task)
        namespace = durable.settings.namespace
    except ConfigurationError as error:
        return Finding("settings", FAILURE, "; ".join(error.problems))
    except Exception as error:  # noqa: BLE001 - the user's own modules
        return Finding("settings", FAILURE, f"the app's modules cannot be imported: {error!r}")
    return Finding("settings", OK, f"namespace {namespace}, {len(tasks)} durable tasks")


def _database(durable: Durable) -> Finding:
    asked_at = monotonic()
    durable.store.now()
    return Finding("database", OK, f"{durable.settings.redacted_url} answers in {_ms(asked_at)}")


def _tables(durable: Durable) -> Finding:
    durable.store.check()
    return Finding("tables", OK, "of this release")


def _clock(durable: Durable) -> Finding:
    """This machine's clock decides nothing here, but it goes into the ``eta`` of Celery's own messages."""
    before = durable.app.now()
    there = durable.store.now()
    skew = ((there - before) + (there - durable.app.now())).total_seconds() / 2
    level = OK if abs(skew) <= SKEW else WARNING
    return Finding("clock", level, f"the database is {abs(skew):.1f}s {'ahead' if skew > 0 else 'behind'}")


def _scheduler(durable: Durable) -> Finding:
    seen = durable.store.schedule.seconds_since_tick()
    patience = max(PATIENCE, 3 * durable.settings.poll_interval)
    if seen is None:
        return Finding(
            "scheduler", WARNING, f"none was ever seen: what sleeps will not wake. To wake it, {_REMEDY}"
        )
    detail = f"seen {span_text(max(seen, 0.0))} ago"
    if seen <= patience:
        return Finding("scheduler", OK, detail)
    return Finding("scheduler", WARNING, f"{detail}: what sleeps will not wake. To wake it, {_REMEDY}")


def _lateness(durable: Durable) -> Finding:
    stats = durable.stats()
    detail = f"{stats.overdue} due, for {span_text(stats.lateness)}" if stats.overdue else "nothing is due"
    if stats.lateness <= PATIENCE:
        return Finding("lateness", OK, detail)
    return Finding("lateness", WARNING, f"{detail}. Where no scheduler runs, {_REMEDY}; else add workers")


def _broker(durable: Durable) -> Finding:
    app = durable.app
    asked_at = monotonic()
    try:
        with app.connection_for_write() as connection:
            url = connection.as_uri()
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=BROKER_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - each transport has errors of its own
        return Finding(
            "broker", FAILURE, f"{type(error).__name__}: {why_unreachable(app.conf.broker_write_url, error)}"
        )
    return Finding("broker", OK, f"{url} answers in {_ms(asked_at)}")


def _ms(asked_at: float) -> str:
    return f"{(monotonic() - asked_at) * 1000:.1f} ms"
