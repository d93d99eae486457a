"""Model folders as versions in RUN/versions, published one after the other by `echo2 publish`.

Promise: of what this wrote, the folder holds the newest version and the one before, with
their assets, and the deltas of the last DELTA_PATH_MAX steps that lead there (as many as one
announcement may name), for workers that are some versions behind; what a learner wrote is
never touched. A version's tensors are those of the model folder, bit by bit, under their names
there.

    prepare (older ones go) -> write -> (announced, fetched) -> prepare of the next

Everything here reads or writes whole models: call it in threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from echo2.errors import WeightsError
from echo2.messages import DELTA_PATH_MAX
from echo2.types import DeltaOffer, Version
from echo2.weights.delta import BASE_KEY, TARGET_KEY, write_delta
from echo2.weights.files import disk_errors, version_files
from echo2.weights.model_files import asset_files
from echo2.weights.safetensors_file import read_safetensors_folder
from echo2.weights.snapshot import Manifest
from echo2.weights.versions import (
    NamedTensor,
    check_stop,
    named_manifest,
    open_version,
    prune,
    read_manifest_file,
    write_assets,
    write_version,
)

log = structlog.get_logger(__name__)

VERSION_KEY: Final = "version"
PUBLISHER_KEY: Final = "published_by"
PUBLISHER: Final = "echo2 publish"
ASSETS_KEY: Final = "assets"


@dataclass(frozen=True, slots=True)
class Written:
    """What is announced of a version. `assets_digest` is "" when no file came with it."""

    manifest: Manifest
    assets_digest: str
    delta: DeltaOffer | None


class PublishedFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Make the folder; remove what the newest version of ours has replaced."""
        with disk_errors("opening the folder of versions", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        found = self._manifests()
        ours = self._ours(found)
        newest = ours[-1:]
        assets_kept = {manifest.metadata.get(ASSETS_KEY) for manifest in newest}
        gone = {manifest.manifest_digest for manifest in ours[:-1]}
        gone |= {manifest.metadata.get(ASSETS_KEY, "") for manifest in ours[:-1]} - assets_kept
        deltas = [manifest for manifest in found.values() if manifest.kind == "delta"]
        chain = _chain(newest[0].manifest_digest, deltas) if newest else []
        gone |= {d.manifest_digest for d in deltas if d.metadata.get(TARGET_KEY) in gone}
        gone -= set(chain)
        gone |= set(chain[DELTA_PATH_MAX:])
        prune(self.folder, set(version_files(self.folder)) - gone)

    def write(
        self, model: Path, version: Version, *, delta: bool, stop: threading.Event
    ) -> Written:
        """Write `version` out of a model folder, and what makes it of the one before where
        that is smaller. WeightsError when a file is not valid or the disk is full."""
        before = self._ours(self._manifests())[-1:]
        files = asset_files(model)
        assets_digest = write_assets(self.folder, files).manifest_digest if files else ""
        manifest = write_version(
            self.folder,
            _until(stop, read_safetensors_folder(model)),
            metadata={
                VERSION_KEY: str(version),
                PUBLISHER_KEY: PUBLISHER,
                ASSETS_KEY: assets_digest,
            },
        )
        offer = self._write_delta(before[0], manifest, stop) if delta and before else None
        return Written(manifest, assets_digest, offer)

    def _write_delta(
        self, before: Manifest, manifest: Manifest, stop: threading.Event
    ) -> DeltaOffer | None:
        base = open_version(self.folder, before.manifest_digest)
        target = open_version(self.folder, manifest.manifest_digest)
        assert target is not None, "it was just written"
        with target:
            if base is None:
                return None
            with base:
                threads = os.cpu_count() or 1
                delta = write_delta(self.folder, base, target, threads=threads, stop=stop)
        if delta is None:
            return None
        return DeltaOffer(before.manifest_digest, delta.manifest_digest, delta.num_bytes)

    def _manifests(self) -> dict[str, Manifest]:
        found = {}
        for digest in version_files(self.folder):
            try:
                found[digest] = named_manifest(read_manifest_file(self.folder, digest), digest)
            except (FileNotFoundError, WeightsError) as error:
                log.warning("version_ignored", manifest_digest=digest, reason=str(error))
        return found

    def _ours(self, found: dict[str, Manifest]) -> list[Manifest]:
        """Versions of weights that this class wrote, the newest last."""
        ours = [
            manifest
            for manifest in found.values()
            if manifest.metadata.get(PUBLISHER_KEY) == PUBLISHER
        ]
        return sorted(ours, key=lambda manifest: Version.parse(manifest.metadata[VERSION_KEY]))


def _chain(version: str, deltas: Iterable[Manifest]) -> list[str]:
    """The deltas that lead to a version one after the other, the last first."""
    leading = {delta.metadata.get(TARGET_KEY): delta for delta in deltas}
    chain: list[str] = []
    while (delta := leading.pop(version, None)) is not None:
        chain.append(delta.manifest_digest)
        version = delta.metadata[BASE_KEY]
    return chain


def _until(stop: threading.Event, tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
    for tensor in tensors:
        check_stop(stop)
        yield tensor
