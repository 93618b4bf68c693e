"""The options by which executions are chosen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery_durable.cli.values import instant
from celery_durable.operations import STATUSES, FilterOptions, flaw_of_condition
from celery_durable.texts import shortened

if TYPE_CHECKING:
    from celery_durable.extension import Durable

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--status",
        "-s",
        multiple=True,
        type=click.Choice(STATUSES),
        metavar="STATUS",
        help=f"In this state; may be given more than once: {', '.join(STATUSES)}.",
    ),
    click.option("--task", "-t", metavar="NAME", help="Of the task with this name."),
    click.option(
        "--due-before",
        type=instant,
        metavar="TIME",
        help="Due before this time (2030-03-01T09:00) or span from now (2h).",
    ),
    click.option("--due-after", type=instant, metavar="TIME", help="Due after this time or span from now."),
    click.option("--owner", metavar="OWNER", help="Run by this owner: a node name, or the beginning of one."),
    click.option("--text", metavar="TEXT", help="With this text in the id or the task's name."),
)


def filter_options(command: _Command) -> _Command:
    """Give a command the options of a filter."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def chosen_by(durable: Durable, options: dict[str, Any]) -> FilterOptions:
    """The filter in a command's options, taken out of them; a span counts from the database's now."""
    chosen = FilterOptions()
    if status := options.pop("status", ()):
        chosen["status"] = status
    for name in ("task", "owner", "text"):
        if (value := options.pop(name, None)) is not None:
            flaw = flaw_of_condition(value)
            if flaw is not None:
                raise click.UsageError(f"--{name} {shortened(value)} {flaw}.")
            chosen[name] = value
    for name in ("due_before", "due_after"):
        if (value := options.pop(name, None)) is not None:
            chosen[name] = _instant(durable, value)  # type: ignore[literal-required]
    return chosen


def _instant(durable: Durable, value: datetime | timedelta) -> datetime:
    if isinstance(value, timedelta):
        now: datetime = durable.store.now()
        return now + value
    return durable.instant_of(value)
