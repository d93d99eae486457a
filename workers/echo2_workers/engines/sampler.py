"""A batched KV-cache sampler over a Hugging Face causal language model.

Promise: each `step` is one token boundary for every running sequence; logprobs are those of
a full forward; a version is loaded between two steps, in whole or not at all.

Waiting requests join the running batch at a boundary (left padded, each row with its own
positions) and leave it when they end. No thread, no lock, no clock: the engine
(`engines.transformers`) calls it from one thread, tests call it step by step.

Shapes: B rows of the batch, L cached positions with padding, V vocabulary, T tokens sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from echo2.errors import EngineError
from echo2.types import Span, Version
from echo2_workers.engine import (
    Generated,
    GenerateRequest,
    Logprobs,
    PoisonedEngineError,
    RequestError,
    Tensors,
    Tokens,
    add_span,
    described,
)
from echo2_workers.engines.dtypes import DTYPE_NAMES
from echo2_workers.engines.sampling import sample_tokens
from echo2_workers.engines.stored import view

FORWARD_TOKENS_MAX: Final = 16384
"""Padded tokens of one prefill or score forward: it bounds the memory of its activations."""
ADMIT_STEPS: Final = 3
"""While others run, waiting prompts are let in at every third token boundary: those of a few
groups that arrive one after the other share a prefill, which costs about as much as a step."""


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence: in the queue, or row i of the batch."""

    request: GenerateRequest
    on_tokens: Callable[[int], None]
    on_done: Callable[[Generated], None]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def restart(self) -> None:
        self.tokens, self.logprobs, self.spans = [], [], []

    def generated(self, finish: Literal["stop", "length"]) -> Generated:
        return Generated(
            np.asarray(self.tokens, np.int32),
            np.asarray(self.logprobs, np.float32),
            tuple(self.spans),
            finish,
        )


