"""Machines as the run folder knows them: RUN/machines/WORKER.json, mode 0600.

    written (starting) -> start -> running -> stopping -> stopped -> the file is removed

A file is there, durably, before its machine is started, and until its machine was stopped: whoever
reads the folder after any crash knows every machine that may be on.

Two locks, for keepers that follow each other: `keeper.lock` has the one at work, `next.lock` the
one that waits for it, by which the first one knows.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo2.weights.files import make_folder, sync_folder, write_whole

log = structlog.get_logger()

Name = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class MachineRecord(BaseModel):
    """`token`: the id of its join token, "" before it has one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    worker: Name
    offer: Name
    state: Literal["starting", "running", "stopping"] = "starting"
    id: Annotated[str, Field(max_length=256)] = ""
    token: Annotated[str, Field(pattern=r"^([0-9a-f]{12})?$")] = ""


class MachineBook:
    """Its methods write files: no event loop calls them."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "machines"

    def records(self) -> list[MachineRecord]:
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = MachineRecord.model_validate_json(path.read_bytes())
            except (OSError, ValidationError) as error:
                log.error("machine_unreadable", path=str(path), reason=str(error).splitlines()[0])
                continue
            if record.worker == path.stem:
                found.append(record)
        return found

    def write(self, record: MachineRecord) -> None:
        make_folder(self.folder)
        write_whole(self._path(record.worker), record.model_dump_json().encode(), mode=0o600)

    def remove(self, worker: str) -> None:
        self._path(worker).unlink(missing_ok=True)
        sync_folder(self.folder)

    def _path(self, worker: str) -> Path:
        return self.folder / f"{worker}.json"

    # ------------------------------------------------------------------------ locks

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """Be the keeper; waits until the one before has ended. Blocks."""
        make_folder(self.folder)
        with (self.folder / "keeper.lock").open("a", encoding="ascii") as mine:
            with (self.folder / "next.lock").open("a", encoding="ascii") as waiting:
                fcntl.flock(waiting, fcntl.LOCK_EX)
                fcntl.flock(mine, fcntl.LOCK_EX)
            yield

    def has_successor(self) -> bool:
        """Does another keeper wait?"""
        with (self.folder / "next.lock").open("a", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False
