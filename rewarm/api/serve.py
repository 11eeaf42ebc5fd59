"""Running the server, and stopping it so that every stream ends properly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from rewarm.engine.engine import Engine

from .app import create_app
from .options import ServerOptions

log = logging.getLogger("rewarm")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AFTER_GRACE = 5.0
"""Seconds that connections have to close once the engine has ended every answer."""


class Server(uvicorn.Server):
    """Ends the engine's work while connections are still open, and exits with 0 on a signal."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(engine, options),
                host=options.host,
                port=options.port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(options.grace + AFTER_GRACE),
                ws="none",
            )
        )
        self.engine = engine
        self.options = options

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Not in the loop's executor: the process would wait for a model that is still loading.
        stopping = threading.Thread(
            target=self.engine.stop, args=(self.options.grace,), name="rewarm-stop", daemon=True
        )
        stopping.start()
        await super().shutdown(sockets)
        deadline = time.monotonic() + self.options.grace + AFTER_GRACE
        while stopping.is_alive() and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but a signal is not raised again afterwards: the exit code is 0."""
        before = {}
        with contextlib.suppress(ValueError):  # not on the main thread
            before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(engine: Engine, options: ServerOptions | None = None) -> None:
    """Serve until SIGINT or SIGTERM, and stop the engine, which must have been started, then."""
    options = options or ServerOptions()
    options.check_bind()
    server = Server(engine, options)
    log.info("listening on http://%s:%s", options.host, options.port)
    server.run()
    if not server.started:
        raise SystemExit(f"rewarm: could not listen on {options.host}:{options.port}")
