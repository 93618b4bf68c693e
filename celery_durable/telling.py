"""The result store as the tracer of a claimed run sees it: we learn whether the outcome was told."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Reject

from celery_durable.points import Point, reached


class TellingBackend:
    """A result backend that notes success, and turns a failure to store into a retreat.

    Celery 5.7 answers a failing ``mark_as_done`` by telling a failure of a task that succeeded. Here it
    leaves the tracer as Reject, which touches nothing: the row is handed back and told again.
    """

    def __init__(self, backend: Any, run: Any) -> None:
        self._backend = backend
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_done(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(self._backend.mark_as_done, args, kwargs)

    def mark_as_failure(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(self._backend.mark_as_failure, args, kwargs)

    def mark_as_retry(self, *args: Any, **kwargs: Any) -> Any:
        return self._try(self._backend.mark_as_retry, args, kwargs)

    def _tell(self, mark: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = self._try(mark, args, kwargs)
        if self._is_own(*args, **kwargs):
            reached(Point.RESULT_STORED)
            self._run.told = True
        return answer

    def _try(self, mark: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_own(*args, **kwargs):
            return mark(*args, **kwargs)
        try:
            return mark(*args, **kwargs)
        except Exception as error:
            raise Reject(error, requeue=False) from error

    def _is_own(self, task_id: str, *args: Any, **kwargs: Any) -> bool:
        """Whether it is about the run: a body may call ``apply`` of its own task, which tells of another."""
        return bool(task_id == self._run.lease.task_id)
