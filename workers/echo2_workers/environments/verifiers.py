"""`verifiers:NAME`: an environment of the library verifiers (0.4), played as it is.

NAME is the environment's module (a taskset, in the library's words), installed or importable
where the learner and the workers run. It brings tasks, tools, stops and rewards; the policy
is its agent. Each rollout is an episode of the library in our environment process, whose model
calls go to the rollout's OpenAI endpoint: tokens, logprobs, mask and versions are recorded there
as they were sampled (`echo2_workers.endpoint`). The reward is the episode's own.

Life-cycle of a task: the learner iterates the taskset and sends a task's data as JSON; a worker
makes the task again from it, as the library's own server does, and never loads the data set.

Not played: environments of the classic kind (`load_environment`, before 0.4), those with
several agents, and those that need a container or run the policy's commands.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.metadata
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import structlog

from echo2.errors import ConfigError, EnvironmentError_
from echo2.types import Task
from echo2_workers.endpoint import ChatTokenizer, load_chat_tokenizer, serve_openai
from echo2_workers.endpoint.session import Trained
from echo2_workers.environment import Generate, Rollout, Split
from echo2_workers.environments.draws import check_eval_share
from echo2_workers.environments.extras import require, versioned
from echo2_workers.environments.verifiers_tasks import SplitTasks

log = structlog.get_logger(__name__)

EXTRA: Final = "verifiers"
_SET_BY_ECHO2: Final = ("taskset", "interception", "retries")


class Verifiers:
    """`taskset`: settings of the environment's data and tasks (its `TasksetConfig`);
    `eval_taskset`: what differs for evals, for example another split of its data; without it
    `eval_share` of the tasks are held out by a hash of their content. `env`: settings of how it
    is played (its `EnvConfig`), for example { agent = { max_turns = 4 } }. `epochs` None: endless
    passes over the training tasks, each in an order of its own. `trained`: see
    `echo2_workers.endpoint.session`."""

    version = versioned("1", "verifiers", extra=EXTRA, environment="verifiers")

    def __init__(
        self,
        taskset_id: str,
        *,
        assets: Path | None,
        taskset: Mapping[str, Any] | None = None,
        eval_taskset: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        seed: int = 0,
        eval_share: float = 0.1,
        epochs: int | None = None,
        trained: str = "last",
    ) -> None:
        check_eval_share(eval_share)
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1, or left out for endless")
        if trained not in ("last", "longest", "only"):
            raise ValueError(f'trained is {trained!r}; allowed are "last", "longest" and "only"')
        self.name = f"verifiers:{taskset_id}"
        self._assets = assets
        self._trained = cast("Trained", trained)
        self._library = require("verifiers.v1", extra=EXTRA, environment=self.name)
        self._chat = require(
            "echo2_workers.environments.verifiers_chat", extra=EXTRA, environment=self.name
        )
        self._module = self._imported(taskset_id)
        reserved = sorted({*_SET_BY_ECHO2} & set(env or {}))
        if reserved:
            raise ConfigError(
                f"environment.settings: env sets {', '.join(reserved)}, which echo2 sets itself; "
                "the taskset's settings belong into settings.taskset"
            )
        table = {**(env or {}), "taskset": {**(taskset or {}), "id": taskset_id}}
        self._env = self._made(table)
        evals = None
        if eval_taskset is not None:
            merged = {**(taskset or {}), **eval_taskset, "id": taskset_id}
            evals = self._library.load_taskset(self._resolved({"taskset": merged}).taskset)
        self._tasks = SplitTasks(
            self._env.taskset, evals, seed=seed, eval_share=eval_share, epochs=epochs
        )
        self._by = _distribution(self._module.__name__)
        self._interception = self._chat.RolloutInterception()
        self._env._interception = self._interception
        self._shared = _Shared(self._env, self._interception) if self._shares() else None

    def num_tasks(self, split: Split) -> int | None:
        return self._tasks.count(split)

    def task(self, split: Split, index: int) -> str:
        return json.dumps({"by": self._by, "task": self._tasks.data(split, index)})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        content = json.loads(task.payload)
        if content["by"] != self._by:
            raise EnvironmentError_(
                f"{self.name}: the task was made by {content['by']!r} and this worker has "
                f"{self._by!r}; install the same release on the learner and on every worker"
            )
        kind = self._env.taskset.task_type()
        played = kind(
            kind.data_type().model_validate(content["task"]), self._env.config.taskset.task
        )
        if self._shared is not None:
            await self._shared.up()
        async with serve_openai(generate, self._tokenizer) as session:
            context = self._library.ModelContext(
                model="policy", client=self._chat.Endpoint.of(session.base_url, session.api_key)
            )
            episode = await self._env.run_episode(played, context)
            if session.failure is not None:  # the cause of what the environment met
                raise session.failure
            trace = self._trace(episode)
            if not session.num_calls:
                refused = next((call.error.message for call in trace.calls if call.error), "")
                raise EnvironmentError_(
                    f"{self.name}: the policy was not asked once, so there is nothing to train "
                    f"(stopped by {trace.stop_condition!r}; {refused or 'no call was made'}); a "
                    "first prompt must fit into the model's context"
                )
            rewards = {name: reward.value for name, reward in trace.rewards.items() if reward}
            told = {**trace.metrics, **rewards, "stop": trace.stop_condition}
            return session.rollout(float(trace.reward), trained=self._trained, info=told)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return load_chat_tokenizer(self._assets)

    def _trace(self, episode: Any) -> Any:
        """The only trace of an episode that went well."""
        errors = [error for trace in episode.traces for error in trace.errors] + episode.errors
        if not episode.ok:
            told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason"
            raise EnvironmentError_(f"{self.name}: the episode failed ({told})")
        if len(episode.traces) != 1:
            raise EnvironmentError_(
                f"{self.name}: the episode has {len(episode.traces)} traces of its agent, and a "
                "trajectory has one reward; use an environment that plays its agent once"
            )
        return episode.traces[0]

    # ------------------------------------------------------------------------- making it

    def _imported(self, taskset_id: str) -> Any:
        """Its module. ConfigError for what is not there, cannot be imported, or is no taskset."""
        vf = self._library
        try:
            module = vf.import_taskset(taskset_id)
        except ModuleNotFoundError as error:
            missing = getattr(error.__cause__ or error, "name", None) or taskset_id
            own = str(missing) in str(taskset_id).replace("-", "_").lower()
            raise ConfigError(
                f"environment.name = {self.name!r}: "
                + (
                    f"there is no module {missing!r}; install the environment's package (pip "
                    "install PACKAGE, on the learner and on every worker), or put its file beside "
                    "the configuration"
                    if own
                    else f"it needs the module {missing!r}, which is not installed here"
                )
            ) from error
        except Exception as error:  # whatever a module of others does when it is imported
            raise ConfigError(
                f"environment.name = {self.name!r}: its module cannot be imported "
                f"({type(error).__name__}: {error}){_CLASSIC if _is_classic(error) else ''}"
            ) from error
        try:
            vf.taskset_config_type(taskset_id)
        except (AttributeError, TypeError, ValueError) as error:
            classic = hasattr(module, "load_environment")
            raise ConfigError(
                f"environment.name = {self.name!r}: {error}{_CLASSIC if classic else ''}"
            ) from error
        return module

    def _resolved(self, table: dict[str, Any]) -> Any:
        try:
            return self._library.resolve_env_config(table)
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise ConfigError(
                f"environment.settings do not fit {self.name}: {_problems(error)}"
            ) from error

    def _made(self, table: dict[str, Any]) -> Any:
        """The library's environment, with its agent in our process."""
        vf = self._library
        config = self._resolved(table)
        agents = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
        if len(agents) != 1:
            raise ConfigError(
                f"environment.name = {self.name!r}: it has {len(agents)} agents "
                f"({', '.join(agents) or 'none'}); echo2 trains environments with one"
            )
        ((seat, agent),) = agents.items()
        changed = self._seated(config.taskset.id, agent)
        config = config.model_copy(update={seat: changed})
        try:
            env = vf.load_environment(config)
        except Exception as error:  # the environment's own code
            raise ConfigError(
                f"environment.settings: {self.name} cannot be made with {table!r} "
                f"({type(error).__name__}: {error})"
            ) from error
        kind = env.taskset.task_type()
        if kind.NEEDS_CONTAINER:
            raise ConfigError(
                f"environment.name = {self.name!r}: its {kind.__name__} needs a container "
                "(NEEDS_CONTAINER), and echo2 plays in a process of the worker"
            )
        taskset = config.taskset
        for server in (*kind.toolsets(taskset.task), *env.taskset.toolsets(taskset)):
            if not server.config.url and server.config.runtime.type != "subprocess":
                raise ConfigError(
                    f"environment.name = {self.name!r}: its tool server {server.server_name!r} "
                    f"runs in {server.config.runtime.type!r}; echo2 starts tool servers beside "
                    'the worker ("subprocess"), or uses one at a url'
                )
        return env

    def _seated(self, taskset_id: str, agent: Any) -> Any:
        """The agent's settings, played in our process: by the environment's own loop where
        that is one that can be, and else by our chat loop."""
        vf = self._library
        if agent.client is not None or agent.model is not None:
            raise ConfigError(
                f"environment.name = {self.name!r}: its agent has a model of its own "
                f"(model = {agent.model!r}); leave model and client unset, the policy plays it"
            )
        if agent.runtime not in (vf.PrimeConfig(), vf.SubprocessConfig()):
            raise ConfigError(
                f"environment.name = {self.name!r}: its agent's runtime is "
                f'{agent.runtime.type!r}; echo2 plays in a process of the worker ("subprocess")'
            )
        harness = agent.harness
        if harness is None and (own := vf.default_harness_id(taskset_id)) != "bash":
            harness = vf.harness_config_type(own)(id=own)
        if harness is not None and harness.id != "null":
            loop = vf.load_harness(harness)
            if loop.NEEDS_CONTAINER or loop.EXECUTES_CODE:
                raise ConfigError(
                    f"environment.name = {self.name!r}: its agent's harness is {harness.id!r}, "
                    f"a program that {'needs a container' if loop.NEEDS_CONTAINER else ''}"
                    f"{'runs commands of the policy' if not loop.NEEDS_CONTAINER else ''}; echo2 "
                    'plays "null" (a chat with the task\'s tools), and loops that run in this '
                    "process (NEEDS_CONTAINER and EXECUTES_CODE false)"
                )
        else:
            kept = {} if harness is None else harness.model_dump(exclude={"id"})
            harness = vf.HarnessConfig(id=self._chat.CHAT, **kept)
        changes = {
            "harness": harness,
            "runtime": vf.SubprocessConfig(),
            "retries": vf.RetryConfig(max_retries=0),  # a second attempt is a second sample
        }
        return agent.model_copy(update=changes)

    def _shares(self) -> bool:
        """Whether something must run for as long as rollouts do."""
        kind, base = type(self._env), self._library.Env
        overridden = kind.start is not base.start or kind.stop is not base.stop
        return overridden or bool(self._env.taskset.toolsets(self._env.taskset.config))


