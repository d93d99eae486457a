"""Model folders as versions: what travels, what stays, what goes."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path

import pytest

from echo2.errors import WeightsError
from echo2.messages import DELTA_PATH_MAX
from echo2.types import Version
from echo2.weights.files import version_files
from echo2.weights.model_files import MARKER_NAME, asset_files
from echo2.weights.published_folder import PublishedFolder, Written
from echo2.weights.store import open_version, write_version


def a_model(folder: Path, content: bytes, *, config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    entry = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"weight": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + content
    (folder / "model-00001-of-00001.safetensors").write_bytes(data)
    placed = {"weight": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(config)
    return folder


def write(versions: PublishedFolder, model: Path, number: int, *, delta: bool = True) -> Written:
    versions.prepare()
    return versions.write(model, Version(number, 0), delta=delta, stop=threading.Event())


def test_what_says_where_tensors_lie_does_not_travel(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", b"1")
    for name in ("pytorch_model.bin", MARKER_NAME, ".hidden", "tokenizer.json"):
        (model / name).write_text("")
    (model / "original").mkdir()
    assert list(asset_files(model)) == ["config.json", "tokenizer.json"]


def test_a_version_holds_the_tensors_and_its_name(tmp_path: Path) -> None:
    versions = PublishedFolder(tmp_path / "versions")
    written = write(versions, a_model(tmp_path / "model", b"abc"), 1)
    assert written.manifest.metadata["version"] == "1.0"
    assert written.delta is None
    stored = open_version(versions.folder, written.manifest.manifest_digest)
    assert stored is not None
    with stored:
        assert bytes(stored.tensors()["weight"][2]) == b"abc"


def test_the_next_version_comes_with_the_delta_from_the_one_before(tmp_path: Path) -> None:
    versions, model = PublishedFolder(tmp_path / "versions"), tmp_path / "model"
    first = write(versions, a_model(model, bytes(100_000)), 1)
    second = write(versions, a_model(model, bytes(99_999) + b"1"), 2)
    assert second.delta is not None
    assert second.delta.base == first.manifest.manifest_digest
    assert second.delta.num_bytes < 10_000
    assert write(versions, model, 3, delta=False).delta is None


def test_two_versions_stay_and_what_a_learner_wrote_is_not_touched(tmp_path: Path) -> None:
    versions, model = PublishedFolder(tmp_path / "versions"), tmp_path / "model"
    versions.prepare()
    of_learner = write_version(
        versions.folder, [("w", "U8", (1,), b"x")], metadata={"version": "1.7"}
    )
    written = [
        write(versions, a_model(model, bytes(50_000) + bytes([i]), config=str(i // 2)), i)
        for i in (2, 3, 4, 10)
    ]
    last = written[-2:]
    expected = {of_learner.manifest_digest, *(w.assets_digest for w in last)}
    expected |= {w.manifest.manifest_digest for w in last}
    expected |= {w.delta.manifest_digest for w in written if w.delta is not None}
    assert set(version_files(versions.folder)) == expected


def test_the_deltas_of_the_last_steps_stay_and_older_ones_go(tmp_path: Path) -> None:
    versions, model = PublishedFolder(tmp_path / "versions"), tmp_path / "model"
    written = [
        write(versions, a_model(model, bytes(5_000) + bytes([i])), i)
        for i in range(1, DELTA_PATH_MAX + 5)
    ]
    made = [w.delta.manifest_digest for w in written if w.delta is not None]
    assert len(made) == DELTA_PATH_MAX + 3
    versions.prepare()
    kept = {d for d in version_files(versions.folder) if d in made}
    assert kept == set(made[-DELTA_PATH_MAX:])


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(WeightsError, match=r"has no \*.safetensors file"):
        write(PublishedFolder(tmp_path / "versions"), tmp_path / "model", 1)


def test_writing_stops_when_nobody_waits_any_more(tmp_path: Path) -> None:
    versions = PublishedFolder(tmp_path / "versions")
    versions.prepare()
    stop = threading.Event()
    stop.set()
    with pytest.raises(WeightsError, match="nobody waits"):
        versions.write(a_model(tmp_path / "model", b"1"), Version(1, 0), delta=True, stop=stop)
