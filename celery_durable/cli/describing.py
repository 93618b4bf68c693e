"""Executions as JSON and as words. Arguments and results are shown only to who asks for them."""

from __future__ import annotations

import json
from typing import Any

from celery_durable.cli.tables import iso
from celery_durable.message import headers_of
from celery_durable.records import Execution, JournalEntry, Outcome
from celery_durable.store.statistics import Stats

#: Headers of a message that tell where a task comes from, by the names under which they are shown.
_HEADERS = {
    "root_id": "Root",
    "parent_id": "Parent",
    "group": "Group",
    "retries": "Retries",
    "shadow": "Shadow",
    "expires": "Expires",
    "origin": "Origin",
}
_REVEALED = {"argsrepr": "Arguments", "kwargsrepr": "Keywords"}


def as_row(execution: Execution) -> dict[str, Any]:
    """One line of a list."""
    is_held = execution.owner is not None
    return {
        "task_id": execution.task_id,
        "task": execution.task_name,
        "status": execution.status,
        "due_at": iso(execution.due_at),
        "owner": execution.owner,
        "lease_until": iso(execution.wake_at) if is_held else None,
        "token": execution.token,
        "sends": execution.sends,
        "crashes": execution.crashes,
        "created_at": iso(execution.created_at),
        "updated_at": iso(execution.updated_at),
        "finished_at": iso(execution.finished_at),
    }


def as_document(execution: Execution, *, reveal: bool) -> dict[str, Any]:
    """All that there is of one execution."""
    outcome = execution.outcome
    document = as_row(execution)
    document["outcome"] = None if outcome is None else {"kind": outcome.kind, "reason": outcome.reason}
    if outcome is not None and reveal:
        document["outcome"]["value"] = outcome_value(execution)
    message = execution.message
    document["queue"] = None if message is None else message.routing_key
    headers = _headers(execution)
    document |= {name: headers.get(name) for name in _HEADERS}
    if reveal:
        document |= {name: headers.get(name) for name in _REVEALED}
    document["journal"] = [_as_entry(entry, reveal) for entry in execution.journal]
    return document


def _as_entry(entry: JournalEntry, reveal: bool) -> dict[str, Any]:
    document = {
        "position": entry.position,
        "kind": entry.kind,
        "name": entry.name or None,
        "recorded_at": iso(entry.recorded_at),
        "due_at": iso(entry.due_at),
        "is_over": entry.is_over if entry.due_at is not None else None,
    }
    return document | {"result": payload_text(entry)} if reveal else document


def as_numbers(stats: Stats) -> dict[str, Any]:
    """Statistics; spans in seconds."""
    return {
        "now": iso(stats.now),
        "counts": stats.counts,
        "outbox": stats.outbox,
        "overdue": stats.overdue,
        "oldest_due_at": iso(stats.oldest_due_at),
        "lateness": stats.lateness,
        "next_due_at": iso(stats.next_due_at),
        "unclaimed": stats.unclaimed,
        "most_sends": stats.most_sends,
        "leases": stats.leases,
        "leases_near_end": stats.leases_near_end,
        "leases_expired": stats.leases_expired,
        "scheduler_seen": stats.scheduler_seen,
    }


def message_facts(execution: Execution, *, reveal: bool) -> dict[str, Any]:
    """What the stored message says about the task, by names for people."""
    if execution.message is None:
        return {}
    headers = _headers(execution)
    names = _HEADERS | _REVEALED if reveal else _HEADERS
    given = {label: headers.get(name) for name, label in names.items()}
    own = execution.task_id if given["Root"] == execution.task_id else None
    if own is not None:
        del given["Root"]
    return {"Queue": execution.message.routing_key} | {name: value for name, value in given.items() if value}


def _headers(execution: Execution) -> dict[str, Any]:
    return {} if execution.message is None else headers_of(execution.message.headers)


def outcome_text(execution: Execution) -> str:
    """How it came to its end, and why."""
    outcome = execution.outcome
    if outcome is None:
        return ""
    return outcome.kind if outcome.reason is None else f"{outcome.kind}: {outcome.reason}"


def outcome_value(execution: Execution) -> str | None:
    """The value or exception that the execution came to, as text."""
    return None if execution.outcome is None else payload_text(execution.outcome)


def payload_text(item: JournalEntry | Outcome) -> str | None:
    """An encoded payload as text. Nothing is unpickled to be looked at."""
    if item.payload is None:
        return None
    if item.content_type == "application/json":
        try:
            return json.dumps(json.loads(item.payload), ensure_ascii=False)
        except (RecursionError, ValueError):
            pass
    return f"({len(item.payload)} bytes of {item.content_type or 'unknown content'})"
