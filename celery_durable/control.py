"""Revoke that lasts: the verdict is written to the database before any worker is told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from billiard.common import TERM_SIGNAME
from celery.app.control import Control
from celery.app.task import Context
from celery.utils.functional import maybe_list
from kombu.utils.imports import symbol_by_name

from celery_durable.errors import DurableError, StoreUnavailable
from celery_durable.logs import about
from celery_durable.message import headers_of
from celery_durable.points import Point, reached
from celery_durable.store.verdicts import Cancelled
from celery_durable.texts import flaw_of_id

logger = logging.getLogger(__name__)

#: What a revoked task's result says, as Celery's own revoke has it.
REASON = "revoked"


class DurableControl(Control):
    """``app.control`` of an app with durable tasks. ``AsyncResult.revoke()`` comes here as well."""

    def revoke(
        self,
        task_id: str | Sequence[str],
        destination: Sequence[str] | None = None,
        terminate: bool = False,
        signal: str = TERM_SIGNAME,
        **kwargs: Any,
    ) -> Any:
        """As Celery's, but a durable task stays revoked whatever restarts: its row says so first.

        What is asleep, scheduled or waits for its retry is ``REVOKED`` in the result store at once, and so
        is what runs: that one is stopped at its next durable call (``terminate``: now). A task that has
        come to its end is left as it is. An id that has no row yet may be a plain task's or that of a
        durable one that has not started; it is remembered as cancelled for the latter's sake.

        Raises:
            StoreUnavailable: the verdict could not be written. The workers that are up have been told all
                the same, so that plain tasks are revoked as ever; call it again for a durable one.
        """
        failure: DurableError | None = None
        try:
            # What no row can be called, no durable task is.
            _cancel(self.app, [i for i in maybe_list(task_id) or () if flaw_of_id(i) is None])
        except DurableError as error:
            failure = error
            if isinstance(error, StoreUnavailable):
                error.broke_off("a revoke")
        reply = super().revoke(task_id, destination, terminate, signal, **kwargs)
        if failure is not None:
            raise failure
        return reply


def install_control(app: Any) -> None:
    """Make ``app.control`` a durable one, also where it has been used before, or is a user's own class."""
    own: type[Control] = symbol_by_name(app.control_cls)
    if issubclass(own, DurableControl):
        return
    app.control_cls = "celery_durable.control:DurableControl"
    if own is not Control:
        app.control_cls = type("DurableControl", (DurableControl, own), {})
    # What was made before by the other class is made again when it is next used.
    app.__dict__.pop("control", None)


def _cancel(app: Any, task_ids: Sequence[str]) -> None:
    cancelled = app.durable.store.verdicts.cancel(task_ids, REASON)
    reached(Point.VERDICT_WRITTEN)
    store_revoked(app, cancelled.values())
    reached(Point.VERDICT_STORED)


def store_revoked(app: Any, cancelled: Iterable[Cancelled]) -> None:
    """Store ``REVOKED`` for what was cancelled, so that ``get()`` does not wait until a worker tells it.

    A result store that is away is no error: it hears of it when the verdict is told. Of a task whose
    message has not come nothing is known, and nothing is stored.
    """
    for item in cancelled:
        if item.headers is None:
            continue
        try:
            _store_revoked(app, item)
        except Exception as error:  # noqa: BLE001 - each store has errors of its own
            logger.warning(
                "%s[%s] is cancelled; its result will say so when a worker tells it: %s",
                item.task_name,
                item.task_id,
                error,
                extra=about(item.task_name, item.task_id),
            )
            return


def _store_revoked(app: Any, item: Cancelled) -> None:
    task = app.tasks.get(item.task_name)
    headers = headers_of(item.headers or "{}")
    ignores = headers.get("ignore_result")
    if ignores is None and task is not None:
        ignores = task.ignore_result
    if ignores and not getattr(task, "store_errors_even_if_ignored", False):
        return
    backend = app.backend if task is None else task.backend
    # Without the chord, which is in the message's body: the claim of the verdict tells it.
    backend.mark_as_revoked(item.task_id, REASON, request=Context(headers, id=item.task_id))
