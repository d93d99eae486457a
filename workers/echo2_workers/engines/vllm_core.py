"""vLLM step by step: requests in, tokens out, versions loaded between two steps.

Promise: a version is loaded in whole or not at all, and only between two steps; every token's
span names the version that sampled it; no key or value that an older version computed is
read by a sequence that has not yet sampled a token.

Life-cycle of a sequence:

    waiting here --submit--> inside vLLM --> finished
         ^------- withdrawn -------'

    pause: those that have no token yet are withdrawn ("abort": all are, and lose theirs)
    resume: those that wait are submitted under a new salt of the prefix cache

No thread, no lock, no clock: the engine (`engines.vllm`) calls it from one thread, tests call
it step by step. vLLM runs in this very process (its core too), which is what makes "between
two steps" exact.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue

from echo2.errors import EngineError
from echo2.types import Sampling, Span, Version
from echo2_workers.engine import (
    Generated,
    GenerateRequest,
    InstallMode,
    Logprobs,
    PoisonedEngineError,
    RequestError,
    StoredTensors,
    Tokens,
    add_span,
)
from echo2_workers.engines.vllm_tensors import Expected, check_tensors

TEMPERATURE_MIN: Final = 0.01
"""vLLM raises a lower one to this without failing, which would falsify the logprobs."""
WARM_UP: Final = Version(0, 0)
KvOnUpdate = Literal["keep", "clear"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. `name` is vLLM's while it is inside, "" while it waits here."""

    request: GenerateRequest
    on_tokens: Callable[[int], None]
    on_done: Callable[[Generated], None]
    max_tokens: int
    name: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VllmCore:
    """`version` is the loaded one; None means that nothing may be sampled. Starts paused."""

    def __init__(
        self,
        llm: Any,
        *,
        expected: Expected,
        eos_ids: tuple[int, ...],
        stop: tuple[str, ...] = (),
        kv_on_update: KvOnUpdate = "keep",
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """`llm` is an LLMEngine whose core runs in this process. `on_failure(text)` is
        called, from any thread, when a rank's process dies."""
        self.version: Version | None = None
        self.steps = 0
        self.paused = True
        self._llm = llm
        self._scheduler: Any = llm.engine_core.engine_core.scheduler
        self._expected = expected
        self._eos_ids = eos_ids
        self._stop = stop
        self._kv_on_update = kv_on_update
        self._vocab_size: int = llm.model_config.get_vocab_size()
        self._length_max: int = llm.model_config.max_model_len
        self._inside: dict[str, Sequence] = {}
        self._waiting: dict[Sequence, None] = {}
        self._numbers = itertools.count()
        self._salt = "0"
        self._rpc("echo2_prepare", os.getpid())
        if on_failure is not None:
            tell = on_failure
            executor = llm.engine_core.engine_core.model_executor
            executor.register_failure_callback(lambda: tell("a rank of the engine died"))

    def warm_up(self) -> None:
        """Prefill, decode and score once, with weights of no meaning."""
        self.version = WARM_UP
        self._llm.set_weight_version(str(WARM_UP))
        self.resume()
        for length in (2, 3):
            request = GenerateRequest(
                token_ids=[0] * length, sampling=Sampling(max_tokens=3), seed=length
            )
            self.add(request, lambda _: None, lambda _: None)
        while self._inside:
            self.step()
        self.pause("finish")
        self.score(np.zeros((2, 3), np.int32))
        self.version = None

    @property
    def running(self) -> int:
        """Sequences that vLLM has, those in its queue included."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # -------------------------------------------------------------------- requests

    def add(
        self,
        request: GenerateRequest,
        on_tokens: Callable[[int], None],
        on_done: Callable[[Generated], None],
    ) -> Sequence:
        """Take a sequence; the result names it for `remove`. Raises RequestError."""
        sequence = Sequence(request, on_tokens, on_done, self._max_tokens(request))
        if self.paused:
            self._waiting[sequence] = None
        else:
            self._submit(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is; nothing more of it is reported."""
        self._waiting.pop(sequence, None)
        if sequence.name:
            self._take_out(sequence)

    def _max_tokens(self, request: GenerateRequest) -> int:
        length = len(request.token_ids)
        if length == 0:
            raise RequestError("the prompt is empty; it needs at least one token")
        if not all(0 <= token_id < self._vocab_size for token_id in request.token_ids):
            raise RequestError(
                f"the prompt has a token outside [0, {self._vocab_size}), the model's vocabulary"
            )
        if length >= self._length_max:
            raise RequestError(
                f"the prompt has {length} tokens; the engine has {self._length_max} positions "
                "(worker.vllm.max_model_len, or the model's), and needs one for the first "
                "sampled token"
            )
        if 0.0 < request.sampling.temperature < TEMPERATURE_MIN:
            raise RequestError(
                f"temperature {request.sampling.temperature:g} is below {TEMPERATURE_MIN:g}, the "
                "lowest that vLLM samples with; 0 is greedy"
            )
        return min(request.sampling.max_tokens, self._length_max - length)

    def _submit(self, sequence: Sequence) -> None:
        request, sampling = sequence.request, sequence.request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sequence.max_tokens,
            seed=request.seed,
            logprobs=0,
            stop=list(self._stop) or None,
            stop_token_ids=list(self._eos_ids),
            ignore_eos=True,  # they are among the stop tokens
            detokenize=bool(self._stop),
            output_kind=RequestOutputKind.DELTA,
        )
        sequence.name = f"s{next(self._numbers)}"
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": self._salt}
        self._inside[sequence.name] = sequence
        self._llm.add_request(sequence.name, prompt, params)

    def _take_out(self, sequence: Sequence) -> None:
        self._llm.abort_request([sequence.name])
        del self._inside[sequence.name]
        sequence.name = ""

    # --------------------------------------------------------------------- sampling

    def step(self) -> None:
        """One step of vLLM: one more token for each sequence that it schedules."""
        if self.version is None:
            raise EngineError("no version is installed; nothing can be sampled")
        for output in self._llm.step():
            sequence = self._inside.get(output.request_id)
            if sequence is not None:
                self._take(sequence, output)
        self.steps += 1

    def _take(self, sequence: Sequence, output: Any) -> None:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        if tokens:
            sequence.tokens += tokens
            sequence.logprobs += [
                at_position[token].logprob
                for token, at_position in zip(tokens, completion.logprobs, strict=True)
            ]
            sequence.on_tokens(len(tokens))
        if not output.finished:
            return
        del self._inside[sequence.name]
        sequence.name = ""
        reason = completion.finish_reason
        if reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a request with {reason!r}: {completion.stop_reason}")
        logprobs = np.asarray(sequence.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            raise EngineError(
                "the model computes logprobs that are no numbers; are the published weights finite?"
            )
        spans: list[Span] = []
        for span in completion.weight_versions:
            add_span(spans, Version.parse(span.version), span.start, span.end)
        sequence.on_done(
            Generated(np.asarray(sequence.tokens, np.int32), logprobs, tuple(spans), reason)
        )

    # ----------------------------------------------------------------------- pausing

    def pause(self, mode: InstallMode) -> bool:
        """Whether it is paused now; with "finish", ask again after each `step`."""
        if self.paused:
            return True
        for sequence in list(self._inside.values()):
            if mode == "abort" or not sequence.tokens:
                self._take_out(sequence)
                sequence.tokens, sequence.logprobs = [], []
                self._waiting[sequence] = None
        if mode == "finish" and self._inside:
            return False
        self._drain()
        self.paused = True
        return True

    def _drain(self) -> None:
        """Take in what vLLM has under way (with pipeline parallelism, several batches)."""
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        core = self._llm.engine_core.engine_core
        while core.batch_queue:
            self.step()

    def resume(self) -> None:
        if self.version is None:
            raise EngineError("no version is installed; nothing can be sampled")
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        self.paused = False
        waiting, self._waiting = self._waiting, {}
        for sequence in waiting:
            self._submit(sequence)

    # ---------------------------------------------------------------------- versions

    def load(self, tensors: StoredTensors, version: Version) -> None:
        """Put all tensors into the model. EngineError: nothing was changed, or
        PoisonedEngineError: some was."""
        check_tensors(tensors, self._expected)
        try:
            self._rpc("start_weight_update")
            self._rpc("update_weights", {"folder": str(tensors.folder), "digest": tensors.digest})
            self._rpc("finish_weight_update")
        except Exception as error:
            self.version = None
            raise PoisonedEngineError(f"loading {version} broke off: {error}") from error
        self._salt = str(next(self._numbers))
        if self._kv_on_update == "clear" or not self._inside:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.set_weight_version(str(version))
        self.version = version

    def score(self, token_ids: Tokens) -> Logprobs:
        """Logprobs [N, L] at temperature 1, 0.0 in column 0, by the prefill of vLLM: the very
        layers and head that sample. Sequences that are inside stand still meanwhile."""
        rows, length = token_ids.shape
        scored = np.zeros((rows, length), np.float32)
        if length < 2:
            return scored
        if length >= self._length_max:
            raise EngineError(
                f"a probe of {length} tokens needs more than the engine's {self._length_max} "
                "positions; raise worker.vllm.max_model_len"
            )
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        with self._others_held():
            if self._scored(token_ids, params, scored):
                return scored
        # No room in the cache beside them: they compute theirs again when they go on.
        self._scheduler.reset_prefix_cache(reset_running_requests=True)
        with self._others_held():
            if self._scored(token_ids, params, scored):
                return scored
        raise EngineError(
            "the KV cache has no room for the probe alone; raise worker.vllm.kv_cache_gb or "
            "gpu_memory_utilization"
        )

    def _scored(self, token_ids: Tokens, params: SamplingParams, scored: Logprobs) -> bool:
        """Fill `scored`; False when the cache has no room for a row."""
        names = {f"p{next(self._numbers)}": row for row in range(len(token_ids))}
        for name, row in names.items():
            prompt = {
                "prompt_token_ids": token_ids[row].tolist(),
                "cache_salt": f"{self._salt}.score",
            }
            self._llm.add_request(name, prompt, params)
        while names:
            outputs = self._llm.step()
            for output in outputs:
                row = names.pop(output.request_id)
                scored[row, 1:] = [
                    at_position[token].logprob
                    for token, at_position in zip(
                        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                    )
                ]
            self.steps += 1
            core = self._llm.engine_core.engine_core
            if not outputs and not self._scheduler.running and not core.batch_queue:
                self._llm.abort_request(list(names))
                return False
        return True

    @contextmanager
    def _others_held(self) -> Iterator[None]:
        """vLLM's scheduler without the sequences that are in it; they keep their KV."""
        scheduler = self._scheduler
        queues = ("waiting", "kv_holding_waiting")
        held = {name: getattr(scheduler, name) for name in (*queues, "running", "deferred_waiting")}
        state = scheduler.pause_state
        scheduler.running, scheduler.deferred_waiting = [], set()
        for name in queues:
            setattr(scheduler, name, create_request_queue(scheduler.policy))
        scheduler.set_pause_state(PauseState.UNPAUSED)
        try:
            yield
        finally:
            for name, queue in held.items():
                setattr(scheduler, name, queue)
            scheduler.set_pause_state(state)

    def _rpc(self, method: str, *args: Any) -> None:
        self._llm.collective_rpc(method, args=args)
