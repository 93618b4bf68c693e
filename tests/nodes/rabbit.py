"""A private RabbitMQ server."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from tests.nodes.folders import new_folder
from tests.nodes.ports import accepts, free_port
from tests.nodes.process import LocalProcess, find_program, inherited_environment
from tests.nodes.waiting import wait_for


class QueueDepth(NamedTuple):
    """What a queue holds."""

    name: str
    ready: int
    unacknowledged: int


class RabbitServer(LocalProcess):
    """RabbitMQ on a free port of 127.0.0.1, user guest with password guest.

    Its vhosts, durable queues and persistent messages survive `kill()`. Its port mapper (epmd),
    which it would leave behind as a daemon, is a process of its own here.
    """

    def __init__(self, *, options: Mapping[str, object] | None = None) -> None:
        """`options`: lines of rabbitmq.conf, such as `{"consumer_timeout": 5000}` (ms)."""
        super().__init__("rabbitmq", folder=new_folder("rabbitmq"))
        self.port = free_port()
        self.node = f"nodes{self.port}@localhost"
        self._distribution_port = free_port()
        self._mapper_port = free_port()
        self._mapper = LocalProcess(
            "epmd",
            [_epmd(), "-port", str(self._mapper_port), "-address", "127.0.0.1"],
            folder=self.folder,
            ready=lambda: accepts(self._mapper_port),
        )
        self._options = {
            "listeners.tcp.default": f"127.0.0.1:{self.port}",
            "disk_free_limit.absolute": "1MB",
            "log.console": "true",
            "log.console.level": "info",
            **(options or {}),
        }
        self._numbers = itertools.count(1)

    def prepare(self) -> None:
        lines = [f"{name} = {value}\n" for name, value in self._options.items()]
        (self.folder / "rabbitmq.conf").write_text("".join(lines))
        (self.folder / "advanced.config").write_text("[].\n")
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "home").mkdir()

    def command(self) -> list[str]:
        # Not the wrapper on the PATH, which changes user and folder.
        scripts = "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"
        return [find_program("rabbitmq-server", scripts, package="rabbitmq-server")]

    def environment(self) -> dict[str, str]:
        folder = self.folder
        return {
            # Makes the start script exec: our child is the server itself and gets the signals.
            "RUNNING_UNDER_SYSTEMD": "true",
            "HOME": str(folder / "home"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def start(self, *, wait: bool = True, timeout: float = 90) -> RabbitServer:
        if not self._mapper.running:
            self._mapper.start()
        return super().start(wait=wait, timeout=timeout)

    def is_ready(self) -> bool:
        return "Server startup complete" in self.logs()

    def remove(self) -> None:
        super().remove()
        self._mapper.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, vhost: str = "/") -> str:
        """The URL of a vhost, for Celery as a broker."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost}"

    def new_vhost(self) -> str:
        """The name of a new, empty vhost."""
        name = f"test{next(self._numbers)}"
        self._add(name)
        return name

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost with all its queues; its connections are closed."""
        self.run(f"rabbit_vhost:delete({_binary(name)}, {_binary('nodes')})")

    def purge_vhost(self, name: str) -> None:
        """Drop every message in every queue of a vhost, those on their way to a consumer too."""
        self.delete_vhost(name)
        self._add(name)

    def queues(self, vhost: str) -> list[QueueDepth]:
        """Every queue of a vhost, exact at the time of the call."""
        items = "[name, messages_ready, messages_unacknowledged]"
        # The full stop keeps an empty answer a string, which Erlang would print as a list.
        answer = self.run(
            '"." ++ lists:flatten([io_lib:format("~s\\t~b\\t~b\\r", [element(4, N), R, U]) '
            f"|| [{{_, N}}, {{_, R}}, {{_, U}}] <- rabbit_amqqueue:info_all("
            f"{_binary(vhost)}, {items})])"
        )
        rows = [row.split("\\t") for row in answer.strip('"').removeprefix(".").split("\\r") if row]
        return [QueueDepth(name, int(ready), int(unacked)) for name, ready, unacked in rows]

    def run(self, expression: str) -> str:
        """Evaluate an Erlang expression in the server, in some milliseconds; the printed answer.

        rabbitmqctl does the same in half a second of processor time.
        """
        cookie = (self.folder / "home" / ".erlang.cookie").read_text()
        done = subprocess.run(
            [_erl_call(), "-name", self.node, "-c", cookie, "-timeout", "10", "-e"],
            input=f"{expression}.\n",
            env={**inherited_environment(), **self.environment()},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if done.returncode or not done.stdout.startswith("{ok, "):
            raise RuntimeError(f"{expression}: {done.stdout}{done.stderr}")
        return done.stdout.removeprefix("{ok, ").removesuffix("}")

    def _add(self, vhost: str) -> None:
        name, everything = _binary(vhost), _binary(".*")
        permissions = f"{everything}, {everything}, {everything}"
        # At once: a worker that finds itself without permission ends.
        self.run(
            f"rabbit_vhost:add({name}, {_binary('nodes')}), "
            f"rabbit_auth_backend_internal:set_permissions({_binary('guest')}, {name}, "
            f"{permissions}, {_binary('nodes')})"
        )
        alive = f"rabbit_vhost_sup_sup:is_vhost_alive({name})"
        wait_for(lambda: self.run(alive) == "true", message=f"vhost {vhost} is up")


def _binary(text: str) -> str:
    return f'<<"{text}">>'


def _epmd() -> str:
    return find_program("epmd", package="rabbitmq-server")


def _erl_call() -> str:
    places = ("/usr/lib/erlang/bin/erl_call", "/usr/lib/erlang/lib/erl_interface-*/bin/erl_call")
    return find_program("erl_call", *places, package="erlang-base")
