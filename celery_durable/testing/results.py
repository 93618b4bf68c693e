"""The result store of one test: a dictionary, and a ``get()`` that does not wait for what cannot come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from celery import states
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import TimeoutError as ResultTimeout

BACKEND = "celery_durable.testing.results:MemoryBackend"


class MemoryBackend(KeyValueStoreBackend):
    """Results in memory; chords are counted, as in Redis.

    ``get()`` first runs what is due. What has no result then would never get one by waiting: it raises
    Celery's TimeoutError at once, and says what the task waits for.
    """

    thread_safe = True
    supports_native_join = True
    implements_incr = True

    def __init__(self, app: Any, url: Any = None, **options: Any) -> None:
        super().__init__(app=app, **options)
        self.url = url
        self._values: dict[Any, Any] = {}
        #: Runs what is due now.
        self.run_due: Callable[[], object] = lambda: None
        #: Says what a task waits for.
        self.explain: Callable[[str], str] = str
        #: Raises where the process that would write is dead.
        self.may_write: Callable[[], None] = lambda: None

    # -- keys and values -------------------------------------------------------------------------

    def get(self, key: Any) -> Any:
        return self._values.get(key)

    def mget(self, keys: Iterable[Any]) -> Any:
        return [self._values.get(key) for key in keys]

    def set(self, key: Any, value: Any) -> None:
        self.may_write()
        self._values[key] = value

    def delete(self, key: Any) -> None:
        self.may_write()
        self._values.pop(key, None)

    def incr(self, key: Any) -> int:
        self.may_write()
        count = int(self._values.get(key) or 0) + 1
        self._values[key] = count
        return count

    def as_uri(self, include_password: bool = False) -> str:
        return "memory"

    # -- waiting ---------------------------------------------------------------------------------

    def wait_for(self, task_id: str, *args: Any, **options: Any) -> Any:
        self._run_until_ready([task_id])
        return super().wait_for(task_id, *args, **options)

    def get_many(self, task_ids: Iterable[str], *args: Any, **options: Any) -> Iterator[Any]:
        wanted = list(task_ids)
        self._run_until_ready(wanted)
        yield from super().get_many(wanted, *args, **options)

    def _run_until_ready(self, task_ids: list[str]) -> None:
        if self._waiting(task_ids):
            self.run_due()
        if waiting := self._waiting(task_ids):
            raise ResultTimeout("; ".join(self.explain(task_id) for task_id in waiting))

    def _waiting(self, task_ids: list[str]) -> list[str]:
        return [task_id for task_id in task_ids if self._state(task_id) not in states.READY_STATES]

    def _state(self, task_id: str) -> Any:
        meta = self.get(self.get_key_for_task(task_id))
        return self.decode_result(meta)["status"] if meta else states.PENDING
