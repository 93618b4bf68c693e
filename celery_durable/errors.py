"""The errors of the package.

    DurableError
      ConfigurationError
      StoreUnavailable            (also kombu.exceptions.OperationalError)
        LoginRefused
        WrongTables
      LeaseLost
        LeaseRenewalTimedOut
      ReplayDivergence
      StepFailed
      StepLimitExceeded
      PayloadTooLarge             (also ValueError)
      NotDurable
      ExecutionNotFound
      OperationRefused
      TaskQuarantined

    BaseException                 control flow, which ``except Exception`` must not swallow
      Park
      LeaseInterrupt

Every error takes data and builds its own message. The data are its ``args``, in the order of the
constructor, because result stores and process pools rebuild an exception from its class and args.
"""

from __future__ import annotations

from typing import Literal

from kombu.exceptions import OperationalError

Place = Literal["outside a run", "inside a step", "in another thread", "inside an open database transaction"]

During = Literal["a run", "a send", "a revoke", "a start", "a command"]

#: What is to be done when the database is away, by what has been broken off.
_AFTER: dict[str, str] = {
    "a run": "Nothing is lost, and the work goes on when it answers again.",
    "a send": "The task was not sent: send it again, with the same task_id if it must not run twice.",
    "a revoke": "The workers that are up were told, and may forget: revoke it again.",
    "a start": "This process does not start: start it again when the database answers.",
    "a command": "Give the command again when it answers.",
}

_ADVICE: dict[str, str] = {
    "outside a run": (
        "Start the task with delay() or apply_async(); "
        "in a test use .apply() or the pytest plugin celery_durable.testing."
    ),
    "inside a step": "A step is journaled as one call: make this call from the task's body.",
    "inside an open database transaction": (
        "The transaction would be rolled back or left open when the body ends: "
        "sleep outside of the atomic block."
    ),
    "in another thread": "Make this call from the thread that runs the task.",
}


class DurableError(Exception):
    """The base of every error here."""


class ConfigurationError(DurableError):
    """One or more settings are unknown, missing, of a wrong type or impossible.

    Takes the problems, each a sentence that names its setting; prints one a line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class StoreUnavailable(DurableError, OperationalError):
    """The durable database did not answer. ``reason`` must hold no password.

    ``during``: what this has broken off, such as ``"a send"``.
    """

    def __init__(self, reason: str, during: During = "a run") -> None:
        super().__init__(reason, during)
        self.reason = reason
        self.during = during

    def broke_off(self, during: During) -> None:
        """Note what this has broken off: who knows it is not who noticed that the database is away."""
        self.during = during
        self.args = (self.reason, during)

    @property
    def _after(self) -> str:
        return _AFTER.get(self.during, "")

    def __str__(self) -> str:
        return (
            f"The durable database is not available: {self.reason}. {self._after} "
            "If it stays away, check the server and durable_database_url."
        )


class LoginRefused(StoreUnavailable):
    """The server answered, but has no such database, or does not let this user in: no wait will mend it."""

    def __str__(self) -> str:
        return (
            f"The durable database is not available: {self.reason}. This does not mend itself: create the "
            f"database or the user, or correct durable_database_url. {self._after}"
        )


class WrongTables(StoreUnavailable):
    """The durable database answered, but its tables are not those of this release. What waits for them
    goes on when they are."""

    def __str__(self) -> str:
        return (
            f"The durable tables do not fit this release: {self.reason}. "
            f"Run `celery -A <your app> durable upgrade`, then `durable check`. {self._after}"
        )


class LeaseLost(DurableError):
    """This run does not own its task any more: nothing that it still writes counts."""

    def __init__(self, task_id: str, token: int, reason: str) -> None:
        super().__init__(task_id, token, reason)
        self.task_id = task_id
        self.token = token
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"The lease of task {self.task_id} with token {self.token} is lost: {self.reason}. "
            "Stop working: the task goes on in another run."
        )


class LeaseRenewalTimedOut(LeaseLost):
    """No renewal was confirmed in time, so another worker may own the task by now."""

    def __init__(
        self,
        task_id: str,
        token: int,
        reason: str = "no renewal was confirmed before it ran out",
    ) -> None:
        super().__init__(task_id, token, reason)


class ReplayDivergence(DurableError):
    """The body asks for another durable call than the one journaled at this position."""

    def __init__(self, task_name: str, task_id: str, position: int, recorded: str, called: str) -> None:
        super().__init__(task_name, task_id, position, recorded, called)
        self.task_name = task_name
        self.task_id = task_id
        self.position = position
        self.recorded = recorded
        self.called = called

    def __str__(self) -> str:
        return (
            f"Task {self.task_name}[{self.task_id}] does not match its journal at position "
            f"{self.position}: journaled was {self.recorded}, the code asked for {self.called}. "
            "Deploy code that makes the journaled calls in their order, then release the task."
        )


class StepFailed(DurableError):
    """A step failed with an exception that cannot be rebuilt from the journal."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        return (
            f"A step failed with {self.type_name}: {self.message}. To catch {self.type_name} "
            "itself, make it an importable class that can be rebuilt from its args."
        )


class StepLimitExceeded(DurableError):
    """The journal of one task is full."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"The task has journaled {self.limit} entries, which is the limit. "
            "Split it into several tasks, or raise durable_step_limit."
        )


class PayloadTooLarge(DurableError, ValueError):
    """The encoded result of one step is over the limit; sizes in bytes. Nothing was written."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"The result of the step takes {self.size} bytes, over the limit of {self.limit}. "
            "Store it elsewhere and return a reference, or raise durable_payload_limit."
        )


class NotDurable(DurableError):
    """A durable call was made where there is no durable run to keep it.

    ``call`` is what was called, such as ``"sleep()"``.
    """

    def __init__(self, call: str, place: Place = "outside a run") -> None:
        super().__init__(call, place)
        self.call = call
        self.place = place

    def __str__(self) -> str:
        where = "outside a run of a durable task" if self.place == "outside a run" else self.place
        return f"{self.call} was called {where}. {_ADVICE.get(self.place, '')}".rstrip()


class ExecutionNotFound(DurableError):
    """The database has no execution with this task id in this namespace."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return (
            f"There is no durable execution with the task id {self.task_id!r}. It may have been "
            "pruned, may not have started yet, or may belong to another durable_namespace."
        )


class OperationRefused(DurableError):
    """An operator asked for what the state of the task does not allow. Nothing was changed.

    ``operation``: such as ``"wake"``; ``reason``: what stands in its way.
    """

    def __init__(self, operation: str, task_id: str, reason: str) -> None:
        super().__init__(operation, task_id, reason)
        self.operation = operation
        self.task_id = task_id
        self.reason = reason

    def __str__(self) -> str:
        return f"Cannot {self.operation} task {self.task_id}: {self.reason}."


class TaskQuarantined(DurableError):
    """The result of a task that was taken out of service."""

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(task_id, reason)
        self.task_id = task_id
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"Task {self.task_id} is quarantined: {self.reason}. "
            "Mend the cause, then release the task to let it run again."
        )


class Park(BaseException):
    """Leaves the body of a task that goes to sleep. Never seen outside the task's call."""


class LeaseInterrupt(BaseException):
    """Thrown into the body of a run that lost its lease. Takes no data: it is thrown by class."""


def failure_of(error: BaseException) -> Exception:
    """The failure of a task whose body was left by this.

    Celery's tracer lets what is no Exception pass untold, also when it is raised to be told again.
    """
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"the body was left by {error!r:.400}")
