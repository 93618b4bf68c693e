"""``wake``, ``postpone``, ``cancel``, ``release``: each for some ids, or for all that a filter finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click
from celery.bin.base import handle_preload_options

from celery_durable.cli.base import FAILED, DurableCommand, Failure, extension, say, say_json
from celery_durable.cli.filters import chosen_by, filter_options
from celery_durable.cli.naming import unknown_id, unknown_task
from celery_durable.cli.tables import distance_text, shown, time_text
from celery_durable.cli.values import instant, span
from celery_durable.errors import ExecutionNotFound, OperationRefused
from celery_durable.operations import Changed, FilterOptions
from celery_durable.records import Execution, Status

if TYPE_CHECKING:
    from celery_durable.extension import Durable

#: More than so many tasks are changed only by who has said so.
CONFIRMED = 20
#: So many ids are shown by a dry run.
SHOWN = 10

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Verb:
    """One operation: its names, the states that it is about, and how it is done."""

    name: str
    done: str
    statuses: Iterable[str]
    #: Gives the new time, or a word on what was done. Raises what stands in the way.
    on_one: Callable[[Durable, str], datetime | str | None]
    on_many: Callable[[Durable, FilterOptions], Changed]
    #: It is also for ids that no task has yet.
    takes_unknown: bool = False


def _arguments(command: _Command) -> _Command:
    for option in reversed(
        (
            click.argument("task_ids", nargs=-1, metavar="[TASK_ID]..."),
            filter_options,
            click.option(
                "--all", "everything", is_flag=True, help="All that can be, where no filter is given."
            ),
            click.option("--dry-run", is_flag=True, help="Only tell what would be changed."),
            click.option("--yes", "-y", is_flag=True, help="Do not ask, however many there are."),
            click.option("--json", "as_json", is_flag=True, help="JSON on stdout."),
        )
    ):
        command = option(command)
    return command


@click.command(cls=DurableCommand)
@_arguments
@click.pass_context
@handle_preload_options
def wake(ctx: click.Context, **options: Any) -> None:
    """Let tasks that sleep, are scheduled or wait for a retry go on now."""
    verb = Verb("wake", "woken", Status.PARKED, lambda d, i: d.wake(i), lambda d, chosen: d.wake(**chosen))
    _run(ctx, verb, options)


@click.command(cls=DurableCommand)
@_arguments
@click.option(
    "--until", type=instant, metavar="TIME", help="To this time (2030-03-01T09:00), or span from now (2h)."
)
@click.option(
    "--by", type=span, metavar="SPAN", help="By this span from each one's own time: 30s, 5m, 1h, -2d."
)
@click.pass_context
@handle_preload_options
def postpone(
    ctx: click.Context, until: datetime | timedelta | None, by: timedelta | None, **options: Any
) -> None:
    """Move tasks that sleep, are scheduled or wait for a retry to another time."""
    if (until is None) == (by is None):
        raise click.UsageError("Say either --until or --by.", ctx)
    at = None if until is None else _to_come(ctx, until)
    verb = Verb(
        "postpone",
        "postponed",
        Status.PARKED,
        lambda d, i: d.postpone(i, until=at, by=by),
        lambda d, chosen: d.postpone(until=at, by=by, **chosen),
    )
    _run(ctx, verb, options)


def _to_come(ctx: click.Context, until: datetime | timedelta) -> datetime:
    """The time that --until names. One that has passed would let tasks go on at once: most likely a slip."""
    durable = extension(ctx)
    now: datetime = durable.store.now()
    at = now + until if isinstance(until, timedelta) else durable.instant_of(until)
    if at < now:
        raise click.UsageError(
            f"--until {time_text(at, ctx.obj.app.timezone)} is past ({distance_text(at, now)}): use"
            " `durable wake` to let tasks go on now.",
            ctx,
        )
    return at


@click.command(cls=DurableCommand)
@_arguments
@click.option("--reason", default="revoked", show_default=True, help="Kept with the task.")
@click.option(
    "--unknown", is_flag=True, help="With ids: also note it for one whose message is still to come."
)
@click.pass_context
@handle_preload_options
def cancel(ctx: click.Context, reason: str, unknown: bool, **options: Any) -> None:
    """Cancel tasks for good: their results are REVOKED, nothing follows them.

    What runs is stopped at its next durable call.
    """
    if unknown and not options["task_ids"]:
        raise click.UsageError("--unknown is for task ids: no filter finds what is still to come.", ctx)
    verb = Verb(
        "cancel",
        "cancelled",
        (Status.LIVE - {Status.ENDING}) | {Status.QUARANTINED},
        lambda d, i: _cancel_one(d, i, reason, unknown),
        lambda d, chosen: d.cancel(reason=reason, **chosen),
        takes_unknown=unknown,
    )
    _run(ctx, verb, options)


def _cancel_one(durable: Durable, task_id: str, reason: str, unknown: bool) -> str | None:
    if not unknown and _found(durable, task_id) is None:
        hint = "--unknown notes the cancel for a message that is still to come"
        raise Failure(f"{unknown_id(durable, task_id)}; {hint}.")
    if not durable.cancel(task_id, reason=reason):
        raise OperationRefused("cancel", task_id, "it has come to its end")
    has_started = durable.get(task_id).message is not None
    return None if has_started else "no task with this id is known yet; its first message will not be run"


@click.command(cls=DurableCommand)
@_arguments
@click.pass_context
@handle_preload_options
def release(ctx: click.Context, **options: Any) -> None:
    """Let quarantined tasks run again, at once."""
    verb = Verb(
        "release",
        "released",
        (Status.QUARANTINED,),
        lambda d, i: d.release(i),
        lambda d, chosen: d.release(**chosen),
    )
    _run(ctx, verb, options)


def _run(ctx: click.Context, verb: Verb, options: dict[str, Any]) -> None:
    durable = extension(ctx)
    chosen = chosen_by(durable, options)
    task_ids, everything = options["task_ids"], options["everything"]
    if bool(task_ids) + bool(chosen or everything) != 1:
        raise click.UsageError("Say task ids, or a filter, or --all.", ctx)
    if task_ids:
        _change_ids(ctx, durable, verb, tuple(dict.fromkeys(task_ids)), options)
    else:
        _change_found(ctx, durable, verb, _narrowed(durable, chosen, verb.statuses), options)


# -- by their ids --------------------------------------------------------------------------------


def _change_ids(
    ctx: click.Context, durable: Durable, verb: Verb, task_ids: tuple[str, ...], options: dict[str, Any]
) -> None:
    if options["dry_run"]:
        _rehearse_ids(ctx, durable, verb, task_ids, options["as_json"])
        return
    _confirm(len(task_ids), verb, options["yes"])
    done: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for task_id in task_ids:
        try:
            done[task_id] = verb.on_one(durable, task_id)
        except ExecutionNotFound:
            refused[task_id] = f"{unknown_id(durable, task_id)}."
        except (Failure, OperationRefused) as error:
            refused[task_id] = str(error)
    _report_ids(ctx, verb, done, refused, options["as_json"])


def _report_ids(
    ctx: click.Context, verb: Verb, done: dict[str, Any], refused: dict[str, str], as_json: bool
) -> None:
    if as_json:
        changed = {i: note.isoformat() if isinstance(note, datetime) else note for i, note in done.items()}
        _say_changes(ctx, verb.done, len(done), changed, refused)
    else:
        for task_id, note in done.items():
            word = f"due {time_text(note, ctx.obj.app.timezone)}" if isinstance(note, datetime) else note
            say(ctx, f"{task_id} {verb.done}" + (f": {word}" if word else ""))
    for reason in refused.values():
        ctx.obj.error(f"Error: {' '.join(reason.split())}")
    if refused:
        ctx.exit(FAILED)


def _rehearse_ids(
    ctx: click.Context, durable: Durable, verb: Verb, task_ids: tuple[str, ...], as_json: bool
) -> None:
    found = {task_id: _found(durable, task_id) for task_id in task_ids}
    states = {i: "not found" if e is None else str(e.status) for i, e in found.items()}
    fitting = {
        i for i, e in found.items() if (verb.takes_unknown if e is None else e.status in verb.statuses)
    }
    if as_json:
        accepted = {i: state for i, state in states.items() if i in fitting}
        refused = {i: state for i, state in states.items() if i not in fitting}
        _say_changes(ctx, f"would_be_{verb.done}", len(accepted), accepted, refused)
        return
    for task_id, state in states.items():
        answer = f"would be {verb.done}" if task_id in fitting else f"would not be {verb.done}"
        say(ctx, f"{shown(task_id)} {answer}: {state}")


def _say_changes(
    ctx: click.Context, what: str, count: int, ids: dict[str, Any] | None, refused: dict[str, str]
) -> None:
    """The one shape of an answer in JSON; ``ids`` is null where a filter chose them."""
    say_json(ctx, {what: count, "ids": ids, "refused": refused})


def _found(durable: Durable, task_id: str) -> Execution | None:
    try:
        return durable.get(task_id)
    except ExecutionNotFound:
        return None


# -- by a filter ---------------------------------------------------------------------------------


def _narrowed(durable: Durable, chosen: FilterOptions, statuses: Iterable[str]) -> FilterOptions | None:
    """The filter without the states that the verb is not about; None: nothing is left."""
    wanted = durable.filter(**chosen).statuses
    left = set(statuses) & set(wanted) if wanted else set(statuses)
    if not left:
        return None
    return {**chosen, "status": sorted(left)}


def _change_found(
    ctx: click.Context, durable: Durable, verb: Verb, chosen: FilterOptions | None, options: dict[str, Any]
) -> None:
    count = 0 if chosen is None else durable.count(**chosen)
    if chosen is None or count == 0 or options["dry_run"]:
        _rehearse(ctx, durable, verb, chosen, count, options)
        return
    _confirm(count, verb, options["yes"])
    changed = len(verb.on_many(durable, chosen))
    if options["as_json"]:
        _say_changes(ctx, verb.done, changed, None, {})
    else:
        say(ctx, f"{_tasks(changed)} {verb.done}")


def _rehearse(
    ctx: click.Context,
    durable: Durable,
    verb: Verb,
    chosen: FilterOptions | None,
    count: int,
    options: dict[str, Any],
) -> None:
    key = f"would_be_{verb.done}" if options["dry_run"] else verb.done
    if options["as_json"]:
        _say_changes(ctx, key, count, None, {})
        return
    if chosen is None or count == 0:
        say(ctx, f"There is nothing to {verb.name}{unknown_task(durable, chosen)}.")
        return
    say(ctx, f"{_tasks(count)} would be {verb.done}, for example:")
    for execution in durable.list(limit=SHOWN, **chosen):
        say(ctx, f"  {shown(execution.task_id)}  {shown(execution.task_name)}  {execution.status}")


def _confirm(count: int, verb: Verb, yes: bool) -> None:
    if yes or count <= CONFIRMED:
        return
    try:
        agreed = click.confirm(f"{verb.name.capitalize()} {_tasks(count)}?", err=True)
    except click.Abort:
        click.echo(err=True)
        agreed = False
    if not agreed:
        raise Failure(f"Nothing was changed: --yes is needed to {verb.name} {_tasks(count)}.")


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"
