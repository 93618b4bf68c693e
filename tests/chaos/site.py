"""What is to be broken: two sites of workers and schedulers, on a broker and a database that they share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos import record
from tests.chaos.rows import Observer
from tests.nodes import Bench, FaultProxy, LocalProcess, Worker

#: How the extension answers a start without a database; whoever supervises a worker starts it again.
_NO_DATABASE = "Error: The durable database is not available"
#: Ways in which Celery itself ends a worker amid faults. Whoever supervises it starts it again, and so do we.
_CELERYS_OWN = {
    "'NoneType' object has no attribute 'hostname'": "kombu gives messages back to a Redis that is gone",
    "Could not start worker processes": "a pool process was killed as it started",
}


@dataclass
class Link:
    """A site's way to a server."""

    site: str
    server: str
    proxy: FaultProxy

    def __str__(self) -> str:
        return f"{self.site} to the {self.server}"


class Stage:
    """The processes of a run, and which of them are broken at the moment.

    Site a has a prefork worker and a beat, site b a prefork worker, one with threads, and a scheduler that
    stands alone. Each site reaches broker and database through proxies of its own.
    """

    def __init__(self, bench: Bench) -> None:
        assert bench.broker_server is not None
        assert bench.store_server is not None
        self.bench = bench
        self.observer = Observer(bench.store_url)
        self.broker: LocalProcess = bench.broker_server
        self.database: LocalProcess = bench.store_server
        #: What is broken now, by name: nothing else is done to it until it is healed.
        self.broken: set[str] = set()
        #: When the broker lost its messages, by the machine's clock.
        self.flushes: list[float] = []
        #: Processes that have ended though nobody has killed them.
        self.deaths: list[str] = []
        #: How often a process has not started, as it must not, because the database was away.
        self.refused_starts = 0
        #: How often Celery has ended a worker, by reason.
        self.celerys_own: Counter[str] = Counter()
        self.links = [
            Link(site, server, bench.proxy(url))
            for site in "ab"
            for server, url in (("broker", str(bench.broker.url)), ("database", bench.store_url))
        ]
        a, b = self._environment("a"), self._environment("b")
        self.workers: list[Worker] = [
            bench.worker(name="worker-a", env=a, wait=False),
            bench.worker(name="worker-b", env=b, wait=False),
            bench.worker(name="threads-b", env=b, pool="threads", concurrency=4, wait=False),
        ]
        self.beats: list[LocalProcess] = [
            bench.beat(name="beat-a", env=a, wait=False),
            bench.process("durable", "scheduler", name="scheduler-b", env=b, wait=False),
        ]
        for process in self.programs:
            process.wait_until_ready(90)

    @property
    def programs(self) -> list[LocalProcess]:
        """Every process of the application."""
        return [*self.workers, *self.beats]

    def link(self, site: str, server: str) -> FaultProxy:
        return next(link.proxy for link in self.links if (link.site, link.server) == (site, server))

    def _environment(self, site: str) -> dict[str, str]:
        broker, database = self.link(site, "broker").url, self.link(site, "database").url
        results = self.bench.env["CELERY_RESULT_BACKEND"]
        own = str(self.bench.store_url)
        if results.startswith("redis"):
            number = results.rpartition("/")[2]
            results = f"{broker.rpartition('/')[0]}/{number}"
        else:
            results = results.replace(own, database)
        return {
            "CELERY_BROKER_URL": broker,
            "CELERY_RESULT_BACKEND": results,
            "CELERY_DURABLE_DATABASE_URL": database,
        }

    # Life of a process.

    def begin(self, process: LocalProcess) -> None:
        """Start it again; it is ready when it is."""
        process.start(wait=False)

    def set_clock(self, process: LocalProcess, offset: int) -> None:
        """From its next start on its clock is so many seconds off."""
        process.environment()[record.OFFSET_VARIABLE] = str(offset)

    def look_after(self) -> None:
        """Start what has ended by itself, and remember that it did."""
        for process in self._everything:
            if process.name not in self.broken and not process.running:
                self._note_death(process)
                process.kill()
                self.begin(process)

    def _note_death(self, process: LocalProcess) -> None:
        if _NO_DATABASE in process.logs() and process.exit_code == 1 and not process.is_ready():
            self.refused_starts += 1
            return
        tail = "\n".join(process.logs().splitlines()[-40:])
        for sign, reason in _CELERYS_OWN.items():
            if sign in tail:
                self.celerys_own[reason] += 1
                return
        self.deaths.append(f"{process.name} ended by itself: exit code {process.exit_code}\n{tail}")

    def heal(self) -> None:
        """Everything runs again, and every way is open."""
        for link in self.links:
            link.proxy.heal()
        for process in self._everything:
            if process.running:
                process.thaw()
            else:
                process.kill()
                self.begin(process)
        self.wait_until(lambda: all(process.is_ready() for process in self._everything), 90)

    @property
    def _everything(self) -> list[LocalProcess]:
        return [self.broker, self.database, *self.programs]

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true in that time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.look_after()
            time.sleep(0.25)
        return True
