"""Tensors in files, whole or in rows; the final folder in several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echo2.errors import LearnerError
from echo2_learner import final_folder
from echo2_learner.policy import Policy
from echo2_learner.shards import like
from echo2_learner.tensor_files import TensorFiles, save_rows

WHOLE = torch.arange(35.0).reshape(7, 5)


def rows_file(path: Path, start: int, stop: int) -> Path:
    """As rank n writes it."""
    told = {"w": {"saved_offsets": [start, 0]}}
    save_file({"w": WHOLE[start:stop].clone()}, path, {"DCP_SHARDING_INFO": json.dumps(told)})
    return path


@pytest.mark.parametrize("rows", [(0, 7), (0, 3), (2, 6), (6, 7), (3, 3)])
def test_rows_are_read_from_the_files_that_hold_them(tmp_path: Path, rows: tuple[int, int]) -> None:
    bounds = [(4, 7), (0, 2), (2, 4)]
    files = TensorFiles([rows_file(tmp_path / f"{start}", start, stop) for start, stop in bounds])
    stored = files["w"]
    assert stored.shape == (7, 5)
    assert torch.equal(stored.read(*rows), WHOLE[slice(*rows)])
    assert torch.equal(like(torch.zeros(7, 5), stored), WHOLE)


@pytest.mark.parametrize("bounds", [[(0, 3), (4, 7)], [(0, 4), (3, 7)], [(1, 7)]])
def test_rows_that_are_missing_or_there_twice_are_refused(
    tmp_path: Path, bounds: list[tuple[int, int]]
) -> None:
    paths = [rows_file(tmp_path / f"{start}", start, stop) for start, stop in bounds]
    with pytest.raises(LearnerError, match="do not go on where"):
        TensorFiles(paths)


def test_what_is_whole_is_written_by_the_lead_alone(tmp_path: Path) -> None:
    tensors = {"step": torch.tensor(3.0), "w": WHOLE}
    save_rows(tensors, tmp_path / "lead", is_lead=True)
    save_rows(tensors, tmp_path / "other", is_lead=False)
    files = TensorFiles([tmp_path / "lead", tmp_path / "other"])
    assert torch.equal(files["w"].whole(), WHOLE)
    assert files["step"].whole() == 3.0
    assert files["step"].shape == ()
    assert not TensorFiles([tmp_path / "other"])


def test_a_model_folder_is_read_file_by_file(tmp_path: Path, tiny: Policy) -> None:
    assert TensorFiles.of_folder(tmp_path) is None
    files = TensorFiles.of_folder(tiny.folder)
    assert files is not None
    for name, tensor in tiny.tensors().items():
        assert torch.equal(files[name].whole(), tensor)


def test_the_final_folder_may_be_of_several_files(
    tmp_path: Path, tiny: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_folder, "FILE_BYTES_MAX", 20_000)
    folder = tmp_path / "final"
    folder.mkdir()
    final_folder._save_wholes(tiny, folder)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    read = Policy.load(folder)
    assert (folder / "tokenizer.json").exists()
    for name, tensor in tiny.tensors().items():
        assert torch.equal(read.tensors()[name], tensor)
    files = TensorFiles.of_folder(folder)
    assert files is not None
    assert files.keys() == tiny.tensors().keys()
