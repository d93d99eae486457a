"""The policy: a causal language model of a Hugging Face folder, and its logprobs.

Weights come from files only: a tensor that the folder lacks is an error, never a random
initialisation. The model stays in eval mode, also while it trains: dropout would make the
ratio of two passes over the same tokens differ from 1.

A tied tensor has one name here, the first in the state dict (`model.embed_tokens.weight`,
not `lm_head.weight`); so it is trained, saved, published and counted once.

Letters: B trajectories, T tokens (right-padded), V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from echo2.errors import ConfigError, LearnerError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

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
    """A model with its weights on one device, in one dtype."""

    def __init__(self, module: nn.Module, folder: Path) -> None:
        self.module = module.eval()
        self.folder = folder

    @classmethod
    def load(
        cls, folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Policy:
        """Read a Hugging Face folder. ConfigError when it is not one of a causal LM."""
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
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
        return cls(module.to(device), folder)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Trained tensors by name, tied ones once."""
        return dict(self.module.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors of the state dict by name, without tied duplicates."""
        found: dict[str, Tensor] = {}
        seen: set[tuple[int, torch.Size]] = set()
        for name, tensor in self.module.state_dict().items():
            key = (tensor.data_ptr(), tensor.shape)
            if tensor.numel() and key in seen:
                continue
            seen.add(key)
            found[name] = tensor
        return found

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values in, cast to this policy's dtype. LearnerError if names or shapes differ."""
        own = self.tensors()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise LearnerError(
                f"these weights are of another model: {len(odd)} tensors are only in one of the "
                f"two ({', '.join(odd[:5])}); use the model of the run"
            )
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise LearnerError(
                    f"these weights are of another model: {name} has the shape "
                    f"{tuple(tensors[name].shape)}, and the run's {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def logprobs(
        self, token_ids_BT: Tensor, lengths_B: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """([B, T] logprob of each token, [B, T] entropy in nats of what it was drawn from).

        Of the distribution at `temperature`, without top-p (see `echo2.types.Sampling`).
        Column 0 is 0.0: the first token has no context. Beyond a row's length the values
        mean nothing. The entropy carries no gradient.
        """
        positions_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
        # Rows are padded on the right: every real token sees just the real ones before it.
        attention_BT = (positions_T[None, :] < lengths_B[:, None]).long()
        logits_BTV = self.module(
            input_ids=token_ids_BT,
            attention_mask=attention_BT,
            position_ids=positions_T[None, :].expand_as(token_ids_BT),
            use_cache=False,
        ).logits[:, :-1]
        logits_BTV = logits_BTV.to(_at_least_float(logits_BTV)) / temperature
        all_BTV = torch.log_softmax(logits_BTV, dim=-1)
        chosen_BT = all_BTV.gather(2, token_ids_BT[:, 1:, None])[..., 0]
        with torch.no_grad():
            # entr is 0 at 0, also where a model rules a token out with a logit of -inf.
            entropy_BT = torch.special.entr(all_BTV.exp()).sum(-1)
        return nn.functional.pad(chosen_BT, (1, 0)), nn.functional.pad(entropy_BT, (1, 0))

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder: weights, configuration and the tokenizer's files."""
        self.module.save_pretrained(folder)  # type: ignore[operator]
        for name, path in self.asset_files().items():
            if not (folder / name).exists():
                shutil.copyfile(path, folder / name)

    def asset_files(self) -> dict[str, Path]:
        """File name -> path of what a worker needs beside the weights."""
        paths = {name: self.folder / name for name in ASSET_FILES}
        return {name: path for name, path in paths.items() if path.is_file()}


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


def _at_least_float(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
