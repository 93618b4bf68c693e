"""The lab: the servers, the site in use, and how much is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.deployment import DEFAULTS, BrokerName, Site
from benchmarks.peers.peer import Kind, Peer
from benchmarks.rows import Goal, Row, Samples
from tests.nodes import Servers


@dataclass
class Lab:
    """What every measurement is given.

    ``quick``: fewer tasks and rounds.
    """

    quick: bool = False
    servers: Servers = field(default_factory=lambda: Servers(**DEFAULTS))
    #: What the peers' packages are.
    versions: dict[str, str] = field(default_factory=dict)
    _site: Site | None = None

    @property
    def rounds(self) -> int:
        """How often each side of a comparison is measured."""
        return 1 if self.quick else 3

    def size(self, full: int, quick: int) -> int:
        """How many tasks."""
        return quick if self.quick else full

    def site(self, broker: BrokerName) -> Site:
        """The running site on this broker: the one in use, or a new one in its place."""
        if self._site is None or self._site.broker != broker:
            self.leave()
            self._site = Site(self.servers, broker)
        return self._site.running()

    def new_site(self, broker: BrokerName, **options: Any) -> Site:
        """A site of one's own, with no process but the producer; any other one is closed before."""
        self.leave()
        self._site = Site(self.servers, broker, **options)
        return self._site

    @contextmanager
    def peer(self, kind: Kind) -> Iterator[Peer]:
        """A peer with an empty database; installed when it is first asked for."""
        peer = Peer(kind, self.servers.postgres)
        self.versions.update(kind.versions())
        try:
            yield peer
        finally:
            peer.close()

    def leave(self) -> None:
        """Close the site in use."""
        site, self._site = self._site, None
        if site is not None:
            site.close()

    def close(self) -> None:
        self.leave()
        self.servers.remove()

    def alternate(
        self, ours: Callable[[], float], base: Callable[[], float]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Measure both sides in turn: ours, base, ours, base …"""
        pairs = [(ours(), base()) for _ in range(self.rounds)]
        return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)

    def compare(
        self,
        name: str,
        title: str,
        ours: tuple[str, Callable[[], float]],
        base: tuple[str, Callable[[], float]],
        *,
        unit: str = "/s",
        goal: Goal | None = None,
        note: str = "",
    ) -> Row:
        """A row of two sides, each with a label and what measures it."""
        left, right = self.alternate(ours[1], base[1])
        return Row(name, title, Samples(ours[0], unit, left), Samples(base[0], unit, right), goal, note)

    def repeat(self, measure: Callable[[], float]) -> tuple[float, ...]:
        """Measure one side in every round."""
        return tuple(measure() for _ in range(self.rounds))


def pause_until(instant: float) -> None:
    """Wait for an instant, in seconds since the epoch."""
    time.sleep(max(0.0, instant - time.time()))
