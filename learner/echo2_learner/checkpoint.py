"""Checkpoints: everything from which a learner goes on bit by bit, whole or not there.

    RUN/checkpoints/step-00000050-i1/   policy.safetensors  optimizer.safetensors
                                        rng.safetensors     state.json

A checkpoint is written aside, flushed to the disk and renamed. `state.json` holds size and
BLAKE3 of the other files, so a torn one is recognised, skipped with a message, and the one
before it is used. Tensors are safetensors and the rest is JSON; nothing is unpickled, ever.

Of several ranks each writes its rows (policy-00002-of-00004.safetensors, ...) and rank 0 the
rest; any number of ranks, also one process alone, goes on from what any other wrote. All
ranks then call `newest` and `restore` together, and `help_save` while rank 0 is in `save`.

One learner at a time owns a run folder: `RUN/learner.json` names its incarnation. A learner
that was stopped and wakes up after another has taken over finds a different one there and
raises FencedError before it changes anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo2 import wire
from echo2.errors import FencedError, LearnerError
from echo2_learner.policy import Policy
from echo2_learner.random_state import random_state, restore_random_state
from echo2_learner.ranks import ALONE, Ranks
from echo2_learner.shards import like
from echo2_learner.tensor_files import TensorFiles, save_rows
from echo2_learner.trainer import Trainer

log = structlog.get_logger(__name__)

FORMATS: Final = (1, 2)
"""Of one process alone, and of ranks."""
POLICY: Final = "policy.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
RNG: Final = "rng.safetensors"
STATE: Final = "state.json"
_TOLD_BYTES_MAX: Final = 1 << 20
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
        """BLAKE3 of the policy's file; of several files, of their digests in hex."""
        digests = [self.files[path.name][1] for path in self.paths(POLICY)]
        return digests[0] if len(digests) == 1 else blake3("".join(digests).encode()).hexdigest()

    def paths(self, kind: str) -> list[Path]:
        """The files of POLICY or OPTIMIZER, in order of rank."""
        names = sorted(name for name in self.files if name.startswith(Path(kind).stem))
        return [self.folder / name for name in names]

    def restore(self, policy: Policy, trainer: Trainer) -> None:
        """Put weights, optimizer and random states back. LearnerError if they do not fit."""
        try:
            policy.load_tensors(TensorFiles(self.paths(POLICY)))
            trainer.load_optimizer_tensors(
                _OptimizerTensors(TensorFiles(self.paths(OPTIMIZER)), trainer)
            )
            restore_random_state(load_file(self.folder / RNG), self.rng)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise LearnerError(
                f"{self.folder} could not be restored: {error}; move it away, and the one before "
                "it is used"
            ) from error


