"""Free TCP ports for private servers."""

from __future__ import annotations

import random
import socket

# Below the range from which Linux takes the ports of outgoing connections: while a server is
# down between a kill and a restart, no client can happen to sit on its port.
_CHOICE = range(20_000, 32_000)
# Hypothesis seeds the global generator, which would give each test process the same ports.
_random = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """A port on 127.0.0.1 that nobody uses, and that this process has not been given before."""
    while True:
        port = _random.choice(_CHOICE)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Whether something on 127.0.0.1 accepts connections at `port`."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
