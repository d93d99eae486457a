"""The Environment protocol: what gives tasks, plays rollouts and scores them.

Promise to its author: `rollout` runs in a process of its own beside many others, may await
anything, and may fail, raise, hang or end its process without hurting any group but its own.
Promise from its author: `task` is deterministic in (settings, split, index), and the tasks
of split "eval" are held out from those of "train".

    class Countdown:
        name, version = "countdown", "1"
        def __init__(self, *, largest: int = 9) -> None: ...         # [environment].settings
        def num_tasks(self, split): return None                      # endless
        def task(self, split, index): return json.dumps({...})
        async def rollout(self, task, generate):
            rollout = RolloutBuilder(prompt_token_ids)
            rollout.add_completion(await generate(rollout.token_ids))
            return rollout.finish(reward=1.0)

A constructor that has a parameter `assets` is given the folder of the run's assets
(tokenizer, task data), or None while there are none. The class, not only the instance, must
have `version`: a worker tells it before the run's settings are known.

A class with `replays = True` promises that a rollout is a function of its task and of what the
policy says, and adds at least one token between two turns: then its rewards can be recomputed
from the tokens, by an auditor (`echo2_workers.replaying`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast, runtime_checkable

import numpy as np

from echo2.errors import ConfigError, EnvironmentError_
from echo2.types import REWARD_MAX, TOKENS_MAX, Sampling, Span, Task
from echo2_workers.engine import Logprobs, Tokens

Split = Literal["train", "eval"]
Finish = Literal["stop", "length", "abort", "environment"]
ENTRY_POINT_GROUP: Final = "echo2.environments"
BUILTIN: Final = {
    "addition": "echo2_workers.environments.addition:Addition",
    "reversal": "echo2_workers.environments.reversal:Reversal",
    "null": "echo2_workers.environments.null:Null",
}
"""Light and trusted: a daemon may import them itself."""
WITH_PACKAGES: Final = {
    "holdem": "echo2_workers.environments.holdem:Holdem",
    "jsonl": "echo2_workers.environments.jsonl:Jsonl",
    "sokoban": "echo2_workers.environments.sokoban:Sokoban",
}
"""Built in too, and in need of an extra."""
PREFIXED: Final = {
    "reasoning_gym": "echo2_workers.environments.reasoning_gym:ReasoningGym",
    "verifiers": "echo2_workers.environments.verifiers:Verifiers",
}
"""Given as "PREFIX:REST"; REST is the constructor's first argument. These win over a module
of the same name."""
SPANS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy sampled in one turn: ids [T], behaviour logprobs [T], and spans over
    [0, T) that name the versions. `finish` is "stop" or "length"."""

    token_ids: tuple[int, ...]
    logprobs: Logprobs
    spans: tuple[Span, ...]
    finish: Finish


