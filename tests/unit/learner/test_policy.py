"""Logprobs, loading and saving of the policy."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2.errors import ConfigError, LearnerError
from echo2_learner.layout import choose_layout
from echo2_learner.policy import Policy, choose_device
from echo2_workers.models import model_folder


def test_padding_on_the_right_changes_no_logprob(tiny: Policy) -> None:
    rows = [torch.tensor([1, 5, 9, 3, 7, 2]), torch.tensor([1, 4]), torch.tensor([1, 8, 8, 6])]
    block = torch.zeros((3, 9), dtype=torch.long)
    for index, row in enumerate(rows):
        block[index, : len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])
    together, entropy = tiny.logprobs(block, lengths, temperature=1.0)
    for index, row in enumerate(rows):
        alone, alone_entropy = tiny.logprobs(row[None], lengths[index : index + 1], temperature=1.0)
        torch.testing.assert_close(together[index, : len(row)], alone[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            entropy[index, : len(row)], alone_entropy[0], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_tempered_distribution(tiny: Policy, temperature: float) -> None:
    tokens = torch.tensor([[1, 5, 9, 3]])
    logprobs, entropy = tiny.logprobs(tokens, torch.tensor([4]), temperature=temperature)
    logits = tiny.module(tokens).logits[0]
    for position in range(1, 4):
        distribution = torch.softmax(logits[position - 1] / temperature, -1)
        assert float(logprobs[0, position].detach()) == pytest.approx(
            float(distribution[tokens[0, position]].log().detach()), abs=1e-5
        )
        assert float(entropy[0, position]) == pytest.approx(
            float(-(distribution * distribution.log()).sum().detach()), abs=1e-5
        )
    assert (float(logprobs[0, 0].detach()), float(entropy[0, 0])) == (0.0, 0.0)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_a_tied_tensor_has_one_name(tiny: Policy) -> None:
    names = list(tiny.tensors())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert set(names) == set(tiny.trained_parameters())


def test_an_untied_model_keeps_both_names(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "untied"
    shutil.copytree(tiny_folder, folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" in Policy.load(folder).tensors()


def test_a_saved_folder_is_the_same_policy_with_its_tokenizer(tiny: Policy, tmp_path: Path) -> None:
    with torch.no_grad():
        for tensor in tiny.tensors().values():
            tensor.add_(0.01)
    tiny.save(tmp_path / "saved")
    again = Policy.load(tmp_path / "saved")
    assert again.tensors().keys() == tiny.tensors().keys()
    for name, tensor in tiny.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    assert again.asset_files().keys() == tiny.asset_files().keys()


def test_a_tensor_that_the_folder_lacks_is_an_error_and_not_random(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(tiny_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors .*layers\.1\.mlp\.up_proj"):
        Policy.load(folder)


def test_weights_of_another_model_are_refused_and_nothing_is_changed(tiny: Policy) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.tensors().items()}
    other = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    with pytest.raises(LearnerError, match="only in one of the two"):
        tiny.load_tensors({**other, "extra": torch.zeros(1)})
    with pytest.raises(LearnerError, match="has the shape"):
        tiny.load_tensors({**other, "model.norm.weight": torch.zeros(3)})
    for name, tensor in tiny.tensors().items():
        assert torch.equal(tensor, before[name])


def test_an_unknown_model_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="builtin:addition-1m"):
        model_folder("builtin:nothing")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="could not be loaded"):
        Policy.load(tmp_path)


def test_an_unknown_device_is_a_setting_to_mend() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"learner\.device is 'abacus'"):
        choose_device("abacus")


def test_an_attention_kernel_is_chosen_by_name_or_told_to_be_absent(
    tiny: Policy, tiny_folder: Path
) -> None:
    tokens, lengths = torch.tensor([[1, 5, 9, 3]]), torch.tensor([4])
    eager = Policy.load(tiny_folder, attention="eager")
    torch.testing.assert_close(
        eager.logprobs(tokens, lengths, temperature=1.0)[0],
        tiny.logprobs(tokens, lengths, temperature=1.0)[0],
    )
    assert choose_layout(eager, packing=True) == "tree"
    if find_spec("flash_attn") is None:
        with pytest.raises(ConfigError, match=r"learner\.attention: flash_attention_2"):
            Policy.load(tiny_folder, attention="flash_attention_2")
