"""DurableScheduler: a beat scheduler that also wakes what is due in the database.

Celery calls ``tick()`` for ever and sleeps what it returns, and nothing can shorten that sleep; so where
it is called by Celery's own service, it waits by itself, for whatever comes first.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.beat import Scheduler
from celery.signals import beat_init
from click import ClickException
from kombu.utils.objects import cached_property

from celery_durable.errors import ConfigurationError
from celery_durable.plain import in_one_line, is_unsaid
from celery_durable.scheduler.build import build_ticker
from celery_durable.scheduler.deferral import AT_ONCE, SOON, Deferral
from celery_durable.scheduler.entry import DurableEntry
from celery_durable.scheduler.ticker import Ticker


class DurableScheduler(Scheduler):
    """A drop-in for Celery's persistent scheduler. Any number of these share the work.

    Its state is in the database, so ``--schedule`` names no file; ``sync`` has nothing to do. A lazy one
    touches nothing.
    """

    Entry = DurableEntry

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.schedule_filename = kwargs.get("schedule_filename")
        self._ticker: Ticker | None = None
        self._deferral = Deferral()
        self._is_ticking = False
        self._is_served = False
        super().__init__(*args, **kwargs)

    def setup_schedule(self) -> None:
        """Take the configuration over. The database is first asked by the first tick: it may be away."""
        logging.getLogger("celery.beat").addFilter(is_unsaid)
        with in_one_line():
            self._durable.check_configuration()
        # In the order of the persistent scheduler: the other one drops the built-in entry again.
        self.merge_inplace(self.app.conf.beat_schedule)
        self.install_default_entries(self.schedule)
        beat_init.connect(self._on_beat_init)

    @property
    def _durable(self) -> Any:
        durable = getattr(self.app, "durable", None)
        if durable is None:
            raise ConfigurationError("the beat scheduler is durable, but its app is not: call Durable(app)")
        return durable

    def _on_beat_init(self, sender: Any, **_: Any) -> None:
        # Only a service that goes on calling tick() may be kept waiting inside it.
        self._is_served = self._is_served or sender.scheduler is self

    def tick(self, *_: Any, **__: Any) -> float:
        """Do what is due. Returns the seconds until the next call makes sense.

        Celery's arguments are for its heap, which this scheduler has none of.
        """
        self._is_ticking = True
        delay = 0.0
        try:
            with self._deferral.holding(SOON):
                delay = min(self._round(), float(self.max_interval or 0))
            if not self._is_served:
                return delay
            with self._deferral.holding(AT_ONCE):
                self._rest(delay)
            return 0.0
        finally:
            self._is_ticking = False

    def _round(self) -> float:
        if self._ticker is None:
            self._ticker = build_ticker(self._durable, self._deferral, scheduler=self)
        with in_one_line():
            return self._ticker.run_once()

    def _rest(self, seconds: float) -> None:
        if self._ticker is not None:
            self._ticker.wait(seconds)

    @cached_property
    def producer(self) -> Any:
        """The producer that entries are handed. It is not connected: what they publish becomes rows."""
        producer_class: Any = self.Producer  # type: ignore[attr-defined]  # it is, in Celery
        return producer_class(self.connection, auto_declare=False)

    def close(self) -> None:
        """Let go of everything.

        Celery calls this twice: from a signal handler, in the midst of whatever the tick does, and again
        at the end. The first time nothing may be touched that the tick may be using.
        """
        if self._is_ticking:
            return
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.close()
        super().close()

    @property
    def info(self) -> str:
        """What the banner shows. It is asked of a lazy instance, and before Celery logs what beat raises.

        On the command line a wrong setting stops beat right here.
        """
        try:
            with in_one_line():
                self._durable.check_configuration()
        except ClickException:
            raise
        except ConfigurationError:
            return "    . database -> not configured"
        settings = self._durable.settings
        return f"    . database -> {settings.redacted_url}\n    . namespace -> {settings.namespace}"
