"""An environment whose rollout is an agent: code that is given an OpenAI client.

    class Helper(AgentEnvironment):
        name, version = "helper", "1"

        def num_tasks(self, split): ...
        def task(self, split, index): ...

        async def agent(self, client, task):          # or a plain `def`
            answer = await client.chat.completions.create(model="policy", messages=[...])
            return 1.0                                 # the reward

An agent that is a plain function runs in a thread and gets a blocking client. What the
trajectory is, and which of several is trained, says `echo2_workers.endpoint.session`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from echo2.errors import ConfigError
from echo2.types import Task
from echo2_workers.endpoint.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from echo2_workers.endpoint.server import serve_openai
from echo2_workers.endpoint.session import OpenAISession, Trained
from echo2_workers.endpoint.tools import HermesTools, ToolFormat
from echo2_workers.environment import Generate, Rollout, Split

if TYPE_CHECKING:
    import openai


_LOOPBACK: Final = {"trust_env": False, "verify": False}
"""Plain HTTP to this process: no proxy, and no certificates, which take 0.3 s to load."""


class AgentEnvironment(ABC):
    """Class attributes are settings of the environment's author. A subclass that has an
    `__init__` takes `assets` in it and hands it on."""

    name: str = "agent"
    version: str = "1"
    tools: ClassVar[ToolFormat] = HermesTools()
    """How the policy calls tools."""
    trained: ClassVar[Trained] = "last"
    """Which trajectory is trained when there are several."""
    sampling: ClassVar[Literal["run", "request"]] = "run"
    """Whose temperature and top_p hold."""
    threads_max: ClassVar[int] = 64
    """Agents that are plain functions and run at once, in this process."""

    def __init__(self, *, assets: Path | None = None) -> None:
        self._assets = assets
        self._async_client: tuple[asyncio.AbstractEventLoop, openai.AsyncOpenAI] | None = None

    @abstractmethod
    def num_tasks(self, split: Split) -> int | None: ...

    @abstractmethod
    def task(self, split: Split, index: int) -> str: ...

    @abstractmethod
    def agent(self, client: Any, task: Task) -> Any:
        """Play `task` with `client` (openai.AsyncOpenAI, or openai.OpenAI for a plain function)
        and return the reward. What it raises fails the group."""

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return load_chat_tokenizer(self._assets)

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        async with serve_openai(
            generate, self.tokenizer, tools=self.tools, sampling=self.sampling
        ) as session:
            try:
                reward = await self._played(session, task)
            except Exception:
                if session.failure is not None:  # the cause of what the agent met
                    raise session.failure from None
                raise
            return session.rollout(float(reward), trained=self.trained)

    async def _played(self, session: OpenAISession, task: Task) -> float:
        if inspect.iscoroutinefunction(self.agent):
            played = await self.agent(self._client(session), task)
        else:
            context = contextvars.copy_context()
            client = self._blocking_client.with_options(
                base_url=session.base_url, api_key=session.api_key
            )
            played = await asyncio.get_running_loop().run_in_executor(
                self._threads, context.run, self.agent, client, task
            )
        return float(played)

    def _client(self, session: OpenAISession) -> openai.AsyncOpenAI:
        """All rollouts of a loop share connections; making them anew takes longer than a call."""
        loop = asyncio.get_running_loop()
        if self._async_client is None or self._async_client[0] is not loop:
            library = _openai()
            http = library.DefaultAsyncHttpxClient(**_LOOPBACK)
            # The group's own deadline (environment.rollout_timeout_s) ends a call.
            self._async_client = (
                loop,
                library.AsyncOpenAI(
                    base_url=session.base_url, api_key="-", http_client=http, timeout=None
                ),
            )
        return self._async_client[1].with_options(
            base_url=session.base_url, api_key=session.api_key
        )

    @cached_property
    def _blocking_client(self) -> openai.OpenAI:
        library = _openai()
        http = library.DefaultHttpxClient(**_LOOPBACK)
        client: openai.OpenAI = library.OpenAI(
            base_url="http://127.0.0.1", api_key="-", http_client=http, timeout=None
        )
        return client

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads_max, thread_name_prefix="agent")


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            'an agent environment needs the package openai: pip install "echo2[openai]"'
        ) from error
    return openai
