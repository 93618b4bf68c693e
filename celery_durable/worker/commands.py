"""``revoke`` with ``terminate`` as a worker obeys it: every run of the task is stopped.

Celery's worker finds a task by its id, as the request that came last; when that one is over it finds none. A
wake, or a copy of the message, hides and then removes the request whose run is on (seen in Celery 5.7).
"""

from __future__ import annotations

import logging
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.state import requests

from celery_durable.logs import about

logger = logging.getLogger(__name__)

# Its type stubs leave the function out.
_celerys_revoke: Any = vars(control)["revoke"]


def install() -> None:
    """Put ours in the place of Celery's, which they call. Apps without durable tasks notice nothing."""
    control.Panel.data.update(revoke=revoke, terminate=terminate)


def revoke(state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **kwargs: Any) -> Any:
    """Revoke by task id, or by a list of them; ``terminate``: also stop what runs."""
    task_ids = set(maybe_list(task_id) or ())
    known = [requests[id_] for id_ in task_ids if id_ in requests]
    answer = _celerys_revoke(state, task_id, terminate, signal, **kwargs)
    durable = getattr(state.app, "durable", None)
    if terminate and durable is not None:
        for request in _hidden_runs(durable.worker, task_ids, known):
            logger.info(
                "Terminating %s, which runs under an earlier request",
                request.id,
                extra=about(request.name, request.id),
            )
            request.terminate(state.consumer.pool, signal=signal)
    return answer


def terminate(state: Any, signal: Any, task_id: Any, **kwargs: Any) -> Any:
    """Terminate by task id, or by a list of them."""
    return revoke(state, task_id, terminate=True, signal=signal, **kwargs)


def _hidden_runs(worker: Any, task_ids: set[str], known: list[Any]) -> list[Any]:
    """The requests of these tasks whose run is on, but for those that Celery finds."""
    # A run is known as one when its claim has been heard.
    worker.drain()
    return [
        request
        for request in worker.book.open_requests()
        if request.id in task_ids and request.holds_lease and request not in known
    ]
