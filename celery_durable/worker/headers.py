"""Headers of a task message that Celery's worker takes to be well made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flaw_of_headers(headers: Mapping[str, Any]) -> str | None:
    """Why Celery's worker would stumble over these headers; None where it does not.

    It reads them outside of any ``try``: one message with nonsense in them would be the end of the worker.
    """
    limits = headers.get("timelimit")
    if limits and not _are_limits(limits):
        return f"its timelimit is no pair of seconds: {limits!r:.60}"
    stamps = headers.get("stamps")
    if stamps and not isinstance(stamps, Mapping):
        return f"its stamps are no mapping: {stamps!r:.60}"
    names = headers.get("stamped_headers")
    if names and not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
        return f"its stamped_headers are no names: {names!r:.60}"
    return None


def _are_limits(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and [_is_limit(limit) for limit in value] == [True, True]


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and value >= 0)
