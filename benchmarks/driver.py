"""A producer in a process of its own: it does what it is told, one JSON line for each request and answer.

``send`` and the like are timed here, so that neither the benchmark nor its pipe is measured with them.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from kombu.utils.uuid import uuid

from benchmarks import project

app: Any = project.app


def prepare() -> None:
    """Create the tables."""
    project.durable.upgrade()


def send(
    task: str, args: list[Any], count: int, queue: str, countdown: float = 0, eta_in: float = 0
) -> float:
    """Send ``count`` messages of a task, one by one. Returns the seconds that this took."""
    options: dict[str, Any] = {"queue": queue}
    if countdown:
        options["countdown"] = countdown
    if eta_in:
        options["eta"] = datetime.now(timezone.utc) + timedelta(seconds=eta_in)
    apply_async = getattr(project, task).apply_async
    began = time.perf_counter()
    for _ in range(count):
        apply_async(args, **options)
    return time.perf_counter() - began


def send_one(task: str, args: list[Any], queue: str) -> str:
    """Send one message. Returns the id of its task."""
    return str(getattr(project, task).apply_async(args, queue=queue).id)


def send_each(task: str, args: list[list[Any]], queue: str) -> None:
    """Send one message for each list of arguments."""
    apply_async = getattr(project, task).apply_async
    for each in args:
        apply_async(each, queue=queue)


def send_eta_each(task: str, label: str, dues: list[float], queue: str) -> None:
    """Send one message with an ETA for each due time, in seconds since the epoch."""
    apply_async = getattr(project, task).apply_async
    for due in dues:
        apply_async([label, due], queue=queue, eta=datetime.fromtimestamp(due, timezone.utc))


def churn(seconds: float, per_second: float) -> float:
    """Send tasks with a countdown of a day, and cancel each of them a second later, at a steady rate.

    Returns how many were sent per second.
    """
    waiting: deque[str] = deque()
    began = time.perf_counter()
    sent = 0
    while (now := time.perf_counter() - began) < seconds:
        if sent < now * per_second:
            waiting.append(project.noop.apply_async(["churn"], countdown=86_400).id)
            sent += 1
        elif len(waiting) > per_second:
            project.durable.cancel([waiting.popleft()])
        else:
            time.sleep(0.002)
    return sent / (time.perf_counter() - began)


def consume(queue: str, worker: str) -> None:
    """Let a worker take from a queue."""
    answers = app.control.add_consumer(queue, destination=[worker], reply=True, timeout=10)
    if not answers:
        raise TimeoutError(f"{worker} does not answer")


def leave(queue: str, worker: str) -> None:
    """Let a worker take from a queue no more."""
    app.control.cancel_consumer(queue, destination=[worker], reply=True, timeout=10)


def publish(count: int, queue: str, confirm: bool) -> float:
    """What kombu alone does: publish a task message again and again. Returns the seconds.

    ``confirm``: wait for RabbitMQ's confirm after each.
    """
    message = app.amqp.as_task_v2(uuid(), project.plain.name, ["label"], {})
    options = {"confirm_publish": True} if confirm else {}
    with app.connection_for_write(transport_options=options) as connection:
        producer = app.amqp.Producer(connection)
        arguments = {
            "headers": message.headers,
            "serializer": "json",
            "routing_key": queue,
            "delivery_mode": 2,
            **message.properties,
        }
        producer.publish(message.body, declare=[app.amqp.queues[queue]], **arguments)
        began = time.perf_counter()
        for _ in range(count):
            producer.publish(message.body, **arguments)
        return time.perf_counter() - began


def dispatch() -> list[float]:
    """Send a wake message for all that is due. Returns how many were due, and the seconds."""
    began = time.perf_counter()
    count = project.durable.dispatch_due()
    return [count, time.perf_counter() - began]


def purge(queue: str) -> int:
    """Empty a queue. Returns how many messages it held."""
    with app.connection_for_write() as connection:
        bound = app.amqp.queues[queue](connection.default_channel)
        bound.declare()
        return int(bound.purge() or 0)


def depth(queue: str) -> int:
    """How many messages lie in a queue."""
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        try:
            return int(app.amqp.queues[queue](channel).queue_declare(passive=True).message_count)
        except connection.channel_errors:
            # Redis has no empty lists.
            return 0


ACTIONS: dict[str, Callable[..., Any]] = {
    action.__name__: action
    for action in (
        prepare,
        send,
        send_one,
        send_each,
        send_eta_each,
        churn,
        consume,
        leave,
        publish,
        dispatch,
        purge,
        depth,
    )
}


def main() -> None:
    """Answer requests until the pipe is closed."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": ACTIONS[request["action"]](**request["arguments"])}
        except Exception as error:  # noqa: BLE001 - the benchmark is told, and decides
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
