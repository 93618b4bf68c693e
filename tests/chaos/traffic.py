"""What is sent meanwhile: random programs, alone, in chains and in chords, with cancels and countdowns."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from celery import chain, chord

from celery_durable.errors import DurableError

Program = list[list[Any]]


@dataclass
class Sent:
    """One task, with what it has to come to."""

    task_id: str
    program: Program
    #: How it was sent: "alone", "countdown", "chain", "chord member", "chord body".
    kind: str
    #: Seconds since the epoch, just before the send.
    sent_at: float
    #: The task whose end starts this one.
    after: str | None = None
    #: The members that a chord's body gathers.
    members: list[str] = field(default_factory=list)
    countdown: float = 0.0
    has_follower: bool = False
    #: Whether the send has come back without an error: the broker, or the row, has it.
    is_accepted: bool = False
    #: Cancels of it: what each call answered, None for one that came to no answer.
    cancels: list[bool | None] = field(default_factory=list)

    @property
    def is_row(self) -> bool:
        """Whether the send itself makes a row."""
        return self.countdown > 0

    @property
    def has_errback(self) -> bool:
        return self.fails and self.kind in ("alone", "countdown")

    @property
    def fails(self) -> bool:
        return any(operation == "fail" for operation, _ in self.program)


class Traffic:
    """A thread that sends and cancels until it is told to stop. `project`: the module with the tasks."""

    def __init__(self, project: Any, seed: str, per_second: float) -> None:
        self.sent: dict[str, Sent] = {}
        self.errors: list[str] = []
        self._project = project
        self._random = random.Random(seed)
        self._dice_of_cancels = random.Random(f"{seed} cancels")
        self._pause = 1 / per_second
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, name="sends", daemon=True),
            threading.Thread(target=self._cancel, name="cancels", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more sends; those under way come to their end, or to their error."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"the thread that {thread.name} hangs"

    def of_kind(self, kind: str) -> Iterator[Sent]:
        return (sent for sent in self.sent.values() if sent.kind == kind)

    # Sending.

    def _send(self) -> None:
        _do_not_wait_for_results(self._project.app.backend)
        ways = [self._alone, self._alone, self._countdown, self._countdown, self._chain, self._chord]
        while not self._stopping.wait(self._random.uniform(0.5, 1.5) * self._pause):
            self._random.choice(ways)()

    def _alone(self) -> None:
        sent = self._new("alone", has_follower=self._random.random() < 0.3)
        self._dispatch([sent], self._signature(sent))

    def _countdown(self) -> None:
        sent = self._new("countdown", countdown=self._random.uniform(0.2, 4))
        self._dispatch([sent], self._signature(sent), countdown=sent.countdown)

    def _chain(self) -> None:
        links = [self._new("chain", longest=3) for _ in range(3)]
        for first, second in pairwise(links):
            second.after = first.task_id
        self._dispatch(links, chain(*map(self._signature, links)))

    def _chord(self) -> None:
        members = [self._new("chord member", longest=3) for _ in range(self._random.randint(2, 4))]
        body = self._new("chord body", longest=3)
        body.members = [member.task_id for member in members]
        self._dispatch([*members, body], chord(map(self._signature, members), self._signature(body)))

    def _new(self, kind: str, *, longest: int = 6, **facts: Any) -> Sent:
        program = random_program(self._random, self._random.randint(1, longest))
        return Sent(str(uuid.UUID(int=self._random.getrandbits(128), version=4)), program, kind, 0, **facts)

    def _signature(self, sent: Sent) -> Any:
        signature = self._project.live.s(sent.program).set(task_id=sent.task_id)
        if sent.has_follower:
            signature.link(self._project.after.si(sent.task_id))
        if sent.has_errback:
            signature.link_error(self._project.failed.s())
        return signature

    def _dispatch(self, tasks: list[Sent], signature: Any, **options: Any) -> None:
        for sent in tasks:
            sent.sent_at = time.time()
            self.sent[sent.task_id] = sent
        try:
            signature.apply_async(**options)
        except Exception as error:  # noqa: BLE001 - whatever it is: nobody knows whether it was sent
            self.errors.append(repr(error))
            return
        for sent in tasks:
            sent.is_accepted = True

    # Cancelling.

    def _cancel(self) -> None:
        dice = self._dice_of_cancels
        while not self._stopping.wait(dice.uniform(1, 4)):
            candidates = [sent for sent in list(self.sent.values())[-15:] if not sent.cancels]
            if candidates:
                sent = dice.choice(candidates)
                place = len(sent.cancels)
                sent.cancels.append(None)
                with suppress(DurableError, OSError):
                    sent.cancels[place] = self._project.durable.cancel(sent.task_id)


def _do_not_wait_for_results(backend: Any) -> None:
    """The Redis result store listens for each result of a send, on a connection that breaks with the rest."""
    backend.on_task_call = lambda *_, **__: None
    backend.remove_pending_result = lambda result: result


def random_program(dice: random.Random, length: int) -> Program:
    """So many operations, the last of which may be to fail."""
    program = [_operation(dice) for _ in range(length)]
    if dice.random() < 0.1:
        program.append(["fail", 0])
    return program


def _operation(dice: random.Random) -> list[Any]:
    name = dice.choices(["step", "sleep", "nap", "work", "trip", "retry"], weights=[8, 6, 1, 2, 1, 1], k=1)[0]
    amounts = {
        "step": dice.choice([0, 0, 0.05, 0.5]),
        "sleep": round(dice.uniform(1.1, 5), 2),
        "nap": 0.4,
        "work": round(dice.uniform(0.2, 3), 2),
        "trip": 0,
        "retry": dice.randint(1, 2),
    }
    return [name, amounts[name]]
