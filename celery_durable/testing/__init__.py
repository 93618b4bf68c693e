"""A pytest plugin for the tests of durable tasks: time travel without waiting.

Fixtures: ``durable_clock``, ``durable_app``. Yours to define: ``durable_celery_app``, ``durable_config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from celery_durable.testing.plugin import durable_app, durable_celery_app, durable_clock, durable_config
    from celery_durable.testing.plugin import pytest_runtest_call as pytest_runtest_call
except ModuleNotFoundError as missing:
    # In production, where somebody takes a journal, there is no pytest.
    if missing.name != "pytest":
        raise

if TYPE_CHECKING:
    from celery_durable.testing.clock import DurableClock
    from celery_durable.testing.journal import Entry, Journal
    from celery_durable.testing.replaying import Replayed
    from celery_durable.testing.worker import Sent

__all__ = [
    "DurableClock",
    "Entry",
    "Journal",
    "Replayed",
    "Sent",
    "durable_app",
    "durable_celery_app",
    "durable_clock",
    "durable_config",
]

_HOMES = {
    "DurableClock": "clock",
    "Entry": "journal",
    "Journal": "journal",
    "Replayed": "replaying",
    "Sent": "worker",
}


def __getattr__(name: str) -> Any:
    """The other names, imported when they are first used: this module is loaded by every pytest."""
    if name not in _HOMES:
        raise AttributeError(f"module 'celery_durable.testing' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    value = getattr(import_module(f"celery_durable.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
