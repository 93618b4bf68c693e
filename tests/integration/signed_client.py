"""A client of the features project with signed messages, as a program of its own.

Celery lets no other serializer be read in a process that has called `setup_security()`. Writes what it
saw as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.integration.features_proj import app, nap
from tests.nodes.waiting import wait_for


def stored(task_id: str) -> dict[str, Any]:
    """The message of a task, as its row has it."""
    message = app.durable.get(task_id).message
    return {"type": message.content_type, "headers": message.headers, "body": message.body.hex()}


def main() -> None:
    result = nap.delay(42, 600)
    wait_for(lambda: result.state == "SLEEPING", message="it sleeps")
    wait_for(lambda: app.durable.get(result.id).status == "sleeping", message="its row sleeps")
    asleep = stored(result.id)
    app.durable.wake(result.id)
    value = result.get(timeout=20)
    seen = {"id": result.id, "value": value, "asleep": asleep, "ended": stored(result.id)}
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
