"""The lab: the servers, the site in use, and how much is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
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

    @property
    def site_in_use(self) -> Site | None:
        """What the measurement before has left, with or without processes."""
        return self._site

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

    def in_turns(
        self, sides: Mapping[str, Callable[[], float]], *, may_fail: Container[str] = ()
    ) -> tuple[dict[str, tuple[float, ...]], dict[str, Exception]]:
        """Measure all sides in each round, one after the other.

        Returns the values of each side, and what went wrong with those that may fail: they are measured
        no more, and the others go on.
        """
        values: dict[str, list[float]] = {name: [] for name in sides}
        failed: dict[str, Exception] = {}
        for _ in range(self.rounds):
            for name, measure in sides.items():
                if name in failed:
                    continue
                try:
                    values[name].append(measure())
                except Exception as error:
                    if name not in may_fail:
                        raise
                    failed[name] = error
        return {name: tuple(found) for name, found in values.items() if name not in failed}, failed

    def alternate(
        self, ours: Callable[[], float], base: Callable[[], float]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Measure both sides in turn: ours, base, ours, base …"""
        values, _ = self.in_turns({"ours": ours, "base": base})
        return values["ours"], values["base"]

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
