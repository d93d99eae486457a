"""RUN/rollouts: the batches that were trained, to be read, compared and replayed.

    RUN/rollouts/step-00000042.safetensors      the batch of the line with step = 42

Promise: saving never costs a learner step. A batch that cannot be written is left out with
one warning, and no further one until a batch could be written again; training goes on. At
most `rollouts.keep_steps` files and `rollouts.bytes_max` bytes are kept, the newest ones: room
is made before a file is written. A file is written aside and renamed, so a reader sees a whole
one or none; it is not forced to the disk, so a power cut may tear the newest, which readers
then say.

A file is plain safetensors, readable with any such library; nothing is ever unpickled. T
tokens of all trajectories one after the other, M trajectories:

    token_ids I32 [T]    logprobs F32 [T] behaviour    loss_mask U8 [T] 1: the policy sampled it
    in_loss U8 [T] 1: it was trained
    learner_logprobs F32 [T] the learner's own at the start of the step, where known, else nan
    rewards F64 [M]      advantages F64 [M]            lengths I32 [M]
    header U8: JSON with the step, the groups, their tasks, workers and spans

Read without torch and without the learner.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import structlog
from pydantic import TypeAdapter, ValidationError

from echo2.config import RolloutsTable
from echo2.errors import LearnerError, WeightsError
from echo2.messages import BatchGranted, BatchGroup
from echo2.types import Span, Task, TrajectoryHeader, Version
from echo2.weights.files import aside, remove_stale
from echo2.weights.safetensors_file import read_safetensors

if TYPE_CHECKING:
    from echo2_learner.batch import TrainingBatch, Trajectory
    from echo2_learner.session import GrantedBatch

log = structlog.get_logger(__name__)

FOLDER: Final = "rollouts"
FORMAT: Final = 1
_NAME: Final = re.compile(r"^step-(\d{8,})\.safetensors$")
_TYPES: Final[dict[str, npt.DTypeLike]] = {"F64": "<f8", "F32": "<f4", "I32": "<i4", "U8": "u1"}
_GRANTED: Final = TypeAdapter(BatchGranted)
_HEADERS: Final = TypeAdapter(list[TrajectoryHeader])

Arrays = dict[str, npt.NDArray[Any]]
StartLogprobs = Sequence[tuple["Trajectory", npt.NDArray[np.float32]]]
"""Trajectories of a batch, each with [T] the learner's own at the start of the step."""


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """One file. `step` is that of the metrics' line, so v was step - 1 when it was trained;
    `mismatch` is mean |logprob difference| by worker where it was measured. `arrays` are those
    of the module's text. `groups` are as the coordinator granted them."""

    step: int
    incarnation: int
    run_id: str
    loss_from_step: int
    last: bool
    granted: BatchGranted
    groups: tuple[BatchGroup, ...]
    mismatch: dict[str, float]
    arrays: Arrays

    def bounds(self) -> list[tuple[int, int]]:
        """Where each trajectory lies in the arrays [T]."""
        ends = np.cumsum(self.arrays["lengths"]).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


class RolloutFiles:
    """The saved batches of one run folder; only the learner that owns it writes."""

    def __init__(self, run_dir: Path, table: RolloutsTable) -> None:
        self.folder = run_dir / FOLDER
        self._table = table
        self._warned = False

    @property
    def is_on(self) -> bool:
        return self._table.keep_steps > 0

    def begin(self, resume_step: int) -> None:
        """Forget what a dead line of the run left above the step that is resumed."""
        with contextlib.suppress(OSError):  # the next write will tell
            remove_stale(self.folder)
            for step, path in saved_steps(self.folder).items():
                if step > resume_step:
                    path.unlink(missing_ok=True)

    def save(
        self,
        granted: GrantedBatch,
        batch: TrainingBatch,
        *,
        incarnation: int,
        run_id: str,
        mismatch: Mapping[str, float],
        start_logprobs: StartLogprobs,
    ) -> None:
        """Keep a batch that was trained; never raises for what a disk does."""
        if not self.is_on:
            return
        try:
            arrays = _arrays(granted, batch, start_logprobs)
            header = _header(granted, incarnation, run_id, mismatch)
            self._write(batch.step + 1, {**arrays, "header": header})
        except (OSError, WeightsError) as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "rollouts_not_saved",
                    step=batch.step + 1,
                    reason=str(error),
                    advice="training goes on without them; free space in the run folder, or set "
                    "rollouts.keep_steps = 0",
                )
        else:
            self._warned = False

    def _write(self, step: int, arrays: Arrays) -> None:
        encoded = _encode(arrays)
        size = sum(map(len, encoded))
        if size > self._table.bytes_max:
            raise WeightsError(
                f"the rollouts of step {step} have {size} bytes, and rollouts.bytes_max is "
                f"{self._table.bytes_max}; raise it"
            )
        self._make_room(step, size)
        with aside(self.folder) as (written, file):
            file.writelines(encoded)
            file.flush()
            os.replace(written, self.folder / f"step-{step:08d}.safetensors")

    def _make_room(self, step: int, size: int) -> None:
        kept = {s: path for s, path in saved_steps(self.folder).items() if s != step}
        sizes = {s: path.stat().st_size for s, path in kept.items()}
        for oldest in sorted(kept):
            if len(sizes) < self._table.keep_steps and (
                sum(sizes.values()) + size <= self._table.bytes_max
            ):
                return
            kept[oldest].unlink(missing_ok=True)
            del sizes[oldest]


