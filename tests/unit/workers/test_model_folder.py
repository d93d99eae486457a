"""Versions laid into a folder: one of them, all of it, and nothing of anybody else's."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from echo2.errors import ConfigError, EngineError, WeightsError
from echo2.messages import VersionAnnounced
from echo2.types import Sampling, Version
from echo2.weights.adapter import LORA_A, LORA_B, AdapterBase
from echo2.weights.model_files import MARKER_NAME
from echo2.weights.safetensors_file import read_safetensors, read_safetensors_folder
from echo2.weights.store import StoredVersion, open_version, write_assets, write_version
from echo2_workers.engine import GenerateRequest
from echo2_workers.engine_process import InstallOrder
from echo2_workers.installing import InstallError
from echo2_workers.model_folder import ModelFolder

V1, V2 = Version(1, 0), Version(2, 0)


class Fleet:
    """A worker's own folder with a store, and versions in it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "w-1"
        self.store = self.folder / "store"
        self.models = self.folder / "model"
        self.fetched: list[str] = []
        self.folder.mkdir()

    def model_folder(self, models: Path | None = None) -> ModelFolder:
        return ModelFolder(
            models or self.models, worker_folder=self.folder, fetch_assets=self.fetch_assets
        )

    async def fetch_assets(self, digest: str, origin: str, key: str) -> StoredVersion:
        self.fetched.append(digest)
        stored = open_version(self.store, digest)
        if stored is None:
            raise WeightsError("no route to the origin")
        return stored

    def version(self, version: Version, content: bytes, *, assets: str = "") -> VersionAnnounced:
        tensors = [("a", "U8", (len(content),), content), ("b", "F32", (2, 1), content[:8])]
        return self.announced(version, write_version(self.store, tensors).manifest_digest, assets)

    def assets(self, config: str) -> str:
        path = self.folder / "config.json"
        path.write_text(config)
        return write_assets(self.store, {path.name: path}).manifest_digest

    def announced(self, version: Version, digest: str, assets: str = "") -> VersionAnnounced:
        return VersionAnnounced(
            version=version,
            manifest_digest=digest,
            num_bytes=1,
            origin="",
            origin_key="",
            assets_digest=assets,
        )

    def install(self, announced: VersionAnnounced, into: ModelFolder | None = None) -> None:
        async def whole_life() -> None:
            models = into or self.model_folder()
            await models.start(None)
            try:
                await models.install(self.order(announced))
            finally:
                await models.stop()

        asyncio.run(whole_life())

    def order(self, announced: VersionAnnounced) -> InstallOrder:
        return InstallOrder(
            announced=announced, previous=None, folder=self.store, mode="continue", tolerance=1.0
        )

    def tensors(self) -> dict[str, bytes]:
        return {name: bytes(view) for name, _, _, view in read_safetensors_folder(self.models)}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_a_version_lies_there_bit_by_bit_with_its_files_and_its_name(fleet: Fleet) -> None:
    announced = fleet.version(V1, b"0123456789", assets=fleet.assets("{}"))
    fleet.install(announced)
    assert fleet.tensors() == {"a": b"0123456789", "b": b"01234567"}
    files = sorted(path.name for path in fleet.models.iterdir())
    assert files == ["config.json", MARKER_NAME, "model.safetensors"]
    told = json.loads((fleet.models / MARKER_NAME).read_bytes())
    assert (told["version"], told["manifest_digest"]) == ("1.0", announced.manifest_digest)


def test_the_next_version_replaces_all_of_the_one_before(fleet: Fleet) -> None:
    fleet.install(fleet.version(V1, b"0123456789", assets=fleet.assets("{}")))
    fleet.install(fleet.version(V2, b"9876543210"))
    assert fleet.tensors()["a"] == b"9876543210"
    assert not (fleet.models / "config.json").exists()
    assert sorted(path.name for path in fleet.folder.iterdir() if path.is_dir()) == [
        "model",
        "store",
    ]


