"""A TCP proxy that breaks connections on purpose."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from typing_extensions import Self

from tests.nodes.ports import free_port

#: "up" is from the client to the server, "down" the other way.
Direction = Literal["up", "down"]

_CHUNK = 65_536
# Close by RST instead of FIN: linger on, for zero seconds.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class FaultProxy:
    """Stands between clients and one server; without a fault it only passes bytes on.

    Runs in a thread of the test process, so no process needs to be told. Faults hold until
    `heal()`, for connections that are open and for new ones. It cannot show silent packet loss:
    the kernel goes on acknowledging what a client sends.
    """

    def __init__(self, url: str) -> None:
        """`url`: of the server, with host and port; `self.url` is the same through the proxy."""
        parts = urlsplit(url)
        assert parts.hostname, f"no host in {url}"
        assert parts.port, f"no port in {url}"
        self._target = (parts.hostname, parts.port)
        self.port = free_port()
        account, at, _ = parts.netloc.rpartition("@")
        self.url = urlunsplit(parts._replace(netloc=f"{account}{at}127.0.0.1:{self.port}"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self.faults = _Faults()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def close(self) -> None:
        """Drop all connections and stop; harmless twice."""
        if not self._thread.is_alive():
            return
        self._run(self._stop_listening())
        self._run(self._reset_links())
        self._run(self._wait_for_links())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Faults.

    def delay(self, seconds: float) -> None:
        """Hold each piece of data for so long, in both directions."""
        self._call(lambda: setattr(self.faults, "delay", seconds))

    def freeze(self) -> None:
        """Pass nothing on; connections stay open and new ones are accepted."""
        self._call(self.faults.open.clear)

    def reset(self) -> None:
        """Reset every open connection; new ones work."""
        self._run(self._reset_links())

    def refuse(self) -> None:
        """Reset every open connection and refuse new ones, as a server that is down."""
        self._run(self._stop_listening())
        self._run(self._reset_links())

    def cut_after(self, count: int, direction: Direction = "down") -> None:
        """Reset each connection after `count` more bytes in one direction have passed."""

        def arm() -> None:
            self.faults.cut_after = (direction, count)
            for link in self._links:
                link.passed[direction] = 0

        self._call(arm)

    def cut_answer_to(self, pattern: bytes, times: int = 1) -> None:
        """Let a request that contains `pattern` reach the server, then reset the connection
        instead of passing the server's answer on: the client cannot know what has happened.
        The next `times` such requests; `b"COMMIT"` makes commits ambiguous."""
        self._call(lambda: self.faults.cut_answers(pattern, times))

    def heal(self) -> None:
        """Take back all faults."""

        def mend() -> None:
            self.faults.delay = 0
            self.faults.cut_after = None
            self.faults.cut_answers(b"", 0)
            self.faults.open.set()

        self._call(mend)
        self._run(self._listen())

    # What has happened.

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._links)

    @property
    def cuts_left(self) -> int:
        """How many answers `cut_answer_to` still has to cut."""
        return self.faults.answers_to_cut

    # Inside the thread's loop.

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    def _call(self, function: Callable[[], object]) -> None:
        async def call() -> None:
            function()

        self._run(call())

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _reset_links(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _wait_for_links(self) -> None:
        """A loop that is closed under a link leaves a complaint on the terminal."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=5)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        link = _Link(self.faults, writer, server_writer)
        if self._server is None:
            # Refused while it was being made: nobody else knows of it.
            link.reset()
            return
        self._links.add(link)
        try:
            await link.run(reader, server_reader)
        finally:
            self._links.discard(link)


class _Faults:
    """What the links are to do to the bytes."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay: float = 0
        self.cut_after: tuple[Direction, int] | None = None
        self.pattern = b""
        self.answers_to_cut = 0

    def cut_answers(self, pattern: bytes, times: int) -> None:
        self.pattern, self.answers_to_cut = pattern, times


class _Link:
    """One client's connection and its counterpart at the server."""

    def __init__(self, faults: _Faults, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.faults = faults
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self._client = client
        self._server = server
        self._recent = b""
        self._cut_next_answer = False

    async def run(self, client: asyncio.StreamReader, server: asyncio.StreamReader) -> None:
        """Pass bytes both ways until either side has gone."""
        pumps = [
            asyncio.create_task(self._pump(client, self._server, "up")),
            asyncio.create_task(self._pump(server, self._client, "down")),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._client.close()
            self._server.close()

    def reset(self) -> None:
        _reset(self._client)
        _reset(self._server)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                await self.faults.open.wait()
                if self.faults.delay:
                    await asyncio.sleep(self.faults.delay)
                allowed = self._allowed(chunk, direction)
                writer.write(chunk[:allowed])
                await writer.drain()
                if allowed < len(chunk):
                    self.reset()
                    return

    def _allowed(self, chunk: bytes, direction: Direction) -> int:
        """How many bytes may pass before the connection is cut."""
        if direction == "up":
            self._look_for_pattern(chunk)
        elif self._cut_next_answer:
            return 0
        self.passed[direction] += len(chunk)
        if self.faults.cut_after is None or self.faults.cut_after[0] != direction:
            return len(chunk)
        over = self.passed[direction] - self.faults.cut_after[1]
        return len(chunk) - max(0, over)

    def _look_for_pattern(self, chunk: bytes) -> None:
        if not self.faults.answers_to_cut:
            self._recent = b""
            return
        self._recent += chunk
        if self.faults.pattern in self._recent:
            self.faults.answers_to_cut -= 1
            self._cut_next_answer = True
        # Enough to find a pattern that two pieces share.
        self._recent = self._recent[-(len(self.faults.pattern) - 1) or len(self._recent) :]


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    with suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
