"""The learner that is the embedding program itself: submit, next_batch, complete, publish.

It speaks the protocol of every learner through a mailbox in memory, so that whatever holds
for a learner process holds for it. Versions are served by an origin in the same process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import zmq.asyncio

from echo2.errors import LearnerError
from echo2.learner_client import Batch, LearnerClient
from echo2.messages import Message, VersionPublished
from echo2.net.sockets import close_context, make_context
from echo2.types import Task, Version
from echo2.weights.model_files import asset_files
from echo2.weights.origin import Origin
from echo2.weights.safetensors_file import read_safetensors_folder
from echo2.weights.store import prune, write_assets, write_version

if TYPE_CHECKING:
    from echo2.service import Coordinator

Tensors = Mapping[str, npt.NDArray[Any]]

DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bfloat16": "BF16",  # numpy has it with the package ml_dtypes
}


class EmbeddedLearner:
    """Behind `Coordinator.submit` and its siblings; takes the seat at the first call."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._tasks: dict[int, Task] = {}
        self._num_submitted = coordinator.next_task_index
        self._ended = False
        self._finished = False
        self._client: LearnerClient | None = None
        self._origin: Origin | None = None
        self._context: zmq.asyncio.Context | None = None
        self._versions: dict[int, str] = {}
        self._incarnation = 0
        self._step = 0
        self._assets_digest = ""
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._seating = asyncio.Lock()

    # ------------------------------------------------------------------------- tasks

    async def submit(self, tasks: Sequence[Task] | Sequence[str]) -> None:
        if self._ended:
            raise LearnerError("end_of_tasks was called; no task can follow")
        for task in tasks:
            made = Task(self._num_submitted, task) if isinstance(task, str) else task
            self._tasks[made.index] = made
            self._num_submitted = max(self._num_submitted, made.index + 1)
        self._more.set()

    async def end_of_tasks(self) -> None:
        self._ended = True
        self._more.set()

    def _task_source(self, start: int, count: int) -> tuple[list[Task], bool]:
        """Called in a thread: waits until there is a task at `start`, or none will come."""
        return asyncio.run_coroutine_threadsafe(
            self._wait_for_tasks(start, count), self._loop
        ).result()

    async def _wait_for_tasks(self, start: int, count: int) -> tuple[list[Task], bool]:
        while start not in self._tasks and not self._ended:
            self._more.clear()
            await self._more.wait()
        end = start
        while end < start + count and end in self._tasks:
            end += 1
        exhausted = self._ended and end >= self._num_submitted
        return [self._tasks[index] for index in range(start, end)], exhausted

    # ------------------------------------------------------------------------- steps

    async def next_batch(self) -> Batch | None:
        client = await self._seated()
        batch = await client.next_batch(self._step)
        self._finished = batch is None
        return batch

    async def complete(self, batch: Batch) -> int:
        client = await self._seated()
        await client.complete(batch.step, train_s=0.0, wait_s=0.0, mismatch=())
        self._step = batch.step + 1
        await client.checkpoint_saved(self._step, (self._step,))
        for group in batch.groups:
            self._tasks.pop(group.task.index, None)
        return self._step

    async def publish(
        self, snapshot: Path | str | Tensors, *, assets: Path | str | None = None
    ) -> Version:
        client = await self._seated()
        origin = await self._origin_started()
        folder = self._coordinator.run_dir / "versions"
        version = Version(self._incarnation, self._step)
        if assets is None and isinstance(snapshot, str | Path) and not self._assets_digest:
            assets = snapshot
        if assets is not None:
            self._assets_digest = await asyncio.to_thread(_write_assets, folder, Path(assets))
        manifest = await asyncio.to_thread(_write_snapshot, folder, snapshot, version)
        keep_from = await client.publish(
            VersionPublished(
                version=version,
                manifest_digest=manifest.manifest_digest,
                assets_digest=self._assets_digest,
                num_bytes=manifest.num_bytes,
                origin=origin.endpoint,
                origin_key=origin.public_key,
            )
        )
        self._versions[version.step] = manifest.manifest_digest
        self._versions = {
            step: digest
            for step, digest in self._versions.items()
            if step >= keep_from or step == version.step
        }
        keep = {*self._versions.values(), self._assets_digest} - {""}
        await asyncio.to_thread(prune, folder, keep)
        return version

    async def stop(self) -> None:
        self._ended = True
        self._more.set()
        client, self._client = self._client, None
        if client is not None:
            text = "all tasks are used up" if self._finished else "the embedding program ends"
            await client.close(text, finished=self._finished)
        origin, self._origin = self._origin, None
        if origin is not None:
            await origin.stop()
        context, self._context = self._context, None
        if context is not None:
            await close_context(context)

    # ----------------------------------------------------------------------- helpers

    async def _seated(self) -> LearnerClient:
        async with self._seating:
            if self._client is None:
                client = LearnerClient(_Mailbox(self._coordinator), tasks=self._task_source)
                resume_step = self._coordinator.status()["step"]
                welcome = await client.start(resume_step=resume_step)
                self._incarnation, self._step = welcome.incarnation, welcome.step
                self._client = client
            return self._client

    async def _origin_started(self) -> Origin:
        if self._origin is None:
            (self._coordinator.run_dir / "versions").mkdir(exist_ok=True)
            self._context = make_context()
            origin = Origin(self._context, self._coordinator.config, self._coordinator.run_dir)
            await origin.start()
            self._coordinator.own(origin.wait(), name="origin")
            self._origin = origin
        return self._origin


class _Mailbox:
    """A transport without sockets: the coordinator is in this process."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._to_coordinator: Callable[[Message], None] | None = None

    @property
    def trouble(self) -> str:
        return ""

    async def start(
        self, on_message: Callable[[Message], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._to_coordinator = self._coordinator.connect_local(on_message)

    async def stop(self) -> None:
        self._to_coordinator = None

    def send(self, message: Message) -> None:
        if self._to_coordinator is not None:
            self._to_coordinator(message)


def _write_assets(folder: Path, model: Path) -> str:
    files = asset_files(model)
    return write_assets(folder, files).manifest_digest if files else ""


def _write_snapshot(folder: Path, snapshot: Path | str | Tensors, version: Version) -> Any:
    metadata = {"version": str(version)}
    if isinstance(snapshot, str | Path):
        tensors = read_safetensors_folder(Path(snapshot))
        return write_version(folder, tensors, kind="weights", metadata=metadata)
    named = []
    for name, array in snapshot.items():
        dtype = DTYPES.get(str(array.dtype))
        if dtype is None:
            raise LearnerError(
                f"tensor {name} is {array.dtype}; allowed are {', '.join(DTYPES)}, or a folder of "
                "safetensors for bfloat16"
            )
        whole = np.ascontiguousarray(array)
        named.append((name, dtype, array.shape, whole.data.cast("B")))
    return write_version(folder, named, kind="weights", metadata=metadata)
