"""The HTTP server of an environment process: one, on loopback, for all of its rollouts.

    async with serve_openai(generate, tokenizer) as session:
        await my_agent(base_url=session.base_url, api_key=session.api_key)
        rollout = session.rollout(reward=1.0)

It starts with the first rollout that needs it, on any free port, and stops with the last.
Each rollout has an address and a key of its own, both random. When it ends, its calls under
way are cancelled, and its address is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hmac
import json
import secrets
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, Literal

import structlog
from aiohttp import web

from echo2_workers.endpoint import replies
from echo2_workers.endpoint.chat_tokenizer import ChatTokenizer
from echo2_workers.endpoint.errors import ApiError
from echo2_workers.endpoint.requests import read_chat_request, read_text_request
from echo2_workers.endpoint.session import Answer, OpenAISession
from echo2_workers.endpoint.tools import HermesTools, ToolFormat
from echo2_workers.environment import Generate

log = structlog.get_logger(__name__)

BODY_MAX_BYTES: Final = 64 << 20
CALLS_AT_ONCE_MAX: Final = 64
"""Of one rollout."""
KEEP_ALIVE_S: Final = 10.0
"""A stream whose answer is not there yet gets a comment so often."""

Call = Callable[[OpenAISession, Any], Awaitable[Answer]]


@contextlib.asynccontextmanager
async def serve_openai(
    generate: Generate,
    tokenizer: ChatTokenizer,
    *,
    tools: ToolFormat | None = None,
    sampling: Literal["run", "request"] = "run",
) -> AsyncIterator[OpenAISession]:
    """Serve one rollout. `tools` says how the policy calls tools (Hermes form by default).

    `sampling`: temperature and top_p are those of the run, or those that the agent asks for.
    """
    loop = asyncio.get_running_loop()
    shared = _shared.setdefault(loop, _SharedServer())
    server = await shared.acquire()
    try:
        session = server.open(
            lambda base_url, name: OpenAISession(
                generate,
                tokenizer,
                tools=HermesTools() if tools is None else tools,
                sampling=sampling,
                base_url=base_url,
                name=name,
            )
        )
        try:
            yield session
        finally:
            await server.close(session)
    finally:
        await shared.release()


class OpenAIServer:
    def __init__(self) -> None:
        self._sessions: dict[str, OpenAISession] = {}
        self._running: dict[str, set[asyncio.Task[Answer]]] = {}
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=BODY_MAX_BYTES)
        root = "/{session}/v1"
        app.router.add_post(f"{root}/chat/completions", self._chat)
        app.router.add_post(f"{root}/completions", self._text)
        app.router.add_get(f"{root}/models", self._models)
        app.router.add_route("*", "/{rest:.*}", self._unknown)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, make: Callable[[str, str], OpenAISession]) -> OpenAISession:
        """`make(base_url, name)`."""
        name = f"rollout-{secrets.token_hex(16)}"
        session = make(f"{self._address}/{name}/v1", name)
        self._sessions[name] = session
        self._running[name] = set()
        return session

    async def close(self, session: OpenAISession) -> None:
        """Its address is gone, and its calls under way are cancelled."""
        del self._sessions[session.name]
        running = self._running.pop(session.name)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # ------------------------------------------------------------------------ handlers

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        with _refusals() as refused:
            session, body = await self._read(request)
            asked = read_chat_request(body)
            call = self._start(session, session.chat(asked))
            if asked.stream:
                return await _streamed(
                    request, call, lambda a: replies.chat_chunks(a, asked, session.tokenizer)
                )
            answer = await _finished(call)
            return web.json_response(replies.chat_reply(answer, asked, session.tokenizer))
        return _refusal(refused[0])

    async def _text(self, request: web.Request) -> web.StreamResponse:
        with _refusals() as refused:
            session, body = await self._read(request)
            asked = read_text_request(body)
            call = self._start(session, session.complete(asked))
            if asked.stream:
                return await _streamed(
                    request, call, lambda a: replies.text_chunks(a, asked, session.tokenizer)
                )
            answer = await _finished(call)
            return web.json_response(replies.text_reply(answer, asked, session.tokenizer))
        return _refusal(refused[0])

    async def _models(self, request: web.Request) -> web.StreamResponse:
        with _refusals() as refused:
            self._session(request)
            return web.json_response(replies.models_reply())
        return _refusal(refused[0])

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        return _refusal(
            ApiError(
                f"{request.method} {request.path} is not served; served are POST "
                "BASE_URL/chat/completions, POST BASE_URL/completions and GET BASE_URL/models",
                status=404,
                code="unknown_url",
            )
        )

    def _session(self, request: web.Request) -> OpenAISession:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise ApiError("there is no such rollout, or it has ended", status=404)
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {session.api_key}".encode()):
            raise ApiError(
                "the api key is not that of this rollout",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )
        return session

    async def _read(self, request: web.Request) -> tuple[OpenAISession, Any]:
        session = self._session(request)
        try:
            body = json.loads(await request.read())
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(f"the body is larger than {BODY_MAX_BYTES} bytes", status=413) from error
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from error
        if self._sessions.get(session.name) is not session:  # it ended while the body came
            raise ApiError("the rollout has ended", status=404)
        return session, body

    def _start(
        self, session: OpenAISession, call: Coroutine[Any, Any, Answer]
    ) -> asyncio.Task[Answer]:
        """In the context of the rollout, so that its work counts as its group's."""
        running = self._running[session.name]
        if len(running) >= CALLS_AT_ONCE_MAX:
            call.close()
            raise ApiError(
                f"{len(running)} calls of this rollout are under way; wait for one of them",
                status=429,
                kind="rate_limit_error",
                code="too_many_calls",
            )
        task = asyncio.get_running_loop().create_task(call, context=session.context)
        running.add(task)
        task.add_done_callback(running.discard)
        return task