def saved_steps(folder: Path) -> dict[int, Path]:
    """Step -> file, ascending; {} when nothing was saved."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): path for path in folder.iterdir() if (m := _NAME.match(path.name))}
    return dict(sorted(found.items()))


def read_saved_batch(path: Path) -> SavedBatch:
    """Raises LearnerError when the file is torn or not one of ours."""
    try:
        arrays = {
            name: np.frombuffer(content, _TYPES[dtype]).reshape(shape)
            for name, dtype, shape, content in read_safetensors(path)
        }
        header = json.loads(arrays.pop("header").tobytes())
        if header["format"] != FORMAT:
            raise LearnerError(f"{path} is of format {header['format']}; this one reads {FORMAT}")
        granted = _GRANTED.validate_python(header["granted"])
        return SavedBatch(
            step=int(header["step"]),
            incarnation=int(header["incarnation"]),
            run_id=str(header["run_id"]),
            loss_from_step=int(header["loss_from_step"]),
            last=bool(header["last"]),
            granted=granted,
            groups=_groups(header, granted, arrays),
            mismatch={str(name): float(value) for name, value in header["mismatch"].items()},
            arrays=arrays,
        )
    except (WeightsError, OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise LearnerError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it was torn, or another "
            "program wrote it: remove it"
        ) from error


def _arrays(granted: GrantedBatch, batch: TrainingBatch, starts: StartLogprobs) -> Arrays:
    frames = {
        name: b"".join(getattr(group, name) for group in granted.groups)
        for name in ("token_ids", "logprobs", "loss_mask")
    }
    trained = list(batch.trajectories)
    arrays: Arrays = {
        "rewards": np.array([t.reward for t in trained], "<f8"),
        "advantages": np.array([t.advantage for t in trained], "<f8"),
        "token_ids": np.frombuffer(frames["token_ids"], "<i4"),
        "logprobs": np.frombuffer(frames["logprobs"], "<f4"),
        "lengths": np.array([t.length for t in trained], "<i4"),
        "loss_mask": np.frombuffer(frames["loss_mask"], "u1"),
        "in_loss": _joined([t.loss_mask for t in trained], "u1"),
    }
    if starts:
        own = {id(trajectory): logprobs for trajectory, logprobs in starts}
        unknown = np.float32(np.nan)  # of other ranks' trajectories, and out of the loss
        arrays["learner_logprobs"] = _joined(
            [np.where(t.loss_mask, own.get(id(t), unknown), unknown) for t in trained], "<f4"
        )
    return arrays


def _joined(rows: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0), *rows]).astype(dtype)


def _header(
    granted: GrantedBatch, incarnation: int, run_id: str, mismatch: Mapping[str, float]
) -> npt.NDArray[np.uint8]:
    content = {
        "format": FORMAT,
        "step": granted.step + 1,
        "incarnation": incarnation,
        "run_id": run_id,
        "loss_from_step": granted.loss_from_step,
        "last": granted.last,
        "granted": asdict(granted.granted),
        "mismatch": dict(mismatch),
        "groups": [
            {
                "group": group.group,
                "worker": group.worker,
                "task": [group.task.index, group.task.payload],
                "trajectories": [_row(header) for header in group.trajectories],
            }
            for group in granted.groups
        ],
    }
    return np.frombuffer(json.dumps(content, ensure_ascii=False).encode(), np.uint8)


def _row(header: TrajectoryHeader) -> dict[str, Any]:
    spans = [[s.version.incarnation, s.version.step, s.start, s.end] for s in header.spans]
    return {
        name: getattr(header, name)
        for name in ("length", "prompt_length", "num_sampled", "reward", "finish", "num_turns")
    } | {"spans": spans}


def _groups(
    header: Mapping[str, Any], granted: BatchGranted, arrays: Arrays
) -> tuple[BatchGroup, ...]:
    groups, start = [], 0
    for content in header["groups"]:
        rows = [
            {
                **row,
                "spans": tuple(Span(Version(a, b), low, high) for a, b, low, high in row["spans"]),
            }
            for row in content["trajectories"]
        ]
        trajectories = tuple(TrajectoryHeader(**row) for row in rows)
        _HEADERS.validate_python([asdict(row) for row in trajectories])
        end = start + sum(row.length for row in trajectories)
        groups.append(
            BatchGroup(
                incarnation=granted.incarnation,
                step=granted.step,
                group=content["group"],
                worker=content["worker"],
                task=Task(*content["task"]),
                trajectories=trajectories,
                token_ids=arrays["token_ids"][start:end].tobytes(),
                logprobs=arrays["logprobs"][start:end].tobytes(),
                loss_mask=arrays["loss_mask"][start:end].tobytes(),
            )
        )
        start = end
    total = sum(row.length for group in groups for row in group.trajectories)
    if any(len(arrays[n]) != total for n in ("token_ids", "logprobs", "loss_mask", "in_loss")):
        raise ValueError(f"its arrays do not have the {total} tokens of its groups")
    return tuple(groups)


def _encode(arrays: Arrays) -> list[bytes]:
    """A safetensors file in pieces; larger elements first, so that each array is aligned."""
    names = {np.dtype(dtype): name for name, dtype in _TYPES.items()}
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "echo2-rollouts"}}
    end = 0
    for name, array in ordered:
        offsets = [end, end + array.nbytes]
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return [struct.pack("<Q", len(encoded)), encoded, *(array.tobytes() for _, array in ordered)]
