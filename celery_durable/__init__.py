"""Durable sleeps and lease heartbeats for Celery."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_durable.api import current_lease, sleep, sleep_until, step
    from celery_durable.errors import (
        ConfigurationError,
        DurableError,
        ExecutionNotFound,
        LeaseLost,
        LeaseRenewalTimedOut,
        NotDurable,
        OperationRefused,
        PayloadTooLarge,
        ReplayDivergence,
        StepFailed,
        StepLimitExceeded,
        StoreUnavailable,
        TaskQuarantined,
    )
    from celery_durable.extension import Durable
    from celery_durable.lease import Lease
    from celery_durable.records import Execution
    from celery_durable.task import DurableTask

    __version__: str

__all__ = [
    "ConfigurationError",
    "Durable",
    "DurableError",
    "DurableTask",
    "Execution",
    "ExecutionNotFound",
    "Lease",
    "LeaseLost",
    "LeaseRenewalTimedOut",
    "NotDurable",
    "OperationRefused",
    "PayloadTooLarge",
    "ReplayDivergence",
    "StepFailed",
    "StepLimitExceeded",
    "StoreUnavailable",
    "TaskQuarantined",
    "__version__",
    "current_lease",
    "sleep",
    "sleep_until",
    "step",
]

#: Where the names are from, but for the errors.
_HOMES = {
    "Durable": "extension",
    "DurableTask": "task",
    "Execution": "records",
    "Lease": "lease",
    "current_lease": "api",
    "sleep": "api",
    "sleep_until": "api",
    "step": "api",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: pytest loads our plugin in projects that never do."""
    if name == "__version__":
        value: Any = _version()
    elif name in __all__:
        value = getattr(import_module(f"celery_durable.{_HOMES.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module 'celery_durable' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - it takes its time

    try:
        return version("celery-durable")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0.0.0"
