"""Silence: how a run leaves Celery's tracer without a word, a park above all.

Celery 5.7 takes ``Ignore`` for an incident: it makes two records of it, each with all code positions of all
frames that the exception went through (some 1.5 ms), sends one to the worker's main process, which has to
unpack it, and logs that the task was ignored. A task that goes to sleep is none.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app import trace as celery_trace
from celery.app.trace import TraceInfo, trace_ok_t
from celery.exceptions import Ignore


class Silence(Ignore):
    """The run ends here, and what there is to say of it has been said."""


class QuietTraceInfo(TraceInfo):
    """Celery's account of how a run left its body, with nothing to report of a ``Silence``."""

    __slots__ = ()

    def __init__(self, state: str, retval: Any = None) -> None:
        super().__init__(state, retval)
        if isinstance(retval, Silence):
            # The tracer makes its record of the exception right after this, from the exception's own
            # traceback (so it is from Python 3.11 on).
            retval.__traceback__ = _SHORT
            # It holds the frames of the body.
            retval.__context__ = None

    def handle_ignore(self, task: Any, req: Any, **options: Any) -> None:
        if not isinstance(self.retval, Silence):
            super().handle_ignore(task, req, **options)


def quiet_tracer(task: Any, hostname: str | None) -> Any:
    """Celery's tracer for ``task``, as a worker of this name builds it, but for what it says of silence."""
    # By the module: tools that watch tasks put a function of their own there.
    return celery_trace.build_tracer(
        task.name, task, task.app.loader, hostname, app=task.app, Info=QuietTraceInfo
    )


def silent() -> Any:
    """What the tracer returns of a run that ended in silence."""
    silence = Silence().with_traceback(_SHORT)
    record = ExceptionInfo((Silence, silence, _SHORT), internal=True)
    return trace_ok_t(record, TraceInfo(states.IGNORED, silence), 0.0, None)


def _short_traceback() -> TracebackType | None:
    try:
        raise Silence
    except Silence as silence:
        return silence.__traceback__


_SHORT = _short_traceback()
