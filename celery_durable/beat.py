"""DurableScheduler: a beat scheduler that also wakes what is due in the database."""

from __future__ import annotations

import logging
from typing import Any

from celery.beat import Scheduler

from celery_durable.errors import StoreUnavailable

logger = logging.getLogger(__name__)


class DurableScheduler(Scheduler):
    """Any number of these share the work: each due row is dispatched by one of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._dispatcher: Any = None
        super().__init__(*args, **kwargs)

    @property
    def durable(self) -> Any:
        return self.app.durable

    def setup_schedule(self) -> None:
        self.merge_inplace(self.app.conf.beat_schedule)
        self.install_default_entries(self.data)
        self.durable.prepare_tables()

    def tick(self, *args: Any, **kwargs: Any) -> float:
        nearest = super().tick(*args, **kwargs)
        if self._dispatcher is None:
            self._dispatcher = self.durable.dispatcher()
        try:
            self._dispatcher.run()
            due_in = self.durable.store.due.poll().due_in
        except StoreUnavailable as error:
            logger.error("%s", error)
            return 1.0
        poll = self.durable.settings.poll_interval
        waits = [nearest or 0.0, poll] + ([] if due_in is None else [max(due_in, 0.0)])
        return min(waits)

    @property
    def info(self) -> str:
        return f"    . database -> {self.durable.settings.redacted_url}"
