"""The group, its commands' manners with errors, and what they find in Celery's context."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_durable.errors import ConfigurationError, DurableError, StoreUnavailable, WrongTables

if TYPE_CHECKING:
    from celery_durable.extension import Durable

FAILED, AWAY = 1, 3

# A newer click raises it where a group is called without a command: that shows the help.
_ASKS_FOR_HELP: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())


class Failure(click.ClickException):
    """Ends a command with one line on stderr."""

    exit_code = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Misuse(Failure):
    """The command line is wrong."""

    exit_code = 2


class Away(Failure):
    """The database cannot be reached."""

    exit_code = AWAY


class OneLineErrors(click.Command):
    """A command that tells each error in one line: a traceback is for mistakes of ours only."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise _in_one_line(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _in_one_line(error) from error
        except WrongTables as error:
            error.broke_off("a command")
            raise Failure(str(error)) from error
        except StoreUnavailable as error:
            error.broke_off("a command")
            raise Away(str(error)) from error
        except ConfigurationError as error:
            raise Failure("; ".join(error.problems)) from error
        except DurableError as error:
            raise Failure(str(error)) from error


class DurableCommand(OneLineErrors, CeleryCommand):
    """A command of ``celery durable``."""


class DurableGroup(OneLineErrors, click.Group):
    """``celery durable`` itself."""


def _in_one_line(error: click.UsageError) -> click.ClickException:
    if isinstance(error, _ASKS_FOR_HELP):
        return error
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and error.option_name in ("-A", "--app"):
        message += " It goes before the command, as in `celery -A proj durable …`"
    elif error.ctx is not None:
        message += f" (see {error.ctx.command_path} --help)"
    return Misuse(message)


@click.group(name="durable", cls=DurableGroup)
@click.pass_context
@handle_preload_options
def durable(ctx: click.Context, **_: Any) -> None:
    """See and steer durable tasks: what sleeps, what runs, what has failed."""


def extension(ctx: click.Context, *, checked: bool = True) -> Durable:
    """The app's Durable; ``checked``: with the tables that this release needs."""
    found: Durable | None = getattr(ctx.obj.app, "durable", None)
    if found is None:
        raise Failure(
            f"The app {ctx.obj.app.main or '(none)'} has no Durable: name the app, as in"
            " `celery -A proj durable …`, and install Durable(app) in it."
        )
    if checked:
        found.store.check()
    return found


def say(ctx: click.Context, text: str) -> None:
    """A line on stdout."""
    ctx.obj.echo(text)


def say_json(ctx: click.Context, value: Any) -> None:
    """A JSON document on stdout."""
    ctx.obj.echo(json.dumps(value, indent=2))


def say_json_items(ctx: click.Context, items: Iterable[Any]) -> None:
    """A JSON list on stdout, item by item, so that it may be of any length."""
    before = "["
    for item in items:
        ctx.obj.echo(before + json.dumps(item), nl=False)
        before = ",\n "
    ctx.obj.echo("[]" if before == "[" else "]")