async def _finished(call: asyncio.Task[Answer]) -> Answer:
    """Its answer. The call ends with its client: `await` hands a cancellation on to it."""
    try:
        return await call
    except ApiError:
        raise
    except asyncio.CancelledError:
        if _is_cancelled() or not call.cancelled():
            raise
        raise ApiError("the rollout has ended", status=404) from None
    except Exception as error:
        raise _failed(error) from error


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(error: Exception) -> ApiError:
    """The policy could not answer; `OpenAISession.failure` holds the same error."""
    log.warning("endpoint_call_failed", reason=str(error))
    return ApiError(
        f"the policy could not answer: {type(error).__name__}: {error}",
        status=500,
        kind="server_error",
    )


async def _streamed(
    request: web.Request,
    call: asyncio.Task[Answer],
    chunks: Callable[[Answer], Iterator[replies.Reply]],
) -> web.StreamResponse:
    """An error that comes in time is an HTTP error; a later one is an event of the stream."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    try:
        while not (await asyncio.wait({call}, timeout=KEEP_ALIVE_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b": the policy is at work\n\n")
        answer = await _finished(call)
    except ApiError as error:
        if not response.prepared:
            raise
        await response.write((replies.event(error.body()) + replies.DONE).encode())
        return response
    finally:
        call.cancel()  # the client has gone; nothing when it is done
    if not response.prepared:
        await response.prepare(request)
    for chunk in chunks(answer):
        await response.write(replies.event(chunk).encode())
    await response.write(replies.DONE.encode())
    return response


@contextlib.contextmanager
def _refusals() -> Iterator[list[ApiError]]:
    refused: list[ApiError] = []
    try:
        yield refused
    except ApiError as error:
        refused.append(error)


def _refusal(error: ApiError) -> web.Response:
    # A client that tries again would sample again, and what it did not see would be recorded.
    return web.json_response(error.body(), status=error.status, headers={"x-should-retry": "false"})


class _SharedServer:
    """Of one event loop: counts its rollouts."""

    def __init__(self) -> None:
        self._count = 0
        self._starting: asyncio.Task[OpenAIServer] | None = None

    async def acquire(self) -> OpenAIServer:
        self._count += 1
        if self._starting is None:
            # In no rollout's context: whose group would the server's own work be?
            self._starting = asyncio.get_running_loop().create_task(
                _started(), context=contextvars.Context()
            )
        try:
            return await asyncio.shield(self._starting)
        except BaseException:
            await self.release()
            raise

    async def release(self) -> None:
        self._count -= 1
        if self._count == 0 and self._starting is not None:
            starting, self._starting = self._starting, None
            with contextlib.suppress(OSError):  # it did not start: nothing to stop
                await (await starting).stop()


async def _started() -> OpenAIServer:
    server = OpenAIServer()
    await server.start()
    return server


_shared: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedServer]] = (
    weakref.WeakKeyDictionary()
)
