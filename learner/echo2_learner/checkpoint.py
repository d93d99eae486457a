"""Checkpoints: everything from which a learner goes on bit by bit, whole or not there.

    RUN/checkpoints/step-00000050-i1/   policy.safetensors  optimizer.safetensors
                                        rng.safetensors     state.json

A checkpoint is written aside, flushed to the disk and renamed. `state.json` holds size and
BLAKE3 of the other files, so a torn one is recognised, skipped with a message, and the one
before it is used. Tensors are safetensors and the rest is JSON; nothing is unpickled, ever.

One learner at a time owns a run folder: `RUN/learner.json` names its incarnation. A learner
that was stopped and wakes up after another has taken over finds a different one there and
raises FencedError before it changes anything.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo2.errors import FencedError, LearnerError
from echo2_learner.policy import Policy
from echo2_learner.trainer import Trainer

log = structlog.get_logger(__name__)

FORMAT: Final = 1
POLICY: Final = "policy.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
RNG: Final = "rng.safetensors"
STATE: Final = "state.json"
_NAME: Final = re.compile(r"^step-(\d{8,})-i(\d+)$")


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpoint knows beside tensors. `starts` holds (incarnation, resume step) of
    the line that leads here; `next_task_index` is for people: the coordinator owns the
    data position."""

    step: int
    incarnation: int
    run_id: str
    starts: tuple[tuple[int, int], ...]
    next_task_index: int = 0
    groups_trained: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one on disk."""

    folder: Path
    state: CheckpointState
    files: dict[str, tuple[int, str]] = field(repr=False)
    rng: dict[str, Any] = field(repr=False)

    @property
    def digest(self) -> str:
        """BLAKE3 of the policy's file."""
        return self.files[POLICY][1]

    def restore(self, policy: Policy, trainer: Trainer) -> None:
        """Put weights, optimizer and random states back. LearnerError if they do not fit."""
        try:
            policy.load_tensors(load_file(self.folder / POLICY))
            trainer.load_optimizer_tensors(load_file(self.folder / OPTIMIZER))
            _restore_rng(load_file(self.folder / RNG), self.rng)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise LearnerError(
                f"{self.folder} could not be restored: {error}; move it away, and the one before "
                "it is used"
            ) from error


