"""The Engine protocol: what samples tokens from the installed version.

Promise that an implementation gives: a version is loaded in whole or an error is raised;
no token is sampled while paused; each token's span names the version that sampled it; the
same request with the same seed under the same version gives the same tokens.

Life-cycle:  start -> (install) -> generate ... generate -> stop
  where install is done by `echo2_workers.installing`, for every engine alike:
  pause(mode) -> load(tensors) -> score(probe) -> [load(previous) if the canary fails] -> resume

Methods are called from one event loop and must not block it (an engine that computes does so
in a thread of its own). `echo2_workers.engine_host` runs an engine in its own process and
speaks to the daemon through a pipe; `engines.null` runs inside the daemon. To add an engine:
implement this, and name it in `engine_host.make_engine` and in `worker.engine`.

What each method owes:
  start    load tokenizer-free model code for `assets` (a folder with config.json), allocate,
           and run one warm-up of prefill, decode and score, so that the first lease is not
           slow. No version is installed yet. Raises EngineError with what to do.
  pause    return when no token will be sampled until `resume`:
           "continue"  at the next token boundary; running requests keep their KV cache, and
                       their later tokens carry the new version (spans)
           "finish"    when the running requests have ended; none that waits is started
           "abort"     at the next token boundary; running requests lose what they sampled
                       and start again from their prompt after `resume`
           A second pause while paused returns at once.
  load     only while paused. All names, shapes and dtypes are checked before the first byte
           is changed (tied tensors are absent from `tensors`; the engine ties them). On
           EngineError the weights are those before, or, if `poisoned` is set on the error,
           unknown.
  score    works while paused; float32 [N, L] logprobs at temperature 1 of each token given
           those before it, 0.0 in column 0; None when the engine has no model.
  resume   sampling goes on. Harmless when not paused.
  generate one sequence; calls `on_tokens(n)` for n tokens sampled since the last call, at
           least once a second while it progresses; a token that is thrown away by "abort"
           stays counted. Cancelling the call ends the request. Raises RequestError for a
           request that no version could serve, EngineError when the engine fails.
  steps    grows with every token boundary; `busy` says whether it should be growing. The
           host watches them to notice an engine that hangs.
  stop     end everything; running `generate` calls raise EngineError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from echo2.errors import EngineError
from echo2.types import Sampling, Span, Version

InstallMode = Literal["continue", "finish", "abort"]
TensorBytes = tuple[str, tuple[int, ...], memoryview]
"""(dtype in safetensors' names, shape, read-only bytes in C order)."""
Tensors = Mapping[str, TensorBytes]


class StoredTensors(Mapping[str, TensorBytes]):
    """The tensors of a version on disk. `folder` and `digest` name it to engines whose model
    lies in other processes, which open the same files themselves.

    `computed` gives those that are not in the file as they are; each time they are asked for.
    """

    def __init__(
        self,
        tensors: Tensors,
        *,
        folder: Path,
        digest: str,
        computed: Mapping[str, Callable[[], TensorBytes]] | None = None,
    ) -> None:
        self.folder = folder
        self.digest = digest
        self._tensors = tensors
        self._computed = computed or {}

    def __getitem__(self, name: str) -> TensorBytes:
        compute = self._computed.get(name)
        return self._tensors[name] if compute is None else compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def stored(self, name: str) -> TensorBytes:
        """What lies in the file: dtype, shape and size are those of the computed one too."""
        return self._tensors[name]


def described(tensors: Tensors, name: str) -> TensorBytes:
    """A tensor whose dtype, shape and size count, not its values: nothing is computed."""
    return tensors.stored(name) if isinstance(tensors, StoredTensors) else tensors[name]


Tokens = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


class RequestError(EngineError):
    """This request can never be served: too long, empty, or tokens that do not exist."""


class PoisonedEngineError(EngineError):
    """The engine's weights are unknown now: only a load in whole mends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to sample. `seed` decides the noise of every token.

    `group_seed`, `group_size` and `index` say which trajectory of which group it is for;
    an engine may use them (a shared prefix, a simulated length) or not.
    """

    token_ids: Sequence[int]
    sampling: Sampling
    seed: int
    group_seed: int = 0
    group_size: int = 1
    index: int = 0


@dataclass(frozen=True, slots=True)
class Generated:
    """The sampled tokens [T], their behaviour logprobs [T] and spans over [0, T).

    `finish` is "stop" when the last token ended the sequence (it is included), "length"
    when `max_tokens` or the model's positions were used up.
    """

    token_ids: Tokens
    logprobs: Logprobs
    spans: tuple[Span, ...]
    finish: Literal["stop", "length"]


class Engine(Protocol):
    """See the module's text for what each method owes."""

    @property
    def steps(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    async def start(self, assets: Path | None) -> None: ...
    async def pause(self, mode: InstallMode) -> None: ...
    async def load(self, tensors: Tensors, version: Version) -> None: ...
    async def score(self, token_ids: Tokens) -> Logprobs | None: ...
    def resume(self) -> None: ...
    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated: ...
    async def stop(self) -> None: ...


def add_span(spans: list[Span], version: Version, start: int, end: int) -> None:
    """Append tokens [start, end) of `version`, joined to the last span where it fits."""
    if end <= start:
        return
    if spans and spans[-1].version == version and spans[-1].end == start:
        spans[-1] = Span(version, spans[-1].start, end)
    else:
        spans.append(Span(version, start, end))


def spans_to_plain(spans: Sequence[Span]) -> list[list[int]]:
    return [[s.version.incarnation, s.version.step, s.start, s.end] for s in spans]


def spans_from_plain(plain: Any) -> tuple[Span, ...]:
    return tuple(Span(Version(a, b), start, end) for a, b, start, end in plain)
