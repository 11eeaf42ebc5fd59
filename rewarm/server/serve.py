"""Run the server, and stop it so that every stream ends properly."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from rewarm.engine.engine import Engine
from rewarm.errors import InvalidOption, NotReady
from rewarm.options import ServerOptions

from .app import create_app

AFTER_GRACE = 5.0
"""Seconds that connections have to close once the engine has ended every answer."""


class Server(uvicorn.Server):
    """A server that ends the engine's work while connections are open, and exits with 0 on a
    signal."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        config = uvicorn.Config(
            create_app(engine, options),
            host=options.host,
            port=options.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(options.grace + AFTER_GRACE),
            ws="none",
        )
        super().__init__(config)
        self.engine = engine
        self.options = options

    def listens(self) -> bool:
        """Wait until connections are accepted; false where that failed."""
        while not self.started and not self.should_exit:
            time.sleep(0.01)
        return self.started and not self.should_exit

    @property
    def url(self) -> str:
        """The address, with the port that was really taken."""
        port = self.servers[0].sockets[0].getsockname()[1]
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"http://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The loop's executor is not used: the process would wait for a model that is still loading.
        stopping = threading.Thread(
            target=self.engine.stop, args=(self.options.grace,), name="rewarm-stop", daemon=True
        )
        stopping.start()
        await super().shutdown(sockets)
        if self.force_exit:  # after a second Ctrl-C, its end would be logged as an error
            await self.lifespan.shutdown()
        deadline = time.monotonic() + self.options.grace + AFTER_GRACE
        while stopping.is_alive() and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.02)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, and at once on a second Ctrl-C. uvicorn would note the signal and raise it again
        afterwards; without that, the exit code is 0."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def serve(engine: Engine, options: ServerOptions, on_ready: Callable[[str], None]) -> None:
    """Start the engine, serve until SIGINT or SIGTERM, and stop the engine.

    `on_ready` is called with the address once the model is loaded. Raises NotReady where the model
    cannot be loaded.
    """
    options.check_bind()
    server = Server(engine, options)
    listener = _listener(options)

    def watch() -> None:
        if engine.wait() != "ready":
            server.should_exit = True
        elif server.listens():
            on_ready(server.url)

    engine.start()
    threading.Thread(target=watch, name="rewarm-watch", daemon=True).start()
    server.run(sockets=[listener])
    if engine.failed_to_load:
        engine.stop()  # uvicorn may have ended without a call of `shutdown`
        raise NotReady(engine.detail)


def _listener(options: ServerOptions) -> socket.socket:
    """Open the listening socket. It is opened before the model is loaded, so that an error of the
    address shows at once."""
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        why, advice = error.strerror or error, "give another --port, or 0 for a free one"
        where = f"{options.host}:{options.port}"
        raise InvalidOption(f"cannot listen on {where} ({why}): {advice}") from error
