"""How an environment of verifiers plays inside our process: its chat loop, and its wire.

Promise: what the policy sees and says passes through the library's own interception, so that
limits, stops, rewrites and traces work as in the library, and from there to the rollout's
endpoint. Nothing is started, downloaded or bound outside loopback, but tool servers that the
environment itself brings.

The library's harness `null` is a script that a package manager installs at its first start;
`ChatHarness` is the same loop without the script. The library finds harnesses by the name of a
module, so `CHAT` is such a name. Its client to a model loads certificates (0.1 s of this
process) each time; `_Relay` is that client with the connections of all rollouts in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import EvalClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import Interception, InterceptionServer

CHAT: Final = "echo2_chat"
TOOLS_CONNECT_S: Final = 60.0
_LOOPBACK: Final = {"trust_env": False, "verify": False, "timeout": None}
"""Plain HTTP to this process: no proxy, no certificates. Deadlines are the rollout's."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the policy, calls the tools that it names, and asks again, until it names none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages.extend(message_to_wire(message) for message in prompt or ())
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(**_LOOPBACK))
            http.headers["Authorization"] = f"Bearer {secret}"
            tools, dispatch, servers = await self._connected(mcp_urls, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                reply = await http.post(f"{endpoint}/chat/completions", json=body)
                if reply.is_error:
                    # A refused turn (a limit, a stop) has told the trace why, and so has an
                    # error of the policy; the library takes those before this result. Of a
                    # conversation that is full remains what was said.
                    full = "context_length_exceeded" in reply.text
                    return vf.ProgramResult(int(not full), "", "" if full else reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append({k: v for k, v in message.items() if v is not None})
                calls = message.get("tool_calls") or []
                for call in calls:
                    answer = await _gate(http, tool_interception_url, call)
                    if answer is None:
                        answer = await _called(call, dispatch, servers)
                    messages.append(bound_tool_message(answer))
                if not calls:
                    return vf.ProgramResult(0, "", "")

    async def _connected(
        self, urls: dict[str, str], stack: contextlib.AsyncExitStack
    ) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]], dict[str, Any]]:
        if not urls:
            return [], {}, {}
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in urls.items()}
        async with asyncio.timeout(TOOLS_CONNECT_S):
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
        return tools, dispatch, connected


async def _gate(
    http: httpx.AsyncClient, url: str | None, call: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What a hook of the task says in place of a tool, or None where the tool may be called."""
    if url is None:
        return None
    name = call["function"]["name"]
    asked = {"tool_call_id": call["id"], "name": name, "arguments": _arguments(call)}
    reply = await http.post(url, json=asked)
    reply.raise_for_status()
    decision: dict[str, Any] = reply.json()
    if decision["action"] == "stop":  # the rollout has been told, and ends in good order
        raise RuntimeError(decision["reason"])
    return decision["message"] if decision["action"] == "deny" else None


async def _called(
    call: Mapping[str, Any], dispatch: dict[str, tuple[str, str]], servers: dict[str, Any]
) -> dict[str, Any]:
    """The tool's message. What the policy got wrong is told to the policy."""
    name, arguments = call["function"]["name"], _arguments(call)
    content: Any
    if not isinstance(arguments, dict):
        content = "error: the arguments of the tool must be a JSON object; call it again with one"
    elif name not in dispatch:
        content = f"error: unknown tool {name!r}"
    else:
        content = await call_mcp(servers, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}


def _arguments(call: Mapping[str, Any]) -> Any:
    """The object, or the text where it is no JSON."""
    text = call["function"].get("arguments") or "{}"
    try:
        return json.loads(text)
    except ValueError:
        return text


class Endpoint(vf.EvalClientConfig):
    """The endpoint of one rollout. Its key stays out of what is dumped and recorded."""

    _key: str = ""

    @classmethod
    def of(cls, base_url: str, key: str) -> Endpoint:
        made = cls(base_url=base_url, api_key_var="ECHO2_ROLLOUT_API_KEY")
        made._key = key
        return made


class _Relay(EvalClient):
    """The library's relay to a model, over connections that all rollouts share."""

    def __init__(self, endpoint: Endpoint, http: httpx.AsyncClient) -> None:
        self.base_url, self.api_key = endpoint.base_url, endpoint._key
        self.headers: dict[str, str] = {}
        self.client = http

    async def close(self) -> None:
        """The connections are not this rollout's."""


class _Server(InterceptionServer):
    def __init__(self, http: httpx.AsyncClient, secrets: Sequence[str]) -> None:
        super().__init__(state_service_secrets=secrets)
        self._http = http

    def _client(self, config: Any) -> Any:
        if not isinstance(config, Endpoint):  # a model that the environment brings itself
            return super()._client(config)
        return _Relay(config, self._http)


class RolloutInterception(Interception):
    """A server for each rollout, started by it, so that hooks that run there count as its
    group's. `shared` are the tool servers of all tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, Any] = {}
        self._http: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def start(self) -> None:
        """Nothing is shared but connections."""

    @contextlib.asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        secrets = [tool.state_secret for tool in self.shared.values() if tool.state_secret]
        async with (
            _Server(self._connections(), secrets) as server,
            server.acquire(session) as slot,
        ):
            yield slot

    def _connections(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._http is None or self._http[0] is not loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._http = (loop, httpx.AsyncClient(limits=limits, **_LOOPBACK))
        return self._http[1]


__all__ = ["ChatHarness"]
"""What the library looks for a harness in."""
sys.modules.setdefault(CHAT, sys.modules[__name__])