class Sampler:
    """`version` is the loaded one; None means that nothing may be sampled. `weights_dtype`:
    what versions hold the model's weights in, None for what it computes in."""

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        sequences_max: int,
        device: str = "cpu",
        weights_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self._weights_dtype = weights_dtype
        self.version: Version | None = None
        self.steps = 0
        self._eos_ids = frozenset(eos_ids)
        self._sequences_max = sequences_max
        self._device = torch.device(device)
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._positions_max: int | None = getattr(model.config, "max_position_embeddings", None)
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache: Any = None
        self._mask_BL = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._admitted_at = 0

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # -------------------------------------------------------------------- requests

    def add(
        self,
        request: GenerateRequest,
        on_tokens: Callable[[int], None],
        on_done: Callable[[Generated], None],
    ) -> _Row:
        """Queue a sequence; the result names it for `remove`. Raises RequestError."""
        length = len(request.token_ids)
        if length == 0:
            raise RequestError("the prompt is empty; it needs at least one token")
        if not all(0 <= token_id < self._vocab_size for token_id in request.token_ids):
            raise RequestError(
                f"the prompt has a token outside [0, {self._vocab_size}), the model's vocabulary"
            )
        max_tokens = request.sampling.max_tokens
        if self._positions_max is not None:
            if length >= self._positions_max:
                raise RequestError(
                    f"the prompt has {length} tokens; the model has {self._positions_max} "
                    "positions, and needs one for the first sampled token"
                )
            max_tokens = min(max_tokens, self._positions_max - length)
        row = _Row(request, on_tokens, on_done, max_tokens)
        self._waiting.append(row)
        return row

    def remove(self, row: _Row) -> None:
        """Forget a sequence wherever it is; nothing more of it is reported."""
        if row in self._waiting:
            self._waiting.remove(row)
        elif row in self._rows:
            self._select([i for i, other in enumerate(self._rows) if other is not row])

    def restart_running(self) -> None:
        """All running sequences lose what they sampled and wait, first in the queue."""
        for row in self._rows:
            row.restart()
        self._waiting.extendleft(reversed(self._rows))
        self._select([])

    # --------------------------------------------------------------------- sampling

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> None:
        """Sample one token for each running sequence, after letting waiting ones in."""
        if self.version is None:
            raise EngineError("no version is installed; nothing can be sampled")
        if admit and (not self._rows or self.steps - self._admitted_at >= ADMIT_STEPS):
            self._admit()
        if self._rows:
            last_B1 = torch.tensor([[row.tokens[-1]] for row in self._rows], device=self._device)
            positions_B1 = self._mask_BL.sum(1, keepdim=True)
            self._mask_BL = torch.nn.functional.pad(self._mask_BL, (0, 1), value=1)
            logits_BV = self._forward(last_B1, self._mask_BL, positions_B1, self._cache)
            self._take_tokens(self._rows, logits_BV)
            self._drop_finished()
        self.steps += 1

    def _admit(self) -> None:
        """Prefill as many waiting prompts as fit and sample the first token of each. A
        prompt that several of them share (a group's) is computed once."""
        new: list[_Row] = []
        prompts: dict[tuple[int, ...], int] = {}
        longest = 0
        while self._waiting and len(self._rows) + len(new) < self._sequences_max:
            prompt = tuple(self._waiting[0].request.token_ids)
            longer = max(longest, len(prompt))
            if new and longer * (len(prompts) + (prompt not in prompts)) > FORWARD_TOKENS_MAX:
                break
            longest = longer
            prompts.setdefault(prompt, len(prompts))
            new.append(self._waiting.popleft())
        if not new:
            return
        self._admitted_at = self.steps
        ids_BL, mask_BL = _left_padded(list(prompts), longest, self._device)
        cache = DynamicCache()
        positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
        logits_BV = self._forward(ids_BL, mask_BL, positions_BL, cache)
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            raise EngineError(
                f"{type(self.model).__name__} keeps a state that is no plain KV cache; this "
                "engine samples from attention-only models"
            )
        prompt_of = [prompts[tuple(row.request.token_ids)] for row in new]
        index_B = torch.tensor(prompt_of, device=self._device)
        cache.batch_select_indices(index_B)
        self._take_tokens(new, logits_BV[index_B])
        self._join(new, cache, mask_BL[index_B])
        self._drop_finished()

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Logits [B, V] after the last token, float32; `cache` grows."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _take_tokens(self, rows: list[_Row], logits_BV: torch.Tensor) -> None:
        assert self.version is not None
        tokens, logprobs = sample_tokens(
            logits_BV, [row.request for row in rows], [len(row.tokens) for row in rows]
        )
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            add_span(row.spans, self.version, len(row.tokens) - 1, len(row.tokens))
            row.on_tokens(1)

    def _drop_finished(self) -> None:
        keep = []
        for i, row in enumerate(self._rows):
            if row.tokens[-1] in self._eos_ids:
                row.on_done(row.generated("stop"))
            elif len(row.tokens) >= row.max_tokens:
                row.on_done(row.generated("length"))
            else:
                keep.append(i)
        if len(keep) < len(self._rows):
            self._select(keep)

    # ------------------------------------------------------------------- the KV cache

    def _join(self, new: list[_Row], cache: Any, mask_BL: torch.Tensor) -> None:
        """Put prefilled rows under the running ones; the shorter cache is padded left."""
        if self._cache is not None:
            pad_new = self._mask_BL.shape[1] - mask_BL.shape[1]
            mask_BL = _pad_left(mask_BL, pad_new, dim=1)
            old_mask = _pad_left(self._mask_BL, -pad_new, dim=1)
            mask_BL = torch.cat([old_mask, mask_BL])
            for old, layer in zip(self._cache.layers, cache.layers, strict=True):
                layer.keys = _join_layers(old.keys, layer.keys, pad_new)
                layer.values = _join_layers(old.values, layer.values, pad_new)
        self._cache, self._mask_BL = cache, mask_BL
        self._rows.extend(new)

    def _select(self, keep: list[int]) -> None:
        """Drop all other rows, and the padding that no row needs any more."""
        self._rows = [self._rows[i] for i in keep]
        if not keep:
            self._cache = None
            self._mask_BL = self._mask_BL[:0, :0]
            return
        index_B = torch.tensor(keep, device=self._device)
        self._mask_BL = self._mask_BL[index_B]
        unused = self._mask_BL.shape[1] - int(self._mask_BL.sum(1).max())
        self._mask_BL = self._mask_BL[:, unused:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[index_B, :, unused:]
            layer.values = layer.values[index_B, :, unused:]

    # ---------------------------------------------------------------------- versions

    @torch.inference_mode()
    def load(self, tensors: Tensors, version: Version) -> None:
        """Copy all tensors into the model. EngineError: nothing was changed, or
        PoisonedEngineError: some was."""
        parameters = untied_state(self.model)
        self._check_tensors(tensors, parameters)
        try:
            for name, parameter in parameters.items():
                parameter.copy_(view(tensors[name]))
        except Exception as error:
            self.version = None
            raise PoisonedEngineError(f"loading {version} broke off: {error}") from error
        self.version = version

    def _check_tensors(self, tensors: Tensors, parameters: dict[str, torch.Tensor]) -> None:
        problems = []
        missing = sorted(parameters.keys() - tensors.keys())
        unexpected = sorted(tensors.keys() - parameters.keys())
        if missing:
            problems.append(f"missing are {_some(missing)}")
        if unexpected:
            problems.append(f"unexpected are {_some(unexpected)} (tied tensors are not published)")
        for name in sorted(parameters.keys() & tensors.keys()):
            dtype, shape, _ = described(tensors, name)
            wanted = self._stored_dtype(parameters[name]), tuple(parameters[name].shape)
            if (dtype, tuple(shape)) != wanted:
                problems.append(
                    f"{name} is {dtype} {tuple(shape)}, the model has {wanted[0]} {wanted[1]}"
                )
        if problems:
            raise EngineError(
                f"the version does not fit {type(self.model).__name__}: {_some(problems)}; is "
                "model.dtype the same at the publisher and here, and the model too?"
            )

    def _stored_dtype(self, parameter: torch.Tensor) -> str:
        is_weight = parameter.dtype == self.model.dtype
        stored = self._weights_dtype if is_weight and self._weights_dtype else parameter.dtype
        return DTYPE_NAMES[stored]

    @torch.inference_mode()
    def score(self, token_ids: Tokens) -> Logprobs:
        """Logprobs [N, L] at temperature 1 by full forwards; 0.0 in column 0."""
        ids_NL = torch.as_tensor(np.ascontiguousarray(token_ids, np.int64))
        scored = np.zeros(ids_NL.shape, np.float32)
        rows = max(1, FORWARD_TOKENS_MAX // ids_NL.shape[1])
        for start in range(0, len(ids_NL), rows):
            part = ids_NL[start : start + rows].to(self._device)
            logits = self.model(input_ids=part, use_cache=False).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, part[:, 1:, None])
            scored[start : start + rows, 1:] = logprobs[..., 0].cpu().numpy()
        return scored


def untied_state(model: Any) -> dict[str, torch.Tensor]:
    """The state dict without names that share another's storage (a tied lm_head)."""
    seen: set[tuple[int, int]] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        state[name] = tensor
    return state


def _left_padded(
    prompts: list[tuple[int, ...]], length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, length] with zeros before each prompt, and the mask of what counts."""
    ids = np.zeros((len(prompts), length), np.int64)
    mask = np.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, length - len(prompt) :] = prompt
        mask[i, length - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _join_layers(old: torch.Tensor, new: torch.Tensor, pad_new: int) -> torch.Tensor:
    return torch.cat([_pad_left(old, -pad_new, dim=2), _pad_left(new, pad_new, dim=2)])


def _pad_left(tensor: torch.Tensor, count: int, *, dim: int) -> torch.Tensor:
    """`count` zeros before position 0 of `dim`; nothing when it is not positive."""
    if count <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = count
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