class CheckpointStore:
    """The checkpoints of one run folder, and the claim of the learner that writes them."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self.folder = run_dir / "checkpoints"
        self._claim = run_dir / "learner.json"
        self._keep = keep
        self._incarnation: int | None = None

    def claim(self, incarnation: int) -> None:
        """From now on this learner owns the run folder, and no other does."""
        self._claim.parent.mkdir(parents=True, exist_ok=True)
        aside = self._claim.with_name(f".learner.json.{os.getpid()}")
        _write_json(aside, {"incarnation": incarnation, "pid": os.getpid()})
        aside.replace(self._claim)
        self._incarnation = incarnation

    def check_claim(self) -> None:
        """FencedError when another learner owns the run folder now."""
        if self._incarnation is None:
            raise ValueError("claim the run folder first")
        try:
            owner = json.loads(self._claim.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LearnerError(
                f"{self._claim} cannot be read any more ({error}), so it is unknown which learner "
                "owns the run folder; start this one again with --resume"
            ) from error
        if owner != {"incarnation": self._incarnation, "pid": os.getpid()}:
            raise FencedError(
                f"incarnation {owner['incarnation']} (pid {owner['pid']}) took over "
                f"{self._claim.parent}; this learner was incarnation {self._incarnation}, and "
                "writes nothing more"
            )

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint of the highest step; torn ones are skipped with a message."""
        for folder in self._folders():
            try:
                return read_checkpoint(folder)
            except LearnerError as error:
                log.warning("checkpoint_skipped", folder=str(folder), reason=str(error))
        return None

    def complete_steps(self, step: int) -> list[int]:
        """Steps of the complete ones up to `step`, ascending."""
        steps = [_step(folder) for folder in self._folders() if _looks_complete(folder)]
        return sorted({found for found in steps if found <= step})

    def exists(self) -> bool:
        """Whether there is any checkpoint, complete or not."""
        return bool(self._folders())

    def save(self, state: CheckpointState, policy: Policy, trainer: Trainer) -> list[int]:
        """Write a checkpoint and drop those beyond `keep`; returns the steps kept, ascending.

        When it returns, the checkpoint survives a power cut. LearnerError when the disk does
        not take it; what was there before is then unchanged.
        """
        aside = self.folder / f".aside-{os.getpid()}-{state.step}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _write_checkpoint(aside, state, policy, trainer)
            self.check_claim()
            folder = self.folder / f"step-{state.step:08d}-i{state.incarnation}"
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise LearnerError(
                f"the checkpoint of step {state.step} could not be written to {self.folder}: "
                f"{error}; free space there or choose another --run-dir"
            ) from error
        return self._prune(folder)

    def _prune(self, newest: Path) -> list[int]:
        """Keep `newest` and the complete ones below it, `keep` in all; the rest goes.

        What lies above it was written before the run was set back, and is of a dead line.
        """
        kept = [newest]
        folders = self._folders()
        for folder in folders[folders.index(newest) + 1 :]:
            if len(kept) < self._keep and _step(folder) < _step(newest) and _looks_complete(folder):
                kept.append(folder)
        for folder in [*folders, *self.folder.glob(".aside-*")]:
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        return sorted(_step(folder) for folder in kept)

    def _folders(self) -> list[Path]:
        """All checkpoints by step, the highest first (of equal ones the later incarnation)."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.match(path.name)]
        return sorted(found, key=lambda path: (_step(path), _incarnation(path)), reverse=True)


def read_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """Read and check one; LearnerError says what is torn. `verify` hashes its files."""
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise LearnerError(
                f"{folder} is of format {content['format']}; this echo2 reads {FORMAT}"
            )
        files = {
            name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()
        }
        fields = dict(content["state"])
        fields["starts"] = tuple((int(i), int(step)) for i, step in fields["starts"])
        checkpoint = Checkpoint(folder, CheckpointState(**fields), files, content["rng"])
        for name in (POLICY, OPTIMIZER, RNG):
            size, digest = files[name]
            actual = (folder / name).stat().st_size
            if actual != size:
                raise LearnerError(f"{name} has {actual} bytes, and state.json says {size}")
            if verify and _digest(folder / name) != digest:
                raise LearnerError(f"the bytes of {name} are not those of its digest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LearnerError(f"it is torn: {type(error).__name__}: {error}") from error
    return checkpoint


def _write_checkpoint(
    folder: Path, state: CheckpointState, policy: Policy, trainer: Trainer
) -> None:
    rng_tensors, rng = _rng_state()
    groups = {
        POLICY: policy.tensors(),
        OPTIMIZER: trainer.optimizer_tensors(),
        RNG: rng_tensors,
    }
    files = {}
    for name, tensors in groups.items():
        save_file(
            {key: value.detach().contiguous() for key, value in tensors.items()}, folder / name
        )
        _sync(folder / name)
        files[name] = [(folder / name).stat().st_size, _digest(folder / name)]
    _write_json(
        folder / STATE, {"format": FORMAT, "state": asdict(state), "files": files, "rng": rng}
    )
    _sync(folder)


def _rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Random states of torch (tensors), Python and numpy (JSON)."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, cuda_state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda/{index}"] = cuda_state
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            np.asarray(keys).tolist(),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def _restore_rng(tensors: dict[str, Tensor], rng: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    cuda = [value for key, value in sorted(tensors.items()) if key.startswith("cuda/")]
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    version, internal, gauss = rng["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = rng["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _looks_complete(folder: Path) -> bool:
    try:
        read_checkpoint(folder, verify=False)
    except LearnerError:
        return False
    return True


def _step(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def _incarnation(folder: Path) -> int:
    return int(folder.name.split("-i")[1])


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
