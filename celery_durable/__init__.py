"""Durable sleeps and lease heartbeats for Celery."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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

try:
    __version__ = version("celery-durable")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"
