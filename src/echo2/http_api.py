"""HTTP for people and Prometheus: /health, /metrics, /api/status. Reads, never changes.

On loopback unless configured otherwise, and then only with a bearer token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from echo2.errors import ConfigError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpApi:
    """`status` gives the JSON-able state, `metrics` the Prometheus text; one scrape at a time."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        token: str,
        status: Callable[[], dict[str, Any]],
        metrics: Callable[[], Awaitable[bytes]],
    ) -> None:
        self.url = ""
        self._host, self._port, self._token = host, port, token
        self._status, self._metrics = status, metrics
        self._scraping = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; `url` is known afterwards. ConfigError when the address is taken."""
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/api/status", self._get_status)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"http cannot listen on {self._host}:{self._port} ({_cause(error)}); set http.host "
                "to an address of this machine and http.port to a free one, or 0 for any"
            ) from error
        port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token:
            given = request.headers.get("Authorization", "")
            # aiohttp hands over bytes that are no UTF-8 as surrogates
            header = given.encode(errors="surrogateescape")
            if not hmac.compare_digest(header, f"Bearer {self._token}".encode()):
                raise web.HTTPUnauthorized(text="a bearer token (http.token) is needed\n")
        return await handler(request)

    async def _get_health(self, request: web.Request) -> web.Response:
        status = self._status()
        return web.json_response({"ok": True, "state": status["state"], "step": status["step"]})

    async def _get_metrics(self, request: web.Request) -> web.Response:
        async with self._scraping:
            text = await self._metrics()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status())


def _cause(error: OSError) -> str:
    """The system's own words, without those of the event loop around them."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)
