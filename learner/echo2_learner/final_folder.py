"""RUN/final: the policy as a Hugging Face folder, whole or not there.

Of several ranks rank 0 writes it, one gathered tensor after the other, in files of at most
FILE_BYTES_MAX, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor

from echo2_learner.policy import Policy
from echo2_learner.ranks import ALONE, Ranks
from echo2_learner.shards import full

FILE_BYTES_MAX: Final = 4 << 30


def save_final_folder(policy: Policy, folder: Path, ranks: Ranks) -> None:
    """Write the policy to `folder`, in place of what was there."""
    aside = folder.parent / f".{folder.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    if ranks is not ALONE:
        ranks.order("final")
        aside.mkdir(parents=True)
        _save_wholes(policy, aside)
    else:
        policy.save(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def help_save_final(policy: Policy) -> None:
    """What the other ranks do while rank 0 is in `save_final_folder`."""
    for _ in _wholes(policy):
        pass


def _save_wholes(policy: Policy, folder: Path) -> None:
    module: Any = policy.module
    module.config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    for name, path in policy.asset_files().items():
        if not (folder / name).exists():
            shutil.copyfile(path, folder / name)
    parts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in _wholes(policy):
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > FILE_BYTES_MAX:
            parts.append(_save_part(held, folder, len(parts)))
            held = {}
        held[name] = tensor.cpu().contiguous()
        num_bytes += tensor.nbytes
    parts.append(_save_part(held, folder, len(parts)))
    _name_parts(parts, folder, num_bytes)


def _save_part(held: dict[str, Tensor], folder: Path, index: int) -> list[str]:
    save_file(held, folder / f"part-{index}", metadata={"format": "pt"})
    return list(held)


def _name_parts(parts: list[list[str]], folder: Path, num_bytes: int) -> None:
    """Names as transformers reads them: one file, or several and an index."""
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(parts):
        file = f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


def _wholes(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in policy.published_tensors().items():
        yield name, full(tensor.detach())
