"""Crash points of workers and clients with what is played there, and what must come of it.

A process of its own plays each scene until it is struck; then another worker takes over.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import chord
from sqlalchemy import update

from celery_durable.message import mark_send
from celery_durable.points import Point
from celery_durable.records import Outcome, OutcomeKind, Status
from celery_durable.store.base import outcome_to_text
from tests.nodes import Bench
from tests.nodes.process import LocalProcess

#: How often something was seen: exactly so often, or between two numbers.
Times = int | tuple[int, int]


@dataclass(frozen=True)
class Sent:
    """What was sent: what the caller waits for, and the id of the row that the scene is about."""

    result: Any
    task_id: str

    @classmethod
    def of(cls, result: Any) -> Sent:
        return cls(result, result.id)


def _nothing(bench: Bench, process: LocalProcess, sent: Sent) -> None:
    """There is nothing to do."""


@dataclass(frozen=True)
class Act:
    """A task, and how it ends whatever happens."""

    send: Callable[[Bench, str], Sent]
    #: What leads to the point after the task was sent.
    lead: Callable[[Bench, LocalProcess, Sent], None] = _nothing
    #: What is done after the worker was struck.
    follow: Callable[[Bench, LocalProcess, Sent], None] = _nothing
    #: What is done when another worker is up.
    finish: Callable[[Bench, LocalProcess, Sent], None] = _nothing
    state: str = "SUCCESS"
    status: str = Status.SUCCEEDED
    #: The result: a value, or the name of the exception's class.
    value: Any = None
    #: The kinds of the journal's entries at the end.
    journal: tuple[str, ...] = ()
    #: What the witness has seen when no fault strikes.
    seen: Mapping[str, Times] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """One act, struck at one point. ``seen`` is what the fault adds to it; ``thawed`` what a freeze adds."""

    point: str
    act: Act
    seen: Mapping[str, Times] = field(default_factory=dict)
    thawed: Mapping[str, Times] = field(default_factory=dict)
    pool: str = "solo"
    #: What a client is to do, which is struck instead of a worker: the arguments of `celery`, or of Python.
    #: It gets the name of the scene's queue.
    client: Callable[[str], Sequence[str]] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.point} → {self.act.value}"

    @property
    def mark(self) -> str:
        """The name of the file that is left at the point."""
        return self.point.partition(":")[0]

    def expected(self, *, frozen: bool) -> dict[str, Times]:
        return {**self.act.seen, **self.seen, **(self.thawed if frozen else {})}


# -- what is played ------------------------------------------------------------------------------


def walk(bench: Bench, queue: str) -> Sent:
    project, task_id = bench.project, f"walk-{queue}"
    followers = [project.plain_follower.si(task_id), project.durable_follower.si(task_id)]
    return Sent.of(project.walk.apply_async(queue=queue, task_id=task_id, link=followers))


def fail(bench: Bench, queue: str) -> Sent:
    return Sent.of(bench.project.fail.apply_async(queue=queue, link_error=bench.project.failed.s()))


def unheard(bench: Bench, queue: str) -> Sent:
    """Only its follower has a result."""
    task_id = f"unheard-{queue}"
    follower = bench.project.answer.si(task_id).set(task_id=f"answer-{queue}")
    bench.project.unheard.apply_async(queue=queue, task_id=task_id, link=follower)
    return Sent(bench.app().AsyncResult(f"answer-{queue}"), task_id)


def in_chord(bench: Bench, queue: str) -> Sent:
    members = [bench.project.member.s().set(queue=queue), bench.project.member.s()]
    result = chord(members)(bench.project.gather.s())
    return Sent(result, result.parent.results[0].id)


def task(name: str, *args: Any) -> Callable[[Bench, str], Sent]:
    return lambda bench, queue: Sent.of(getattr(bench.project, name).apply_async(args, queue=queue))


def hang(bench: Bench, queue: str) -> Sent:
    return Sent.of(bench.project.hang.apply_async(queue=queue, link_error=bench.project.failed.s()))


def in_an_hour(bench: Bench, queue: str) -> Sent:
    """A countdown, which needs no worker before it is over."""
    return Sent.of(bench.project.say.apply_async(("never",), countdown=3600, task_id=f"hour-{queue}"))


def sent_by_client(bench: Bench, queue: str) -> Sent:
    """The client sends it."""
    return Sent.of(bench.app().AsyncResult(f"sent-{queue}"))


def send(queue: str) -> Sequence[str]:
    sending = f"say.apply_async(('sent',), countdown=1, task_id='sent-{queue}')"
    return "-c", f"from tests.faults.proj import say; {sending}"


def cancel(queue: str) -> Sequence[str]:
    return "durable", "cancel", f"hour-{queue}"


def revoke(queue: str) -> Sequence[str]:
    return "-c", f"from tests.faults.proj import app; app.control.revoke('hour-{queue}')"


def twice(bench: Bench, queue: str) -> Sent:
    """Two copies of one message."""
    options = {"queue": queue, "task_id": f"twice-{queue}", "headers": mark_send({}, "one send")}
    bench.project.say.apply_async(("once",), **options)
    return Sent.of(bench.project.say.apply_async(("once",), **options))


def behind_another(bench: Bench, queue: str) -> Sent:
    """A message that waits in the worker for a slot."""
    first = bench.project.hold.apply_async(queue=queue, task_id=f"first-{queue}")
    bench.wait_for(lambda: bench.witness.count(first.id, "body"), message="the slot is taken")
    return Sent.of(bench.project.say.apply_async(("adopted",), queue=queue))


def untold(bench: Bench, queue: str) -> Sent:
    """An outcome whose telling has killed three workers."""
    sent = Sent.of(bench.project.say.apply_async(("untold",), queue=queue, countdown=3600))
    payload = bench.app().durable.runtime.outcome_codec.encode("untold")
    outcome = Outcome(OutcomeKind.VALUE, None, payload.data, payload.content_type, payload.content_encoding)
    change_row(bench, sent, status=Status.ENDING, outcome=outcome_to_text(outcome), crashes=3)
    return sent


def sent_often(bench: Bench, queue: str) -> Sent:
    """A task whose wakes no worker has understood for half a day."""
    sent = Sent.of(bench.project.stranger.apply_async(queue=queue, countdown=3600))
    change_row(bench, sent, sends=15)
    return sent


def change_row(bench: Bench, sent: Sent, **values: Any) -> None:
    """Bring a row into a state that would take long to come to, and make it due."""
    store = bench.app().durable.store
    executions = store.context.schema.executions
    with store.database.transaction() as connection:
        changed = connection.execute(
            update(executions)
            .where(executions.c.task_id == sent.task_id)
            .values(wake_at=store.context.now(), **values)
        )
    assert changed.rowcount == 1


def wait_for_body(bench: Bench, sent: Sent) -> None:
    bench.wait_for(lambda: bench.witness.count(sent.task_id, "body"), message="its body is entered")


def wait_for_row(bench: Bench, sent: Sent, status: str) -> Any:
    def found() -> Any:
        row = bench.app().durable.store.queries.get(sent.task_id)
        return row if row is not None and row.status == status else None

    return bench.wait_for(found, message=f"the row is {status}")


def cancel_asleep(bench: Bench, _: LocalProcess, sent: Sent) -> None:
    wait_for_row(bench, sent, Status.SLEEPING)
    assert bench.app().durable.cancel(sent.task_id)


def stop_in_body(number: int) -> Callable[[Bench, LocalProcess, Sent], None]:
    def stop(bench: Bench, worker: LocalProcess, sent: Sent) -> None:
        wait_for_body(bench, sent)
        worker.signal(number)

    return stop


def let_go(bench: Bench, _: LocalProcess, sent: Sent) -> None:
    bench.witness.saw(sent.task_id, "go")


def let_first_go(bench: Bench, _: LocalProcess, sent: Sent) -> None:
    """End the task that took the only slot."""
    holders = {seen.task_id for seen in bench.witness.sightings() if seen.task_id.startswith("first-")}
    bench.witness.saw(holders.pop(), "go")


def release(bench: Bench, _: LocalProcess, sent: Sent) -> None:
    """Its code does not fit its journal. It is set aside until somebody mends it."""
    row = wait_for_row(bench, sent, Status.QUARANTINED)
    assert (row.wake_at, row.owner, row.outcome) == (None, None, None)
    assert sent.result.state == "QUARANTINED"
    bench.witness.saw(sent.task_id, "fixed")
    bench.app().durable.release(sent.task_id)


WALK = Act(
    walk,
    value="walked",
    journal=("step", "sleep", "step", "sleep", "step"),
    seen={
        "body": 2,
        "first": 1,
        "second": 1,
        "third": 1,
        "success": 1,
        "plain follower": 1,
        "durable follower": 1,
    },
)
FAIL = Act(
    fail,
    state="FAILURE",
    status=Status.FAILED,
    value="KeyError",
    journal=("step",),
    seen={"body": 1, "step": 1, "failure": 1, "errback": 1},
)
UNHEARD = Act(unheard, value="unheard", journal=("step",), seen={"body": 1, "step": 1, "plain follower": 1})
IN_CHORD = Act(in_chord, value=[7, 7], journal=("step",), seen={"body": 1, "step": 1, "success": 1})
RETRY = Act(task("retry_once"), value=[7, 1], journal=("step",), seen={"body": 2, "step": 1, "success": 1})
REPLACE = Act(
    task("replaced"),
    value="replaced",
    journal=("step",),
    seen={"body": 1, "step": 1, "successor": 1, "success": 1},
)
DIVERGE = Act(
    task("diverge"),
    finish=release,
    value="fixed",
    journal=("step", "sleep", "step"),
    seen={"body": 3, "first": 1, "last": 1, "success": 1},
)
REQUEUE = Act(
    task("requeue_once"), value="again", journal=("step",), seen={"body": 2, "step": 1, "success": 1}
)
TWICE = Act(twice, value="once", journal=("step",), seen={"body": 1, "step": 1, "success": 1})
UNTOLD = Act(untold, value="untold", seen={"body": 0, "success": 0})
ADOPTED = Act(
    behind_another,
    follow=let_first_go,
    value="adopted",
    journal=("step",),
    seen={"body": 1, "step": 1, "success": 1},
)
STRANGER = Act(task("stranger"), value="known", seen={"body": 1, "success": 1})
SENT_OFTEN = Act(
    sent_often, state="FAILURE", status=Status.FAILED, value="NotRegistered", seen={"body": 0, "failure": 1}
)
DRAINED = Act(
    task("hold_once"),
    lead=stop_in_body(signal.SIGTERM),
    follow=let_go,
    value="let go",
    seen={"body": 2, "success": 1},
)
HANDED_BACK = Act(
    task("hold_long"),
    lead=stop_in_body(signal.SIGQUIT),
    follow=let_go,
    value="let go",
    seen={"body": 2, "success": 1},
)
CANCELLED = Act(
    task("nap", 600),
    lead=cancel_asleep,
    state="REVOKED",
    status=Status.CANCELLED,
    value="TaskRevokedError",
    journal=("sleep",),
    seen={"body": 1, "woken": 0, "success": 0, "failure": 0},
)

LOSE_CHILD = Act(
    task("lose_process"), value="survived", journal=("step",), seen={"body": 2, "step": 1, "success": 1}
)
HANG = Act(
    hang,
    state="FAILURE",
    status=Status.FAILED,
    value="TimeLimitExceeded",
    seen={"body": 1, "errback": 1},
)
SENT_BY_CLIENT = Act(
    sent_by_client, value="sent", journal=("step",), seen={"body": 1, "step": 1, "success": 1}
)
NEVER_RUN = Act(
    in_an_hour,
    state="REVOKED",
    status=Status.CANCELLED,
    value="TaskRevokedError",
    seen={"body": 0, "success": 0, "failure": 0},
)

WITHOUT_STRANGER = {"PROJ_WITHOUT": "stranger"}
#: A process that is frozen between its outcome and the telling of it tells it once more when it thaws.
TOLD_AGAIN: Mapping[str, Times] = {"success": (1, 2)}
SENT_AGAIN: Mapping[str, Times] = {"success": (1, 2), "plain follower": (1, 2)}

SCENES: dict[str, tuple[Scene, ...]] = {
    "delivery": (
        Scene(Point.MESSAGE_ARRIVED, WALK),
        Scene(f"{Point.MESSAGE_ARRIVED}:2", WALK),
        Scene(Point.CLAIM_COMMITTED, WALK),
        Scene(Point.CLAIM_HEARD, WALK),
        Scene(Point.CLAIM_REPORTED, WALK),
        Scene(f"{Point.CLAIM_REPORTED}:2", WALK),
        Scene(Point.CLAIM_REFUSED, TWICE),
    ),
    "body": (
        # Thawed, it may be interrupted before the first line of its body.
        Scene(Point.BODY_ENTERED, WALK, thawed={"body": (2, 3)}),
        Scene(Point.STEP_RAN, WALK, {"body": 3, "first": 2}),
        Scene(f"{Point.STEP_RAN}:3", WALK, {"body": 3, "third": 2}),
        Scene(Point.STEP_JOURNALED, WALK, {"body": 3}),
        Scene(Point.SHORT_SLEEP_JOURNALED, WALK, {"body": 3}),
        Scene(Point.SLEEPING_STORED, WALK, {"body": 3}),
        Scene(Point.SLEEP_PARKED, WALK),
    ),
    "end": (
        Scene(Point.BODY_LEFT, WALK, {"body": 3}),
        Scene(Point.END_WRITTEN, WALK, thawed=SENT_AGAIN),
        Scene(Point.FOLLOWERS_SENT, WALK, {"plain follower": (1, 2)}, thawed=TOLD_AGAIN),
        Scene(Point.FOLLOWERS_NOTED, WALK, thawed=TOLD_AGAIN),
        Scene(Point.RESULT_STORED, WALK, thawed=TOLD_AGAIN),
        Scene(Point.OUTCOME_TOLD, WALK, {"success": 2}),
        Scene(Point.ROW_ENDED, WALK),
    ),
    "other ends": (
        Scene(Point.END_WRITTEN, FAIL, thawed={"failure": (1, 2), "errback": (1, 2)}),
        Scene(Point.RESULT_STORED, FAIL, {"errback": 2}, thawed={"failure": (1, 2)}),
        Scene(Point.END_WRITTEN, IN_CHORD, thawed=TOLD_AGAIN),
        Scene(Point.RESULT_STORED, IN_CHORD, thawed=TOLD_AGAIN),
        Scene(Point.BODY_LEFT, UNHEARD, {"body": 2}),
        Scene(Point.END_WRITTEN, UNHEARD, thawed={"plain follower": (1, 2)}),
        Scene(Point.FOLLOWERS_SENT, UNHEARD, {"plain follower": (1, 2)}),
        Scene(Point.RUN_HANDED_BACK, REQUEUE),
        Scene(Point.UNTOLD_STORED, UNTOLD),
    ),
    "retry": (
        Scene(Point.RETRY_BUILT, RETRY, {"body": 3}),
        Scene(Point.RETRY_STORED, RETRY, {"body": 3}),
        Scene(Point.RETRY_PARKED, RETRY),
        # Its lease may run out before another worker gets the successor's message.
        Scene(Point.REPLACEMENT_SENT, REPLACE, {"body": (1, 2)}),
        Scene(Point.QUARANTINED_STORED, DIVERGE, {"body": 4}),
        Scene(Point.SET_ASIDE, DIVERGE),
    ),
    "verdicts": (
        Scene(Point.VERDICT_CLAIMED, CANCELLED),
        Scene(Point.VERDICT_TOLD, CANCELLED),
        Scene(Point.UNKNOWN_FAILED, SENT_OFTEN, env=WITHOUT_STRANGER, thawed={"failure": (1, 2)}),
        Scene(Point.UNKNOWN_TOLD, SENT_OFTEN, env=WITHOUT_STRANGER),
    ),
    "leaving": (
        Scene(Point.MESSAGE_ADOPTED, ADOPTED, pool="prefork"),
        Scene(Point.MESSAGE_KEPT, STRANGER, env=WITHOUT_STRANGER),
        Scene(Point.LEASES_MARKED, DRAINED, pool="prefork"),
        Scene(Point.LEASES_HANDED_BACK, HANDED_BACK, pool="prefork"),
    ),
    "children": (
        Scene(Point.CHILD_LOST, LOSE_CHILD, pool="prefork"),
        Scene(Point.CHILD_RECOVERED, LOSE_CHILD, pool="prefork"),
        Scene(Point.LIMIT_HIT, HANG, {"body": 2}, pool="prefork"),
        Scene(Point.LIMIT_WRITTEN, HANG, pool="prefork"),
        Scene(Point.LIMIT_TOLD, HANG, {"errback": 2}, pool="prefork"),
    ),
    "clients": (
        Scene(Point.SEND_SCHEDULED, SENT_BY_CLIENT, client=send),
        Scene(Point.VERDICT_WRITTEN, NEVER_RUN, client=cancel),
        Scene(Point.VERDICT_STORED, NEVER_RUN, client=cancel),
        Scene(Point.VERDICT_WRITTEN, NEVER_RUN, client=revoke),
        Scene(Point.VERDICT_STORED, NEVER_RUN, client=revoke),
    ),
}
#: Those of one entry are played at the same time.
KILLED = {
    "from the message to its end": ("delivery", "body", "end"),
    "other ends, verdicts, main processes, clients": (
        "other ends",
        "retry",
        "verdicts",
        "leaving",
        "children",
        "clients",
    ),
}
#: Played with a freeze too, where the struck process goes on after another one has done its work.
FROZEN = {
    "from the message to its end": ("delivery", "body", "end"),
    "other ends, verdicts": ("other ends", "retry", "verdicts"),
}


def scenes_of(topics: Sequence[str]) -> list[Scene]:
    return [scene for topic in topics for scene in SCENES[topic]]