def test_a_full_disk_leaves_the_version_before(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.install(fleet.version(V1, b"0123456789"))
    announced = fleet.version(V2, b"9876543210")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InstallError) as caught:
            fleet.install(announced)
    assert caught.value.restored
    assert "is full" in str(caught.value)
    assert fleet.tensors()["a"] == b"0123456789"
    fleet.install(announced)
    assert fleet.tensors()["a"] == b"9876543210"


def test_a_crash_between_the_renames_loses_nothing(fleet: Fleet) -> None:
    fleet.install(fleet.version(V1, b"0123456789"))
    fleet.models.rename(fleet.models.with_name(".model.old"))
    fleet.models.with_name(".model.new").mkdir()
    models = fleet.model_folder()
    asyncio.run(models.start(None))
    asyncio.run(models.stop())
    assert fleet.tensors()["a"] == b"0123456789"
    fleet.install(fleet.version(V2, b"9876543210"))
    assert fleet.tensors()["a"] == b"9876543210"
    assert not list(fleet.folder.glob(".model.[no]*"))


@pytest.mark.parametrize("assets", ["", "f" * 64])
def test_what_cannot_be_had_is_an_install_that_failed(fleet: Fleet, assets: str) -> None:
    with pytest.raises(InstallError, match="no route" if assets else "publish it again") as caught:
        fleet.install(fleet.announced(V1, "0" * 64, assets))
    assert (caught.value.stage, caught.value.restored) == ("install", True)
    assert not fleet.models.exists()


def test_adapters_lie_beside_the_model_that_they_go_onto(fleet: Fleet) -> None:
    base = write_version(fleet.store, [("q.weight", "F32", (1, 1), bytes(4))])
    pair = [(f"q{LORA_A}", "F32", (1, 1), b"aaaa"), (f"q{LORA_B}", "F32", (1, 1), b"bbbb")]
    onto = AdapterBase(base.manifest_digest, 2.0).metadata()
    adapter = write_version(fleet.store, pair, kind="adapter", metadata=onto)
    fleet.install(fleet.announced(V1, adapter.manifest_digest))
    names = [
        [tensor[0] for tensor in read_safetensors(fleet.models / file)]
        for file in ("model.safetensors", "adapter.safetensors")
    ]
    assert names == [["q.weight"], [f"q{LORA_A}", f"q{LORA_B}"]]


def test_a_folder_of_someone_else_is_never_replaced(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    announced = fleet.version(V1, b"0123456789")
    with pytest.raises(ConfigError, match="was not written by a worker"):
        fleet.install(announced, fleet.model_folder(tmp_path / "home"))
    for other in (fleet.store, fleet.folder, tmp_path):
        with pytest.raises(ConfigError, match="keeps other things"):
            fleet.install(announced, fleet.model_folder(other))
    assert (tmp_path / "home" / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    fleet.install(announced, fleet.model_folder(tmp_path / "empty"))
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_two_workers_do_not_share_a_folder(fleet: Fleet) -> None:
    async def scenario() -> None:
        first, second = fleet.model_folder(), fleet.model_folder()
        await first.start(None)
        with pytest.raises(ConfigError, match="is that of another worker"):
            await second.start(None)
        await first.stop()
        await second.start(None)
        await second.stop()

    asyncio.run(scenario())


def test_without_a_folder_versions_count_as_installed_and_nothing_is_written(fleet: Fleet) -> None:
    announced = fleet.version(V1, b"0123456789", assets="f" * 64)
    nothing = ModelFolder(None, worker_folder=fleet.folder, fetch_assets=fleet.fetch_assets)
    fleet.install(announced, nothing)
    assert not fleet.models.exists()
    assert not fleet.fetched


def test_it_samples_nothing(fleet: Fleet) -> None:
    request = GenerateRequest(token_ids=[1], sampling=Sampling(), seed=0)
    with pytest.raises(EngineError, match="samples nothing"):
        asyncio.run(fleet.model_folder().generate(request, lambda _: None))
