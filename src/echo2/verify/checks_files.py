"""What lies on the disk for a restart: the newest checkpoint, whole and readable.

A checkpoint is a folder `step-STEP-iINCARNATION` with a `state.json` that names size and
BLAKE3 of the other files. It is recomputed here without torch: digests, and the header of
each safetensors file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from echo2.verify.check import Check
from echo2.verify.records import METRICS_FILE, NO_WEIGHTS, SIMULATION_FILE, Line

_NAME: Final = re.compile(r"^step-(\d+)-i(\d+)$")
HEADER_MAX_BYTES: Final = 100 << 20
PIECE_BYTES: Final = 8 << 20


class Checkpoints(Check):
    NAME = "checkpoints"
    TEXT = "the newest checkpoint is complete, readable and not ahead of the completed steps"
    UNIT = "checkpoints"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: list[int] = []
        self._where = ""

    def read(self, line: Line) -> None:
        if line["event"] != "checkpoint_saved":
            return
        step, kept = line["step"], line["kept"]
        self._kept, self._where = kept, line.where
        if step > self.history.v:
            self.violate(
                line.where,
                f"a checkpoint of step {step} was saved when only {self.history.v} steps were "
                "completed",
                step=step,
            )
        if step not in kept:
            self.violate(
                line.where, f"the checkpoint of step {step} is not among the kept {kept}", step=step
            )

    def conclude(self) -> None:
        folder = self.run_dir / "checkpoints"
        if not folder.is_dir():
            if (self.run_dir / SIMULATION_FILE).is_file():
                self.promise.skipped = NO_WEIGHTS
                return
            self.promise.skipped = "there is no checkpoints/ folder"
            # A program that embeds the coordinator keeps its own, and has no metrics either.
            if self._kept and (self.run_dir / METRICS_FILE).is_file():
                self.violate(
                    self._where, "checkpoints were saved, but there is no checkpoints/ folder"
                )
            return
        complete = []
        for path in sorted(folder.iterdir()):
            match = _NAME.match(path.name)
            if match is None:
                continue
            self.promise.checked += 1
            problem = _problem(path, int(match[1]))
            if problem:
                self.promise.notes.append(f"checkpoints/{path.name} is torn: {problem}")
            else:
                complete.append(int(match[1]))
        self._judge(complete)

    def _judge(self, complete: list[int]) -> None:
        for step in complete:
            if step > self.history.v:
                self.violate(
                    "checkpoints",
                    f"there is a checkpoint of step {step}, but v is {self.history.v}",
                    step=step,
                )
        if complete:
            self.promise.facts["newest"] = max(complete)
        newest = max(self._kept, default=None)
        if newest is not None and newest not in complete:
            self.violate(
                "checkpoints",
                f"the newest checkpoint, of step {newest}, is missing or torn"
                + ("; an older one is complete" if complete else "; no other one is complete"),
                step=newest,
            )


def _problem(folder: Path, step: int) -> str:
    """Why this checkpoint is not complete; "" if it is."""
    try:
        content = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = {
            str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()
        }
        state_step = content["state"]["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"state.json cannot be read ({type(error).__name__}: {error})"
    if state_step != step:
        return f"state.json is of step {state_step}"
    if not any(name.startswith("policy") for name in files):  # of ranks, one for each
        return "state.json names no policy.safetensors"
    for name, (size, digest) in files.items():
        path = folder / Path(name).name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes; state.json says {size}"
        if _digest(path) != digest:
            return f"the bytes of {name} do not have the digest that state.json names"
        if path.suffix == ".safetensors":
            problem = _header_problem(path, size)
            if problem:
                return f"{name}: {problem}"
    return ""


def _digest(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def _header_problem(path: Path, size: int) -> str:
    """Why the file is no safetensors file; "" if its header fits its bytes."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(size - 8, HEADER_MAX_BYTES):
            return f"its header claims {header_bytes} bytes"
        try:
            header = json.loads(file.read(header_bytes))
            ends = [
                int(entry["data_offsets"][1])
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its header cannot be read ({error})"
    if max(ends, default=0) != size - 8 - header_bytes:
        return f"its tensors end at {max(ends, default=0)} of {size - 8 - header_bytes} bytes"
    return ""


def file_checks() -> tuple[type[Check], ...]:
    return (Checkpoints,)