class Generate(Protocol):
    """Let the policy continue `token_ids`; by default sampled as the lease says."""

    async def __call__(
        self, token_ids: Sequence[int], sampling: Sampling | None = None
    ) -> Completion: ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored trajectory. All arrays are [T]: `loss_mask` True where the policy sampled
    the token, `logprobs` 0.0 elsewhere. `spans` cover the sampled tokens. `info` stays on
    the worker (for the environment's own tests and logs)."""

    token_ids: Tokens
    logprobs: Logprobs
    loss_mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
    spans: tuple[Span, ...]
    reward: float
    prompt_length: int
    num_turns: int
    finish: Finish
    info: Mapping[str, Any] = field(default_factory=dict)


class RolloutBuilder:
    """Puts prompt, completions and observations together, over any number of turns."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids: list[int] = [int(token_id) for token_id in prompt]
        """Everything so far: what the next `generate` continues."""
        self.num_turns = 0
        self._prompt_length = len(self.token_ids)
        self._logprobs: list[float] = [0.0] * self._prompt_length
        self._loss_mask: list[bool] = [False] * self._prompt_length
        self._spans: list[Span] = []
        self._finish: Finish = "environment"

    def add_completion(self, completion: Completion) -> None:
        """Tokens that the policy sampled; they enter the loss."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids)
        self._logprobs.extend(float(logprob) for logprob in completion.logprobs)
        self._loss_mask.extend([True] * len(completion.token_ids))
        for span in completion.spans:
            self._spans.append(Span(span.version, start + span.start, start + span.end))
        self.num_turns += 1
        self._finish = completion.finish

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Tokens that the environment gives (a tool's answer); not in the loss."""
        self.token_ids.extend(int(token_id) for token_id in token_ids)
        self._logprobs.extend([0.0] * len(token_ids))
        self._loss_mask.extend([False] * len(token_ids))

    def finish(
        self, reward: float, *, finish: Finish | None = None, info: Mapping[str, Any] | None = None
    ) -> Rollout:
        """The rollout; `finish` is that of the last completion unless given. EnvironmentError_
        for a reward that is none."""
        try:
            number = float(reward)
        except (TypeError, ValueError):
            raise EnvironmentError_(
                f"the reward is {reward!r:.200}, a {type(reward).__name__}; it must be a number"
            ) from None
        return Rollout(
            token_ids=np.asarray(self.token_ids, np.int32),
            logprobs=np.asarray(self._logprobs, np.float32),
            loss_mask=np.asarray(self._loss_mask, np.bool_),
            spans=tuple(self._spans),
            reward=number,
            prompt_length=self._prompt_length,
            num_turns=self.num_turns,
            finish=self._finish if finish is None else finish,
            info=dict(info or {}),
        )


@runtime_checkable
class Environment(Protocol):
    """See the module's text."""

    name: str
    version: str

    def num_tasks(self, split: Split) -> int | None: ...
    def task(self, split: Split, index: int) -> str: ...
    async def rollout(self, task: Task, generate: Generate) -> Rollout: ...


def check_rollout(rollout: object) -> Rollout:
    """Raises EnvironmentError_ when an environment returned what no group can hold."""
    if not isinstance(rollout, Rollout):
        raise EnvironmentError_(
            f"rollout returned {type(rollout).__name__}; return what RolloutBuilder.finish gives"
        )
    length = len(rollout.token_ids)
    if not 1 <= length <= TOKENS_MAX:
        raise EnvironmentError_(f"a trajectory of {length} tokens; 1 to {TOKENS_MAX} are allowed")
    if len(rollout.logprobs) != length or len(rollout.loss_mask) != length:
        raise EnvironmentError_(
            f"{length} tokens with {len(rollout.logprobs)} logprobs and a mask of "
            f"{len(rollout.loss_mask)}; all must be as long"
        )
    if not np.isfinite(rollout.reward):
        raise EnvironmentError_(f"the reward is {rollout.reward}; it must be a finite number")
    if abs(rollout.reward) > REWARD_MAX:
        raise EnvironmentError_(
            f"the reward is {rollout.reward:g}; at most {REWARD_MAX:g} is allowed, to either side"
        )
    if not 1 <= len(rollout.spans) <= SPANS_MAX:
        raise EnvironmentError_(
            f"{len(rollout.spans)} spans of versions; a trajectory has 1 to {SPANS_MAX}: it needs "
            "a sampled token, and may have so many turns and updates"
        )
    return rollout


def find_environment(name: str) -> Callable[..., Environment]:
    """The class of a built-in name, a registered entry point, or "package.module:Class"; for
    "PREFIX:REST" the class with its first argument given.

    Imports it, so whatever its module does at import happens here. Raises ConfigError.
    """
    path = BUILTIN.get(name) or WITH_PACKAGES.get(name)
    prefix, _, rest = name.partition(":")
    if prefix in PREFIXED:
        if not rest:
            raise ConfigError(
                f"environment.name = {name!r} lacks what comes after the colon, for example "
                f'"reasoning_gym:chain_sum" or "verifiers:NAME"'
            )
        return functools.partial(_imported(name, PREFIXED[prefix]), rest)
    if path is None and ":" not in name:
        found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        path = next((entry.value for entry in found), None)
        if path is None:
            registered = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
            own = {*BUILTIN, *WITH_PACKAGES, *(entry.name for entry in registered)}
            known = [*sorted(own), *(f"{prefix}:NAME" for prefix in PREFIXED)]
            raise ConfigError(
                f"environment.name = {name!r}: there is no such environment; known are "
                f'{", ".join(known)}, or name yours as "package.module:Class"'
            )
    return _imported(name, path or name)


def _imported(name: str, path: str) -> Callable[..., Environment]:
    module_name, _, attribute = path.partition(":")
    try:
        found_class = getattr(importlib.import_module(module_name), attribute)
    except ConfigError:
        raise  # it says already what is missing
    except Exception as error:
        raise ConfigError(
            f"environment.name = {name!r}: {module_name}:{attribute} cannot be imported "
            f"({type(error).__name__}: {error}); it must be importable from the folder of the "
            f"configuration, the current folder or the installed packages"
        ) from error
    return cast("Callable[..., Environment]", found_class)


@dataclass(frozen=True, slots=True)
class About:
    """What is told of an environment before it is made."""

    version: str
    replays: bool = False


def about_environment(name: str) -> About:
    """`version` and `replays` of an environment's class. Raises ConfigError as
    `environment_version` does, and for a `replays` that is neither true nor false."""
    version = environment_version(name)
    found = find_environment(name)
    made_of = found.func if isinstance(found, functools.partial) else found
    replays = getattr(made_of, "replays", False)
    if not isinstance(replays, bool):
        raise ConfigError(
            f"environment.name = {name!r}: the class has replays = {replays!r}; it must be True or "
            "False (may its rewards be recomputed from the tokens?)"
        )
    return About(version, replays)


def environment_version(name: str) -> str:
    """The `version` of an environment's class. Raises ConfigError when it has none."""
    found = find_environment(name)
    made_of = found.func if isinstance(found, functools.partial) else found
    version = getattr(made_of, "version", None)
    if not isinstance(version, str):
        raise ConfigError(
            f"environment.name = {name!r}: the class has no text attribute `version`; add one, "
            'e.g. version = "1", and change it whenever its tasks or rewards change'
        )
    return version


def load_environment(
    name: str, settings: Mapping[str, Any], assets: Path | None = None
) -> Environment:
    """Make the environment with `settings` as keyword arguments. Raises ConfigError."""
    made_by = find_environment(name)
    environment_version(name)
    arguments = dict(settings)
    parameters = inspect.signature(made_by).parameters
    if "assets" in parameters:
        arguments["assets"] = assets
    try:
        inspect.signature(made_by).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.settings: {error}; {name} takes "
            f"{', '.join(parameter for parameter in parameters if parameter != 'assets') or 'none'}"
        ) from None
    try:
        environment = made_by(**arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment.settings: {name} cannot be made with {dict(settings)!r} "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"environment.name = {name!r}: it has no complete set of name, version, num_tasks, "
            "task and rollout; see echo2_workers.environment"
        )
    return environment


def add_import_paths(*folders: Path) -> None:
    """Make modules in these folders importable, after everything that is already."""
    for folder in folders:
        path = str(folder.resolve())
        if path not in sys.path:
            sys.path.append(path)
