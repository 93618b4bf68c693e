"""On what, and with which versions, something was measured."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.nodes.process import find_program

PACKAGES = ("celery-durable", "celery", "kombu", "sqlalchemy", "psycopg", "redis", "amqp")
#: Server, where it may be, the Debian package, and how to ask for its version.
SERVERS = (
    ("postgres", "/usr/lib/postgresql/*/bin/postgres", "postgresql", "--version"),
    ("redis-server", "/usr/bin/redis-server", "redis-server", "--version"),
)


def machine() -> dict[str, str]:
    """Processor, cores, memory, system, and how busy it was."""
    load = "/".join(f"{value:.1f}" for value in psutil.getloadavg())
    return {
        "measured": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{psutil.cpu_count()} × {_processor()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": platform.platform(terse=True),
        "load at the start": load,
    }


def versions() -> dict[str, str]:
    """Python, packages, servers."""
    found = {"Python": platform.python_version()}
    found |= {package: version(package) for package in PACKAGES}
    for name, place, package, option in SERVERS:
        program = find_program(name, place, package=package)
        said = subprocess.run([program, option], capture_output=True, text=True, check=False).stdout
        found[package] = _number_in(said)
    found["rabbitmq-server"] = _rabbit_version()
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _number_in(text: str) -> str:
    words = [word.removeprefix("v=") for word in text.split()]
    return next((word for word in words if word[:1].isdigit()), "unknown")


def _rabbit_version() -> str:
    # Asking the server's own tools takes a second of Erlang: its folder says it as well.
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
    return found[-1].name.partition("-")[2] if found else "unknown"
