"""What a node with engine "none" does with a version: it lays it into a folder.

Promise: the folder holds one version, all of it, or is not there. Its tensors are those that
were published, bit by bit, in `model.safetensors`; the files that came with them (config.json,
tokenizer) lie beside it, and `echo2_version.json` names the version. A version of adapters
lies in `adapter.safetensors`, beside the model that it goes onto.

    .NAME.new is written --> NAME becomes .NAME.old --> .NAME.new becomes NAME --> .old goes

Between the two renames, and after a crash there until the next start, no folder is there. A
folder that this did not write is never replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import IO

import structlog

from echo2.errors import ConfigError, EngineError, WeightsError
from echo2.messages import VersionAnnounced
from echo2.weights.adapter import adapter_base
from echo2.weights.files import disk_errors, sync_folder, write_whole
from echo2.weights.model_files import MARKER_NAME, marker
from echo2.weights.safetensors_file import write_safetensors
from echo2.weights.threads import in_thread
from echo2.weights.versions import StoredVersion, open_version, read_assets
from echo2_workers.engine import Generated, GenerateRequest
from echo2_workers.engine_process import InstallOrder
from echo2_workers.installing import Installed, InstallError

log = structlog.get_logger(__name__)

FetchAssets = Callable[[str, str, str], Awaitable[StoredVersion]]
"""(manifest digest, origin, its key) -> the assets, open. Raises WeightsError."""
NOT_MODELS = ("store", "assets")
"""Folders of a worker that are not for models."""


class ModelFolder:
    """An EngineHandle. `folder` is made at the first install; None: nothing is written."""

    def __init__(
        self, folder: Path | None, *, worker_folder: Path, fetch_assets: FetchAssets
    ) -> None:
        self._folder = folder
        self._worker_folder = worker_folder
        self._fetch_assets = fetch_assets
        self._lock: IO[str] | None = None

    async def start(self, assets: Path | None) -> None:
        """Take the folder. Raises ConfigError when it is not one for models, is someone
        else's, or another worker puts its models there; EngineError when it cannot be made."""
        if self._folder is None:
            return
        try:
            with disk_errors("preparing worker.model_folder", self._folder.parent):
                self._take(self._folder)
        except WeightsError as error:
            raise EngineError(str(error)) from error

    async def install(self, order: InstallOrder) -> Installed:
        """Raises InstallError; then the folder is what it was."""
        began = time.monotonic()
        if self._folder is not None:
            try:
                await self._replace(self._folder, order)
            except WeightsError as error:
                raise InstallError(str(error), stage="install", restored=True) from error
        return Installed(time.monotonic() - began, 0.0, None)

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated:
        raise EngineError('engine "none" samples nothing')

    async def stop(self) -> None:
        """Let another worker have the folder, which stays."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _take(self, folder: Path) -> None:
        taken = [self._worker_folder / name for name in NOT_MODELS]
        if folder in (*taken, self._worker_folder, *self._worker_folder.parents):
            raise ConfigError(
                f"worker.model_folder is {folder}, where this worker keeps other things: give it "
                'a folder of its own, for example the default, "model"'
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"worker.model_folder {folder} is that of another worker on this machine: each "
                "needs its own; a relative one lies in the worker's own folder"
            ) from None
        self._lock = lock
        old = _beside(folder, "old")
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        if folder.is_dir() and not any(folder.iterdir()):
            return
        if folder.exists() and not (folder / MARKER_NAME).is_file():
            raise ConfigError(
                f"worker.model_folder {folder} is there and was not written by a worker (it has "
                f"no {MARKER_NAME}), so it is not replaced: give another folder, or remove it"
            )

    async def _replace(self, folder: Path, order: InstallOrder) -> None:
        told = order.announced
        assets: StoredVersion | None = None
        if told.assets_digest:
            assets = await self._fetch_assets(told.assets_digest, told.origin, told.origin_key)
        stop = threading.Event()
        await in_thread(stop, partial(_replace, folder, order.folder, told, assets, stop))
        log.info("model_written", version=str(told.version), folder=str(folder))


def _replace(
    folder: Path,
    store: Path,
    announced: VersionAnnounced,
    assets: StoredVersion | None,
    stop: threading.Event,
) -> None:
    """In a thread. WeightsError when it is not done; then the folder is what it was."""
    new, old = _beside(folder, "new"), _beside(folder, "old")
    with disk_errors("putting a version into worker.model_folder", folder.parent):
        for left in (new, old):
            if left.exists():
                shutil.rmtree(left)
        try:
            new.mkdir()
            if assets is not None:
                read_assets(assets, new)
            _write_weights(new, store, announced.manifest_digest, stop)
            named = marker(announced.version, announced.manifest_digest, announced.assets_digest)
            write_whole(new / MARKER_NAME, named)
            _swap(new, folder, old)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)  # what is left goes before the next install


def _beside(folder: Path, end: str) -> Path:
    return folder.with_name(f".{folder.name}.{end}")


def _write_weights(new: Path, store: Path, digest: str, stop: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        stored = stack.enter_context(_opened(store, digest))
        base = adapter_base(stored.manifest)
        if base is None:
            write_safetensors(stored, new / "model.safetensors", stop=stop)
            return
        beneath = stack.enter_context(_opened(store, base.manifest_digest))
        write_safetensors(beneath, new / "model.safetensors", stop=stop)
        write_safetensors(stored, new / "adapter.safetensors", stop=stop)


def _swap(new: Path, folder: Path, old: Path) -> None:
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise


def _opened(store: Path, digest: str) -> StoredVersion:
    stored = open_version(store, digest)
    if stored is None:
        raise WeightsError(
            f"version {digest[:12]} is not in {store}: it was announced without an origin, or "
            "removed; publish it again"
        )
    return stored