class _Shared:
    """What all rollouts of an environment have in common (tool servers, what its `start`
    brings): up with the first rollout, and until the process ends. Starting takes seconds."""

    def __init__(self, env: Any, interception: Any) -> None:
        self._env = env
        self._interception = interception
        self._up: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def up(self) -> None:
        """Raises what starting it raises; the next call tries again."""
        loop = asyncio.get_running_loop()
        up = self._up
        if up is None or up.get_loop() is not loop or (up.done() and up.exception()):
            up = self._up = loop.create_future()
            # In no rollout's context: whose group would this work be?
            self._keeper = loop.create_task(self._keep(up), context=contextvars.Context())
        await asyncio.shield(up)

    async def _keep(self, up: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                self._env._interception = self._interception
                self._interception.shared = dict(self._env._shared_tools)
                up.set_result(None)
                await asyncio.Event().wait()  # until the loop ends, which cancels this
        except Exception as error:
            if up.done():  # in the environment's `stop`: what was played counts
                log.warning("verifiers_stop_failed", error=f"{type(error).__name__}: {error}")
            else:
                up.set_exception(error)
        finally:
            self._env._interception = self._interception
            self._interception.shared = {}


_CLASSIC: Final = (
    "; it is written for the classic Environment classes (load_environment), which verifiers 0.4 "
    "no longer has: use a release of it with a Taskset, or play it as an agent "
    "(docs/openai_endpoint.md)"
)


def _is_classic(error: Exception) -> bool:
    return "module 'verifiers' has no attribute" in str(error) or (
        isinstance(error, ImportError) and "from 'verifiers'" in str(error)
    )


def _distribution(module: str) -> str:
    """Name and version of the installed package of a module; "" for a loose file."""
    found = importlib.metadata.packages_distributions().get(module.partition(".")[0])
    return f"{found[0]} {importlib.metadata.version(found[0])}" if found else ""


def _problems(error: Exception) -> str:
    """Of a pydantic error each problem with its place, of others the text."""
    listed = getattr(error, "errors", None)
    if not callable(listed):
        return str(error)
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'settings'}: {problem['msg']}"
        for problem in listed()
    )