class _OptimizerTensors(Mapping[str, Tensor]):
    """Reads each tensor when it is asked for, this rank's rows of it where its parameter is
    sharded."""

    def __init__(self, files: TensorFiles, trainer: Trainer) -> None:
        self._files = files
        self._parameters = trainer.policy.trained_parameters()

    def __getitem__(self, key: str) -> Tensor:
        parameter = self._parameters.get(key.rpartition("/")[0])
        stored = self._files[key]
        return stored.whole() if parameter is None else like(parameter, stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class CheckpointStore:
    """The checkpoints of one run folder, and the claim of the learner that writes them."""

    def __init__(self, run_dir: Path, *, keep: int, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
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
        listed = "\n".join(folder.name for folder in self._folders()).encode()
        for name in self._ranks.collect(listed)[0].decode().splitlines():
            folder = self.folder / name
            try:
                return read_checkpoint(folder, ranks=self._ranks)
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
            self._ranks.order("save", folder=str(aside))
            files = _write_tensors(aside, policy, trainer, self._ranks)
            _write_rest(aside, state, files, self._ranks)
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

    def help_save(self, folder: Path, policy: Policy, trainer: Trainer) -> None:
        """What the other ranks do while rank 0 is in `save`: write their rows."""
        try:
            _write_tensors(folder, policy, trainer, self._ranks)
        except OSError as error:  # rank 0 raises it, and what follows is its decision
            log.warning("checkpoint_failed", folder=str(folder), reason=str(error))

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


def read_checkpoint(folder: Path, *, ranks: Ranks = ALONE) -> Checkpoint:
    """Read and check one, the digests too, of which each rank takes a part. LearnerError says
    what is torn, on all ranks alike."""
    problem = ""
    checkpoint = None
    try:
        checkpoint = _read(folder)
        _verify(checkpoint, ranks)
    except LearnerError as error:
        problem = str(error)
    problems = [told.decode() for told in ranks.collect(problem.encode()) if told]
    if problems or checkpoint is None:
        raise LearnerError(problems[0])
    return checkpoint


def _read(folder: Path) -> Checkpoint:
    """All but the digests."""
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if content["format"] not in FORMATS:
            raise LearnerError(
                f"{folder} is of format {content['format']}; this echo2 reads "
                f"{' and '.join(map(str, FORMATS))}: install the release that wrote it"
            )
        files = {
            name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()
        }
        fields = dict(content["state"])
        fields["starts"] = tuple((int(i), int(step)) for i, step in fields["starts"])
        checkpoint = Checkpoint(folder, CheckpointState(**fields), files, content["rng"])
        for kind in (POLICY, OPTIMIZER, RNG):
            if not checkpoint.paths(kind):
                raise LearnerError(f"state.json names no {kind}")
        for name, (size, _) in files.items():
            if not (folder / name).is_file():
                raise LearnerError(f"it is torn: {name}, which state.json names, is not there")
            actual = (folder / name).stat().st_size
            if actual != size:
                raise LearnerError(
                    f"it is torn: {name} has {actual} bytes, and state.json says {size}"
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LearnerError(f"it is torn: {type(error).__name__}: {error}") from error
    return checkpoint


def _verify(checkpoint: Checkpoint, ranks: Ranks) -> None:
    for index, (name, (_, digest)) in enumerate(sorted(checkpoint.files.items())):
        if index % ranks.size != ranks.rank:
            continue
        try:
            if _digest(checkpoint.folder / name) != digest:
                raise LearnerError(f"it is torn: the bytes of {name} are not those of its digest")
        except OSError as error:
            raise LearnerError(f"it is torn: {type(error).__name__}: {error}") from error


Files = dict[str, tuple[int, str]]
"""Name -> (size, BLAKE3)."""


def _write_tensors(folder: Path, policy: Policy, trainer: Trainer, ranks: Ranks) -> Files:
    """Write this rank's part; returns the files of all ranks, which are then on the disk.
    OSError, on all ranks alike, when one could not."""
    files: Files = {}
    problem = ""
    try:
        for kind, tensors in (
            (POLICY, policy.tensors()),
            (OPTIMIZER, trainer.optimizer_tensors()),
        ):
            if ranks is ALONE:
                path = folder / kind
                save_file({k: v.detach().contiguous() for k, v in tensors.items()}, path)
            else:
                stem = Path(kind).stem
                path = folder / f"{stem}-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
                save_rows(tensors, path, is_lead=ranks.is_lead)
            files[path.name] = _flushed(path)
    except (OSError, SafetensorError) as error:
        problem = f"{error}" if ranks is ALONE else f"rank {ranks.rank}: {error}"
    told = [
        wire.unpack(data, max_bytes=_TOLD_BYTES_MAX)
        for data in ranks.collect(wire.pack([problem, files]))
    ]
    problems = [problem for problem, _ in told if problem]
    if problems:
        raise OSError("; ".join(problems))
    return {name: (size, digest) for _, part in told for name, (size, digest) in part.items()}


def _write_rest(folder: Path, state: CheckpointState, files: Files, ranks: Ranks) -> None:
    rng_tensors, rng = random_state()
    save_file(rng_tensors, folder / RNG)
    _write_json(
        folder / STATE,
        {
            "format": FORMATS[0] if ranks is ALONE else FORMATS[1],
            "ranks": ranks.size,
            "state": asdict(state),
            "files": {**files, RNG: _flushed(folder / RNG)},
            "rng": rng,
        },
    )
    _sync(folder)


def _flushed(path: Path) -> tuple[int, str]:
    """Flush a file to the disk; (size, BLAKE3)."""
    _sync(path)
    return path.stat().st_size, _digest(path)


def _looks_complete(folder: Path) -> bool:
    try:
        _read(folder)
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
