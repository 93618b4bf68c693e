"""Those who come after a task: its ``link`` callbacks and the next of its chain, built as messages.

Celery's tracer would publish them before it stores the result. We let Celery build them in the same way
and write them as rows with the outcome, so that they are sent if and only if the outcome is accepted.
"""

from __future__ import annotations

import uuid
from typing import Any

from celery.canvas import group, maybe_signature, signature

from celery_durable.capture import Captured, capturing, is_durable
from celery_durable.message import delivery_from_headers
from celery_durable.records import Follower


def build_followers(app: Any, request: Any, value: Any) -> list[Follower]:
    """The followers of a task that returned ``value``. Whatever Celery raises for one of them is raised."""
    with capturing() as caught:
        options = {
            "parent_id": request.id,
            "root_id": request.root_id or request.id,
            "priority": _priority(app, request),
        }
        _apply_callbacks(app, request.callbacks or [], value, options)
        if request.chain:
            successor = signature(request.chain[-1], app=app)
            successor.apply_async((value,), chain=request.chain[:-1], **options)
    return [follower_of(app, item) for item in caught]


def _priority(app: Any, request: Any) -> Any:
    if not app.conf.task_inherit_parent_priority:
        return None
    return (request.delivery_info or {}).get("priority")


def _apply_callbacks(app: Any, callbacks: list[Any], value: Any, options: dict[str, Any]) -> None:
    # As in Celery's tracer: groups one by one, the rest as one group, so that the trail is right.
    signatures: list[Any] = [maybe_signature(callback, app=app) for callback in callbacks]
    single: list[Any] = []
    for callback in signatures:
        if isinstance(callback, group):
            callback.apply_async((value,), **options)
        else:
            single.append(callback)
    if len(single) == 1:
        single[0].apply_async((value,), **options)
    elif single:
        group(single, app=app).apply_async((value,), **options)


def follower_of(app: Any, captured: Captured) -> Follower:
    """A caught message as what is written of it."""
    delivery = delivery_from_headers(app, captured.headers, captured.message)
    durable = is_durable(app, captured.task_name)
    key = delivery.task_id if durable else str(uuid.uuid4())
    return Follower(key=key, is_durable=durable, delivery=delivery, due=captured.due)
