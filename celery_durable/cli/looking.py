"""``list``, ``show``, ``stats``."""

from __future__ import annotations

from datetime import datetime, tzinfo
from typing import Any

import click
from celery.bin.base import handle_preload_options

from celery_durable.cli import describing
from celery_durable.cli.base import DurableCommand, Failure, extension, say, say_json, say_json_items
from celery_durable.cli.filters import chosen_by, filter_options
from celery_durable.cli.naming import unknown_id, unknown_task
from celery_durable.cli.tables import distance_text, facts, span_text, table, time_text
from celery_durable.errors import ExecutionNotFound
from celery_durable.records import Execution, JournalEntry
from celery_durable.store.statistics import Stats

_HEAD = ("ID", "TASK", "STATUS", "DUE", "OWNER", "CRASHES")


@click.command(name="list", cls=DurableCommand)
@filter_options
@click.option(
    "--limit", "-n", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many."
)
@click.option("--offset", type=click.IntRange(min=0), default=0, help="Leave out so many at the head.")
@click.option("--all", "everything", is_flag=True, help="All of them, however many.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
@handle_preload_options
def list_(
    ctx: click.Context, limit: int, offset: int, everything: bool, as_json: bool, **options: Any
) -> None:
    """List durable tasks, those due first at the head."""
    durable = extension(ctx)
    chosen = chosen_by(durable, options)
    now, zone = durable.store.now(), ctx.obj.app.timezone
    found = durable.list(limit=None if everything else limit, offset=offset, **chosen)
    if as_json:
        say_json_items(ctx, (describing.as_row(execution) for execution in found))
        return
    count = 0

    def rows() -> Any:
        nonlocal count
        for count, execution in enumerate(found, 1):  # noqa: B007 - how many there were
            yield _cells(execution, now, zone)

    for line in table(_HEAD, rows()):
        say(ctx, line)
    if count == 0:
        nothing = f"No task matches{unknown_task(durable, chosen)}."
        say(ctx, nothing if chosen else "There are no durable tasks.")
    elif count == limit and not everything:
        say(ctx, f"Only the first {limit} are shown: --offset {offset + limit} shows the next.")


def _cells(execution: Execution, now: datetime, zone: tzinfo) -> tuple[str, ...]:
    return (
        execution.task_id,
        execution.task_name or "(not started)",
        execution.status,
        _due_text(execution, now, zone),
        execution.owner or "",
        str(execution.crashes or ""),
    )


def _due_text(execution: Execution, now: datetime, zone: tzinfo) -> str:
    """When it goes on; once a wake is on its way, that. Of what runs, its lease."""
    if execution.owner is not None and execution.wake_at is not None:
        if execution.wake_at <= now:
            return f"lease ran out {distance_text(execution.wake_at, now)}"
        return f"lease until {time_text(execution.wake_at, zone)} ({distance_text(execution.wake_at, now)})"
    if execution.owner is None and execution.sends > 0:
        return "wake sent" if execution.sends == 1 else f"wake sent {execution.sends} times"
    if execution.due_at is None:
        return ""
    return f"{time_text(execution.due_at, zone)} ({distance_text(execution.due_at, now)})"


@click.command(cls=DurableCommand)
@click.argument("task_id")
@click.option("--reveal", is_flag=True, help="Show arguments, step results and the outcome's value.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
@handle_preload_options
def show(ctx: click.Context, task_id: str, reveal: bool, as_json: bool, **_: Any) -> None:
    """Show one durable task with its history."""
    durable = extension(ctx)
    try:
        execution = durable.get(task_id)
    except ExecutionNotFound as error:
        raise Failure(f"{unknown_id(durable, task_id)}.") from error
    if as_json:
        say_json(ctx, describing.as_document(execution, reveal=reveal))
        return
    now, zone = durable.store.now(), ctx.obj.app.timezone
    for line in facts(_facts(execution, now, zone, reveal)):
        say(ctx, line)
    if execution.journal:
        say(ctx, "")
        head = ("POSITION", "KIND", "NAME", "RECORDED", "DUE", *(("RESULT",) if reveal else ()))
        for line in table(head, (_entry_cells(entry, zone, reveal) for entry in execution.journal)):
            say(ctx, line)


def _facts(execution: Execution, now: datetime, zone: tzinfo, reveal: bool) -> list[tuple[str, str]]:
    def moment(instant: datetime | None) -> str:
        return "" if instant is None else f"{time_text(instant, zone)} ({distance_text(instant, now)})"

    is_held = execution.owner is not None
    wakes = f"{execution.sends} sent, not claimed yet" if execution.sends else ""
    return [
        ("Task", execution.task_name or "(its message has not come yet)"),
        ("Id", execution.task_id),
        ("Status", execution.status),
        ("Due", moment(execution.due_at)),
        ("Wakes", wakes),
        ("Owner", execution.owner or ""),
        ("Lease until", moment(execution.wake_at) if is_held else ""),
        ("Token", str(execution.token)),
        ("Crashes", str(execution.crashes or "")),
        ("Outcome", describing.outcome_text(execution)),
        ("Created", moment(execution.created_at)),
        ("Updated", moment(execution.updated_at)),
        ("Finished", moment(execution.finished_at)),
        *((name, str(value)) for name, value in describing.message_facts(execution, reveal=reveal).items()),
        *([("Value", describing.outcome_value(execution) or "")] if reveal else []),
    ]


def _entry_cells(entry: JournalEntry, zone: tzinfo, reveal: bool) -> tuple[str, ...]:
    cells = (
        str(entry.position),
        entry.kind,
        entry.name,
        time_text(entry.recorded_at, zone),
        time_text(entry.due_at, zone) + (" (over)" if entry.is_over else ""),
    )
    return (*cells, describing.payload_text(entry) or "") if reveal else cells


@click.command(cls=DurableCommand)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
@handle_preload_options
def stats(ctx: click.Context, as_json: bool, **_: Any) -> None:
    """Count durable tasks, and tell how late they are."""
    numbers = extension(ctx).stats()
    if as_json:
        say_json(ctx, describing.as_numbers(numbers))
        return
    for line in facts(_stats_facts(numbers, ctx.obj.app.timezone)):
        say(ctx, line)


def _stats_facts(numbers: Stats, zone: tzinfo) -> list[tuple[str, str]]:
    seen = numbers.scheduler_seen
    due = numbers.next_due_at
    return [
        *((status, str(count)) for status, count in sorted(numbers.counts.items())),
        ("outbox", str(numbers.outbox or "")),
        ("", ""),
        (
            "overdue",
            f"{numbers.overdue}" + (f", for {span_text(numbers.lateness)}" if numbers.lateness else ""),
        ),
        (
            "next due",
            f"{time_text(due, zone)} ({distance_text(due, numbers.now)})" if due else "nothing waits",
        ),
        (
            "wakes not claimed",
            f"{numbers.unclaimed}"
            + (f", sent up to {numbers.most_sends} times" if numbers.most_sends else ""),
        ),
        (
            "leases",
            f"{numbers.leases}, {numbers.leases_near_end} near their end, {numbers.leases_expired} run out",
        ),
        ("scheduler", "never seen" if seen is None else f"seen {span_text(max(seen, 0.0))} ago"),
    ]
