"""Nodes of a Celery deployment as local processes: servers, workers, faults.

See README.md in this folder.
"""

from __future__ import annotations

from tests.nodes.bench import (
    DEPLOYMENTS,
    FAST_REDELIVERY,
    Bench,
    Deployment,
    Servers,
    on,
)
from tests.nodes.postgres import PostgresServer
from tests.nodes.process import LocalProcess, ProcessEnded
from tests.nodes.proxy import FaultProxy
from tests.nodes.rabbit import RabbitServer
from tests.nodes.redis_server import RedisServer
from tests.nodes.waiting import WaitTimeout, wait_for
from tests.nodes.witness import Sighting, Witness
from tests.nodes.workers import Beat, Worker

__all__ = [
    "DEPLOYMENTS",
    "FAST_REDELIVERY",
    "Beat",
    "Bench",
    "Deployment",
    "FaultProxy",
    "LocalProcess",
    "PostgresServer",
    "ProcessEnded",
    "RabbitServer",
    "RedisServer",
    "Servers",
    "Sighting",
    "WaitTimeout",
    "Witness",
    "Worker",
    "on",
    "wait_for",
]
