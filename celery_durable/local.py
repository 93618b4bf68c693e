"""The settings of an application that needs no server: broker and results in local files.

Apart from the transport itself, which only such applications import: it needs a POSIX system.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRANSPORT = "celery_durable.embedded:Transport"
BROKER_FOLDER = "celery-durable-broker"
RESULTS_FILE = "celery-durable-results.db"


def embedded_defaults(folder: Path) -> dict[str, object]:
    """The Celery settings of an application that keeps its broker and results in ``folder``.

    Nothing is created before the first use.
    """
    home = folder.resolve()
    return {
        "broker_url": "filesystem://",
        "broker_transport": TRANSPORT,
        "broker_transport_options": {"folder": str(home / BROKER_FOLDER)},
        "broker_connection_retry_on_startup": True,
        "result_backend": f"db+sqlite:///{home / RESULTS_FILE}",
        # Seconds that a process waits while another one writes.
        "database_engine_options": {"connect_args": {"timeout": 30}},
        "database_create_tables_at_setup": False,
    }


def is_embedded(conf: Mapping[str, Any]) -> bool:
    """Does this Celery configuration use the embedded transport?"""
    return conf.get("broker_transport") == TRANSPORT
