"""pytest-celery's cluster fixtures, backed by local processes.

`celery_setup` and all that it is made of work as pytest-celery documents them, on Redis and
RabbitMQ with results in Redis and PostgreSQL, without a Docker engine. `TEST_NODES=docker` leaves
pytest-celery's own containers in place (Redis, RabbitMQ; no PostgreSQL).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.forks import end_all

if os.environ.get("TEST_NODES") != "docker":
    from tests.nodes.celery_fixtures import (  # noqa: F401 (pytest finds them by name)
        celery_backend,
        celery_broker,
        celery_postgres_backend,
        default_postgres_backend,
        default_postgres_backend_cls,
        default_rabbitmq_broker,
        default_redis_backend,
        default_redis_broker,
        default_worker_cls,
        default_worker_container,
    )


@pytest.fixture(autouse=True)
def no_fork_outlives_its_test() -> Iterator[None]:
    yield
    end_all()
