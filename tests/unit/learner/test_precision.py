"""bfloat16 with float32 masters, activations computed again, and adapters of low rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo2.config import LearnerTable, config_from_mapping
from echo2.config_loss import LoraTable
from echo2.errors import ConfigError
from echo2.messages import BatchGroup
from echo2.types import Version
from echo2_learner import lora
from echo2_learner.batch import TrainingBatch
from echo2_learner.micro_batch import Cut, micro_batches
from echo2_learner.policy import Policy
from echo2_learner.publish import Publisher
from echo2_learner.trainer import Trainer
from echo2_workers.engines.stored import stored_tensors

Group = Callable[..., BatchGroup]
Batch = Callable[..., TrainingBatch]
TOKENS = torch.tensor([[1, 5, 9, 3, 7, 2]])
LENGTHS = torch.tensor([6])


def a_trainer(policy: Policy, **settings: Any) -> Trainer:
    table = LearnerTable.model_validate({"learning_rate": 1e-3, **settings})
    return Trainer(policy, table, temperature=1.0, max_tokens=4)


def half(folder: Path) -> Policy:
    return Policy.load(folder, dtype=torch.bfloat16, trained=True)


def test_what_computes_in_bfloat16_is_what_is_published_and_masters_learn_what_it_rounds_away(
    tiny_folder: Path, a_group: Group, a_batch: Batch
) -> None:
    policy = half(tiny_folder)
    exact = Policy.load(tiny_folder).tensors()
    for name, tensor in policy.tensors().items():
        assert torch.equal(tensor, exact[name])  # not rounded on the way in
    trainer = a_trainer(policy, dtype="bfloat16", learning_rate=1e-6)
    first = {name: p.clone() for name, p in policy.module.named_parameters()}
    for _ in range(3):
        trainer.step(a_batch([a_group()]))
    for name, parameter in policy.module.named_parameters():
        master = policy.tensors()[name]
        assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(master, exact[name])  # a step far below a unit in the last place
    assert any(torch.equal(first[name], p) for name, p in policy.module.named_parameters())
    moments = [v for k, v in trainer.optimizer_tensors().items() if not k.endswith("/step")]
    assert {value.dtype for value in moments} == {torch.float32}
    worker = Policy.load(tiny_folder, dtype=torch.bfloat16)
    worker.load_tensors(policy.published_tensors())
    ours, theirs = (p.logprobs(TOKENS, LENGTHS, temperature=1.0)[0] for p in (policy, worker))
    assert torch.equal(ours, theirs)


def test_bfloat16_weights_that_compute_in_float32_are_what_is_published(
    tiny_folder: Path, tmp_path: Path, a_group: Group, a_batch: Batch
) -> None:
    def read(**how: Any) -> Policy:
        return Policy.load(tiny_folder, weights_dtype=torch.bfloat16, **how)

    policy, scratch = read(trained=True), read()
    trainer = a_trainer(policy, learning_rate=1e-4)
    for _ in range(3):
        trainer.step(a_batch([a_group()]))
    for name, parameter in policy.module.named_parameters():
        master = policy.tensors()[name]
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, master.bfloat16().float())
        assert not torch.equal(parameter, master)
    (tmp_path / "origin.json").write_text('{"endpoint": "tcp://127.0.0.1:5", "public_key": ""}')
    publisher = Publisher(policy, tmp_path, scratch=scratch, run_name="x", origin_timeout_s=1.0)
    message = publisher.publish(Version(1, 0))
    stored = stored_tensors(publisher.versions.folder, message.manifest_digest)
    assert {dtype for dtype, _, _ in (stored[name] for name in stored)} == {"BF16"}
    assert 0 < message.num_bytes <= 2 * policy.num_parameters() + 65536
    other = read()
    publisher.versions.load(Version(1, 0), other)
    ours, theirs = (p.logprobs(TOKENS, LENGTHS, temperature=1.0)[0] for p in (policy, other))
    assert torch.equal(ours, theirs)


def test_a_base_beneath_adapters_is_rounded_as_it_is_published(tiny_folder: Path) -> None:
    policy = Policy.load(
        tiny_folder,
        trained=True,
        adapters=LoraTable(rank=2, alpha=4),
        weights_dtype=torch.bfloat16,
    )
    worker = Policy.load(tiny_folder, weights_dtype=torch.bfloat16)
    worker.load_tensors(policy.published_tensors(torch.bfloat16))
    ours, theirs = (p.logprobs(TOKENS, LENGTHS, temperature=1.0)[0] for p in (policy, worker))
    assert torch.equal(ours, theirs)  # the adapters are zero


def test_masters_survive_a_checkpoint_and_a_resumed_run_goes_on_bit_by_bit(
    tiny_folder: Path, a_group: Group, a_batch: Batch
) -> None:
    batches = [a_batch([a_group(seed=i)]) for i in range(4)]
    straight = half(tiny_folder)
    trainer = a_trainer(straight, dtype="bfloat16")
    for batch in batches[:2]:
        trainer.step(batch)
    kept = {name: tensor.clone() for name, tensor in straight.tensors().items()}
    moments = {name: tensor.clone() for name, tensor in trainer.optimizer_tensors().items()}
    for batch in batches[2:]:
        trainer.step(batch)
    resumed = half(tiny_folder)
    other = a_trainer(resumed, dtype="bfloat16")
    resumed.load_tensors(kept)
    other.load_optimizer_tensors(moments)
    for batch in batches[2:]:
        other.step(batch)
    for name, tensor in straight.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name])


def test_gradients_of_micro_batches_are_added_up_in_float32(
    tiny_folder: Path, a_group: Group, a_batch: Batch
) -> None:
    """So their sum is near that of one micro-batch, nearer than bfloat16 could hold it."""
    batch = a_batch([a_group(name=f"g{i}", rewards=(1, 0, 1), seed=i) for i in range(8)])
    gradients = []
    for tokens in (21, 10_000):
        policy = half(tiny_folder)
        a_trainer(policy, dtype="bfloat16", micro_batch_tokens=tokens, grad_norm_max=1e6).step(
            batch
        )
        assert all(p.grad is None for p in policy.module.parameters())
        gradients.append(
            torch.cat([v.grad.flatten() for v in policy.trained_parameters().values()])  # type: ignore[union-attr]
        )
    difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert float(difference) < 0.02


def test_activations_computed_again_change_nothing(
    tiny_folder: Path, a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch([a_group(rewards=(1, 0, 1))])
    ended, runs = [], []
    for recompute in (False, True):
        policy = Policy.load(tiny_folder, trained=True)
        calls: list[int] = []
        layer = policy.module.model.layers[0]  # type: ignore[union-attr, index]
        layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))  # type: ignore[operator, union-attr]
        if recompute:
            policy.checkpoint_activations()
        trainer = a_trainer(policy)
        calls.clear()
        trainer.step(batch)
        runs.append(len(calls))
        ended.append(policy.tensors())
    assert runs == [1, 2]
    for name, tensor in ended[0].items():
        assert torch.equal(tensor, ended[1][name])


@pytest.fixture
def adapted(tiny_folder: Path) -> Policy:
    torch.manual_seed(3)
    return Policy.load(tiny_folder, trained=True, adapters=LoraTable(rank=2, alpha=4))


def test_only_adapters_are_trained_and_kept_and_a_version_holds_them_merged(
    adapted: Policy, tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    pytest.importorskip("peft")
    before = tiny.logprobs(TOKENS, LENGTHS, temperature=1.0)[0]
    torch.testing.assert_close(adapted.logprobs(TOKENS, LENGTHS, temperature=1.0)[0], before)
    trainer = a_trainer(adapted, learning_rate=0.05)
    batch = a_batch([a_group(rewards=(1, 0, 1))])
    for _ in range(3):
        trainer.step(batch)
    assert all(lora.is_adapter(name) for name in adapted.tensors())
    assert adapted.tensors().keys() == adapted.trained_parameters().keys()
    assert sum(t.numel() for t in adapted.tensors().values()) < tiny.num_parameters() / 4
    published = adapted.published_tensors()
    assert published.keys() == tiny.tensors().keys()
    assert torch.equal(
        published["model.embed_tokens.weight"], tiny.tensors()["model.embed_tokens.weight"]
    )
    tiny.load_tensors(published)
    after = tiny.logprobs(TOKENS, LENGTHS, temperature=1.0)[0]
    assert float((after - before).detach().abs().max()) > 0.1
    torch.testing.assert_close(
        adapted.logprobs(TOKENS, LENGTHS, temperature=1.0)[0], after, rtol=1e-4, atol=1e-5
    )


def test_adapters_go_into_the_checkpoint_and_they_and_their_merge_into_the_final_folder(
    adapted: Policy, tiny_folder: Path, tmp_path: Path, a_group: Group, a_batch: Batch
) -> None:
    peft = pytest.importorskip("peft")
    a_trainer(adapted, learning_rate=0.05).step(a_batch([a_group()]))
    other = Policy.load(tiny_folder, trained=True, adapters=LoraTable(rank=2, alpha=4))
    other.load_tensors(adapted.tensors())
    adapted.save(tmp_path / "final")
    final = Policy.load(tmp_path / "final")
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with_peft = peft.PeftModel.from_pretrained(plain, tmp_path / "final" / "adapter")
    alone = Policy(with_peft.merge_and_unload(), tiny_folder)
    expected = adapted.logprobs(TOKENS, LENGTHS, temperature=1.0)[0]
    for policy in (other, final, alone):
        found = policy.logprobs(TOKENS, LENGTHS, temperature=1.0)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_of_adapters_is_active_while_gradients_are_computed_and_at_no_other_time(
    tiny_folder: Path, a_group: Group, a_batch: Batch
) -> None:
    pytest.importorskip("peft")
    settings = LoraTable(rank=2, dropout=0.5)
    policy = Policy.load(tiny_folder, trained=True, adapters=settings)
    trainer = a_trainer(policy, lora=settings.model_dump(), learning_rate=0.05)
    batch = a_batch([a_group(rewards=(1, 0, 1))])
    trainer.step(batch)
    twice = [policy.logprobs(TOKENS, LENGTHS, temperature=1.0)[0] for _ in range(2)]
    assert torch.equal(twice[0], twice[1])
    torch.manual_seed(1)
    one = trainer.step(batch).grad_norm
    torch.manual_seed(2)
    assert trainer.step(batch).grad_norm != one


def test_names_that_fit_no_layer_are_a_setting_to_mend(tiny_folder: Path) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets \['nothing'\] fit no layer"):
        Policy.load(tiny_folder, trained=True, adapters=LoraTable(rank=2, targets=["nothing"]))


def test_a_constant_instead_of_the_length_makes_long_answers_weigh_more(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    """Dr. GRPO: each token of every answer has the same share, 1 / (trajectories x 4)."""
    table = LearnerTable.model_validate({"loss": {"name": "dr_grpo"}})
    batch = a_batch([a_group(lengths=(5, 7))], loss=table.loss)
    assert [t.advantage for t in batch.trajectories] == [-0.5, 0.5]
    (micro,) = micro_batches(list(batch.trajectories), Cut(1000, length=4), table.loss)
    assert np.unique(micro.shares_BT[micro.mask_BT]).tolist() == [1 / 8]


def test_precisions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'"bfloat16" needs model\.dtype = "bfloat16"'):
        config_from_mapping({"learner": {"dtype": "bfloat16"}})
    config_from_mapping({"learner": {"dtype": "bfloat16"}, "model": {"dtype": "bfloat16"}})
