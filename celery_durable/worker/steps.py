"""Worker bootsteps: the durable side is made before the pool forks, and hears of claims after."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import bootsteps
from celery.signals import worker_shutdown

from celery_durable.chords import ask_again
from celery_durable.plain import in_one_line
from celery_durable.worker import commands
from celery_durable.worker.pipe import ClaimsPipe

logger = logging.getLogger(__name__)


class DurableStep(bootsteps.StartStopStep):
    """Makes the durable side of the worker.

    Celery creates all steps before it starts the first one, so the claims pipe exists when the pool forks.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        with in_one_line():
            worker.app.durable.enter_worker(worker)
        ask_again(worker.app)
        commands.install()
        _hear_of_cold_shutdown(worker)
        # Sent when the pool has stopped, which comes after this step's own end.
        worker_shutdown.connect(self._close, sender=worker)
        self._side = worker.app.durable.worker

    def _close(self, **_: Any) -> None:
        self._side.close()

    def start(self, worker: Any) -> None:
        if not worker.app.durable.worker.has_child_processes:
            _hear_of_failed_jobs(worker.pool)
        worker.app.durable.worker.start()

    def stop(self, worker: Any) -> None:
        worker.app.durable.worker.stop()

    def terminate(self, worker: Any) -> None:
        worker.app.durable.worker.terminate()


def _hear_of_cold_shutdown(worker: Any) -> None:
    """Hand leases back between the soft shutdown and the cold one.

    Celery 5.7 sends ``worker_shutting_down`` of a cold shutdown only when it is over, and waits before that
    for every task whose message is acknowledged. It begins with this method of the worker.
    """
    wait_for_tasks = worker.wait_for_soft_shutdown

    def wait_for_soft_shutdown() -> None:
        worker.app.durable.worker.shutting_down()
        wait_for_tasks()
        worker.app.durable.worker.abandon(worker.pool)

    worker.wait_for_soft_shutdown = wait_for_soft_shutdown


def _hear_of_failed_jobs(pool: Any) -> None:
    """Tell a durable request what its job raised around the tracer, as with a body that cannot be decoded.

    A pool of processes does so. Threads and greenlets drop it, and the message is answered by nobody; solo
    lets it fall into the consumer, and the message is answered twice, which is the end of the worker.
    """
    apply = pool.on_apply

    def on_apply(target: Callable[..., Any], *args: Any, **options: Any) -> Any:
        callback, error_callback = options.get("callback"), options.get("error_callback")
        if not hasattr(getattr(callback, "__self__", None), "delivery"):
            return apply(target, *args, **options)
        assert callback is not None
        assert error_callback is not None

        def job(*args: Any, **kwargs: Any) -> Any:
            try:
                return target(*args, **kwargs)
            except Exception:  # noqa: BLE001 - the request decides on each kind
                return ExceptionInfo()

        def tell(answer: Any) -> None:
            (error_callback if isinstance(answer, ExceptionInfo) else callback)(answer)

        return apply(job, *args, **{**options, "callback": tell})

    pool.on_apply = on_apply


class ClaimsReader(bootsteps.StartStopStep):
    """Reads the claims pipe.

    A consumer step, because Celery's event loop forgets its readers when the broker connection is lost.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        consumer.app.durable.worker.read_claims(consumer)


class PipeThread:
    """Reads the pipe where the transport has no event loop."""

    def __init__(self, pipe: ClaimsPipe, drain: Callable[[], None]) -> None:
        self._pipe = pipe
        self._drain = drain
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="durable-claims", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True

    def _run(self) -> None:
        while not self._is_stopped:
            ready, _, _ = select.select([self._pipe.reader], [], [], 1.0)
            if ready:
                try:
                    self._drain()
                except Exception:
                    # The one reader must live on: a claim that is not heard keeps its message unacknowledged.
                    logger.exception("A reported claim could not be handled")
