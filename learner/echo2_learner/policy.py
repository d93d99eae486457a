"""The policy: a causal language model of a Hugging Face folder, and its logprobs.

Weights come from files only: a tensor that the folder lacks is an error, never a random
initialisation. The model stays in eval mode, also while it trains: dropout would make the
ratio of two passes over the same tokens differ from 1 (only adapters may have one of their own).

A tied tensor has one name here, the first in the state dict (`model.embed_tokens.weight`,
not `lm_head.weight`); so it is trained, saved, published and counted once.

What is trained are all weights, or their float32 masters (`masters.py`), or adapters alone
(`lora.py`): `trained_parameters` is what the optimizer steps, `tensors` what a checkpoint
keeps, `published_tensors` what a version holds, under the names of the plain model.

Letters: B trajectories, T tokens (right-padded), N tokens in the loss.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from echo2.config_loss import LoraTable
from echo2.errors import ConfigError, LearnerError
from echo2_learner import lora, shards
from echo2_learner.head import Rows, TokenLogprobs
from echo2_learner.masters import Masters
from echo2_learner.packing import padded_rows, single_bundles

ASSET_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""What of a model folder a worker needs beside the weights, where present."""


class Policy:
    """A model with its weights on one device, in one dtype, or sharded over ranks.

    `forward_module` is what runs; `masters` the float32 weights behind those of a lower
    precision, if they are kept here. `weights_dtype`: the weights have values of this
    precision, whatever they compute in.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        *,
        masters: Masters | None = None,
        weights_dtype: torch.dtype | None = None,
    ) -> None:
        self.module = module.eval()
        self.folder = folder
        self.masters = masters
        self._weights_dtype = weights_dtype
        self.forward_module = TokenLogprobs(module)
        self.has_adapters = any(lora.is_adapter(name) for name, _ in module.named_parameters())
        self._device: torch.device | None = None
        self._dtype: torch.dtype | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trained: bool = False,
        adapters: LoraTable | None = None,
        attention: str = "sdpa",
        weights_dtype: torch.dtype | None = None,
    ) -> Policy:
        """Read a Hugging Face folder. ConfigError when it is not one of a causal LM.

        `trained`: it will be; weights of a lower precision than float32 get masters, unless
        `adapters` are trained instead of them. `attention` as transformers names its kernels.
        `weights_dtype`: a lower precision than `dtype`, to which the weights (of adapters,
        what is beneath them) are rounded, while layers compute in `dtype`.
        """
        module = _load(folder, dtype, attention).to(device)
        rounding = None if weights_dtype == dtype else weights_dtype
        if trained and adapters is not None and adapters.rank:
            _round(module.parameters(), rounding)
            lora.add_adapters(module, adapters)
            return cls(module, folder)
        masters = None
        if trained and (dtype != torch.float32 or rounding is not None):
            exact = _load(folder, torch.float32, "sdpa").to(device)
            masters = Masters(
                dict(module.named_parameters()), dict(exact.named_parameters()), rounding=rounding
            )
        else:
            _round(module.parameters(), rounding)
        return cls(module, folder, masters=masters, weights_dtype=rounding)

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        return self._device or next(self.module.parameters()).device

    def use_device(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Inputs belong on `device`, and layers compute in `dtype`, wherever and however the
        parameters rest."""
        self._device, self._dtype = device, dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that compute."""
        return self._dtype or next(self.module.parameters()).dtype

    @property
    def weights_dtype(self) -> torch.dtype:
        """The least precision that holds the weights exactly: the one to publish them in."""
        return self._weights_dtype or self.dtype

    @property
    def is_sharded(self) -> bool:
        return any(shards.is_sharded(parameter) for parameter in self.module.parameters())

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def trained_parameters(self) -> dict[str, Tensor]:
        """What the optimizer steps, by name, tied ones once: leaves with gradients."""
        if self.masters is not None:
            return dict(self.masters.values)
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def after_update(self) -> None:
        """To be called when the optimizer has stepped: the compute weights follow."""
        if self.masters is not None:
            self.masters.write_back()
        else:
            _round(self.module.parameters(), self._weights_dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What makes up this policy beyond its folder, live, by name: the state dict without
        tied duplicates, with masters in place of rounded weights; of adapters they alone."""
        if self.has_adapters:
            return {n: t for n, t in self._state().items() if lora.is_adapter(n)}
        masters = {} if self.masters is None else self.masters.values
        return {name: masters.get(name, tensor) for name, tensor in self._state().items()}

    def published_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """What a version stands for: names of the plain model, adapters merged into its
        weights, these in `dtype` (None: as they are)."""
        if self.has_adapters:
            return lora.merged(self.module, self._state(), dtype)
        return self.tensors()

    def base_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights beneath the adapters, in `dtype`, under the names of the plain model."""
        return lora.base(self._state(), dtype)

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor.detach() if not shards.is_sharded(tensor) else tensor
        return found

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @torch.no_grad()
    def load_tensors(self, tensors: shards.Tensors) -> None:
        """Copy values into `tensors()`, cast. LearnerError if names or shapes differ."""
        own = self.tensors()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise LearnerError(
                f"these weights are of another model: {len(odd)} tensors are only in one of the "
                f"two ({', '.join(odd[:5])}); use the model of the run"
            )
        for name, tensor in own.items():
            if tuple(tensor.shape) != tuple(tensors[name].shape):
                raise LearnerError(
                    f"these weights are of another model: {name} has the shape "
                    f"{tuple(tensors[name].shape)}, and the run's {tuple(tensor.shape)}; use the "
                    "model of the run"
                )
        for name, tensor in own.items():
            shards.copy_in(tensor, tensors[name])
        self.after_update()

    def token_logprobs(self, rows: Rows, *, temperature: float) -> tuple[Tensor, Tensor]:
        """([N] logprob, [N] entropy in nats) of the tokens in the loss, as `rows` orders them."""
        found: tuple[Tensor, Tensor] = self.forward_module(rows, temperature=temperature)
        return found

    def logprobs(
        self, token_ids_BT: Tensor, lengths_B: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """([B, T] logprob of each token, [B, T] entropy in nats of what it was drawn from).

        Of the distribution at `temperature`, without top-p (see `echo2.types.Sampling`).
        Column 0 is 0.0: the first token has no context. Beyond a row's length all is 0.0.
        The entropy carries no gradient.
        """
        sequences = [
            row[:length].astype(np.int32)
            for row, length in zip(token_ids_BT.cpu().numpy(), lengths_B.tolist(), strict=True)
        ]
        masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
        packed = padded_rows(single_bundles(sequences), sequences, masks)
        rows = Rows.of(packed, device=self.device, dtype=self.dtype)
        place_N = torch.from_numpy(packed.place_N).to(self.device)
        shape = (len(sequences), max(len(sequence) for sequence in sequences))
        beyond = token_ids_BT.shape[1] - shape[1]

        def spread(values_N: Tensor) -> Tensor:
            flat = values_N.new_zeros(shape[0] * shape[1]).scatter(0, place_N, values_N)
            return nn.functional.pad(flat.view(shape), (0, beyond))

        logprobs_N, entropy_N = self.token_logprobs(rows, temperature=temperature)
        return spread(logprobs_N), spread(entropy_N)

    @torch.no_grad()
    def sample(self, num_rows: int, length: int, *, seed: int) -> Tensor:
        """[num_rows, length] tokens on the CPU that this policy draws at temperature 1 after
        its first token (`bos_token_id`, or a drawn one), one forward pass a token: for a few
        short rows. The same weights and seed give the same tokens, on any number of ranks."""
        rng = np.random.default_rng(seed)
        first = self.module.config.bos_token_id  # type: ignore[union-attr]
        if isinstance(first, int) and 0 <= first < self.vocab_size:
            tokens_BT = np.full((num_rows, 1), first, dtype=np.int32)
        else:
            tokens_BT = rng.integers(0, self.vocab_size, (num_rows, 1)).astype(np.int32)
        while tokens_BT.shape[1] < length:
            mask = np.zeros(tokens_BT.shape[1] + 1, dtype=np.bool_)
            mask[-1] = True
            sequences = [np.append(row, np.int32(0)) for row in tokens_BT]
            packed = padded_rows(single_bundles(sequences), sequences, [mask] * num_rows)
            rows = Rows.of(packed, device=self.device, dtype=self.dtype)
            noise_UV = torch.from_numpy(rng.gumbel(size=(num_rows, self.vocab_size)))
            drawn_U, _ = self.forward_module(
                rows, temperature=1.0, noise_UV=noise_UV.to(self.device, torch.float32)
            )
            drawn = drawn_U.cpu().numpy().astype(np.int32)
            tokens_BT = np.concatenate([tokens_BT, drawn[:, None]], axis=1)
        return torch.from_numpy(tokens_BT).long()

    def checkpoint_activations(self) -> None:
        """From now on each layer keeps its input alone and computes again on the way back.
        ConfigError when the model does not say what a layer is."""
        layers = [m for m in self.module.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ConfigError(
                f"learner.gradient_checkpointing: {type(self.module).__name__} has no layers that "
                "can be computed again; set it to false"
            )
        for layer in layers:
            # Not transformers' own switch: that one works in training mode only, with dropout.
            layer.forward = partial(_recomputed, layer.forward)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder: weights, configuration and the tokenizer's files; with
        adapters merged in, and beside them alone in `adapter/`, as peft keeps them."""
        module: Any = self.module
        if self.has_adapters or self.masters is not None:
            module.save_pretrained(folder, state_dict=self.published_tensors())
        else:
            module.save_pretrained(folder)
        if self.has_adapters:
            lora.save_adapters(module, folder / "adapter", base_folder=self.folder)
        for name, path in self.asset_files().items():
            if not (folder / name).exists():
                shutil.copyfile(path, folder / name)

    def asset_files(self) -> dict[str, Path]:
        """File name -> path of what a worker needs beside the weights."""
        paths = {name: self.folder / name for name in ASSET_FILES}
        return {name: path for name, path in paths.items() if path.is_file()}


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@torch.no_grad()
def _round(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> None:
    """In place, to the nearest value of `dtype`; None leaves them as they are."""
    for tensor in tensors if dtype is not None else ():
        tensor.copy_(tensor.to(dtype))


def _load(folder: Path, dtype: torch.dtype, attention: str) -> nn.Module:
    # Where a model has no such kernel, transformers' own choice is better than none.
    kernel = {} if attention == "sdpa" else {"attn_implementation": attention}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **kernel
        )
    except ImportError as error:
        raise ConfigError(
            f"learner.attention: {attention} cannot be used here ({error}); install what it "
            'needs, or set it to "sdpa"'
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model.path: {folder} could not be loaded as a causal language model: {error}"
        ) from error
    module, info = loaded
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        raise ConfigError(
            f"model.path: {folder} lacks {len(absent)} tensors of its architecture, or has "
            f"them in another shape ({', '.join(absent[:5])}); give a complete folder"
        )
    found: nn.Module = module
    return found


def choose_device(name: str) -> torch.device:
    """The device of `learner.device`; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f'learner.device is {name!r}, which torch does not know ({error}); use "auto", "cpu", '
            '"cuda" or "cuda:0"'
        ) from error
