"""A private PostgreSQL server."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg

from tests.nodes.folders import new_folder
from tests.nodes.ports import free_port
from tests.nodes.process import LocalProcess, find_program

_USER = "postgres"


class PostgresServer(LocalProcess):
    """PostgreSQL on a free port of 127.0.0.1, without passwords, the superuser being "postgres".

    Committed data survives `kill()`. It would not survive a power cut: nothing is synced to
    the disk, which is what makes a fresh server ready in half a second.
    """

    # SIGTERM would wait for all clients to leave.
    stop_signal = signal.SIGINT

    def __init__(self, *, options: Mapping[str, object] | None = None) -> None:
        """`options`: server settings, such as `{"max_connections": 20}`."""
        super().__init__("postgres", folder=new_folder("postgres"), user=_service_user())
        self.port = free_port()
        self._options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": 300,
            "shared_buffers": "32MB",
            **(options or {}),
        }
        self._numbers = itertools.count(1)

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir()
        if self.user:
            shutil.chown(data, self.user, self.user)
        arguments = ["-U", _USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(
            [_binary("initdb"), "-D", str(data), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            user=self.user,
            group=self.user,
            extra_groups=[] if self.user else None,
        )

    def command(self) -> list[str]:
        options = [f"--{name}={value}" for name, value in self._options.items()]
        data = str(self.folder / "data")
        return [_binary("postgres"), "-D", data, "-p", str(self.port), *options]

    def is_ready(self) -> bool:
        with suppress(psycopg.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    def remove(self) -> None:
        super().remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str = _USER, driver: str = "postgresql+psycopg") -> str:
        """The SQLAlchemy URL of a database."""
        return f"{driver}://{_USER}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, *, database: str = _USER) -> list[tuple[Any, ...]]:
        """Run one statement outside any transaction, and return its rows, if it has any."""
        with psycopg.connect(
            self.url(database, "postgresql"), autocommit=True, connect_timeout=2
        ) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create_database(self, template: str = "template1") -> str:
        """The name of a new database, a copy of `template`."""
        name = f"test_{next(self._numbers)}"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is still connected."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _binary(name: str) -> str:
    return find_program(name, f"/usr/lib/postgresql/*/bin/{name}", package="postgresql")


def _service_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
