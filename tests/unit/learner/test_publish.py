"""A published version is exact, proves itself by its probe, and leaves when it may."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from echo2.config_loss import LoraTable
from echo2.core.lineage import Lineage
from echo2.errors import LearnerError, WaitTimeoutError
from echo2.messages import VersionPublished
from echo2.types import Version
from echo2.weights.delta import apply_delta
from echo2.weights.store import ChunkStore, StoredVersion, open_version
from echo2_learner.policy import Policy
from echo2_learner.publish import PublishedVersions, Publisher
from echo2_workers.engines.stored import stored_tensors

Make = Callable[..., Publisher]


@pytest.fixture
def make(tiny: Policy, tiny_folder: Path, run_dir: Path) -> Make:
    def build(dtype: torch.dtype = torch.float32, timeout_s: float = 0.2) -> Publisher:
        scratch = Policy.load(tiny_folder, dtype=dtype)
        return Publisher(tiny, run_dir, scratch=scratch, run_name="r", origin_timeout_s=timeout_s)

    return build


def digests(run_dir: Path) -> set[str]:
    return {path.stem for path in (run_dir / "versions").glob("*.manifest")}


def nudge(policy: Policy) -> None:
    with torch.no_grad():
        for tensor in policy.tensors().values():
            tensor.add_(0.01)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
def test_the_bytes_are_the_weights_in_the_published_dtype_tied_ones_once(
    dtype: torch.dtype, name: str, make: Make, tiny: Policy, run_dir: Path
) -> None:
    message = make(dtype).publish(Version(1, 0))
    stored = open_version(run_dir / "versions", message.manifest_digest)
    assert stored is not None
    with stored:
        tensors = stored.tensors()
        assert list(tensors) == list(tiny.tensors())
        assert "lm_head.weight" not in tensors
        for key, (stored_dtype, shape, content) in tensors.items():
            expected = tiny.tensors()[key].to(dtype)
            assert stored_dtype == name
            assert shape == tuple(expected.shape)
            assert bytes(content) == expected.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert stored.manifest.metadata["version"] == "1.0"
        stored.verify()
    assert message.num_bytes == stored.manifest.num_bytes


def test_the_probe_is_computed_with_the_published_weights(
    make: Make, tiny_folder: Path, run_dir: Path
) -> None:
    publisher = make(torch.bfloat16)
    message = publisher.publish(Version(1, 0))
    tokens = np.frombuffer(message.probe_tokens, np.int32).reshape(-1, message.probe_length)
    probe = np.frombuffer(message.probe_logprobs, np.float32).reshape(tokens.shape)
    assert tokens.shape == (4, 12)
    assert tokens.min() >= 0
    assert tokens.max() < 32
    assert (probe[:, 0] == 0).all()
    reader = Policy.load(tiny_folder, dtype=torch.bfloat16)
    nudge(reader)
    publisher.versions.load(Version(1, 0), reader)
    lengths = torch.full((4,), 12)
    again, _ = reader.logprobs(torch.from_numpy(tokens.copy()).long(), lengths, temperature=1.0)
    assert np.array_equal(again.detach().numpy(), probe)


def test_the_same_tokens_probe_every_version(make: Make, tiny: Policy) -> None:
    publisher = make()
    first = publisher.publish(Version(1, 0))
    nudge(tiny)
    second = publisher.publish(Version(1, 1), final=True)
    assert first.probe_tokens == second.probe_tokens
    assert first.probe_logprobs != second.probe_logprobs
    assert first.manifest_digest != second.manifest_digest
    assert first.assets_digest == second.assets_digest
    assert (first.final, second.final) == (False, True)


def test_equal_weights_under_two_versions_have_two_manifests(make: Make, run_dir: Path) -> None:
    publisher = make()
    messages = [publisher.publish(Version(1, step)) for step in (0, 1)]
    assert messages[0].manifest_digest != messages[1].manifest_digest
    assert digests(run_dir) == {
        *(message.manifest_digest for message in messages),
        messages[0].assets_digest,
    }


def test_the_assets_hold_configuration_and_tokenizer(make: Make, run_dir: Path) -> None:
    message = make().publish(Version(1, 0))
    stored = open_version(run_dir / "versions", message.assets_digest)
    assert stored is not None
    with stored:
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(stored.tensors())
        assert "model.safetensors" not in stored.tensors()
        assert json.loads(bytes(stored.tensors()["config.json"][2]))["model_type"] == "qwen2"


def test_old_versions_leave_the_newest_and_the_assets_stay(make: Make, run_dir: Path) -> None:
    publisher = make()
    messages = [publisher.publish(Version(1, step)) for step in range(4)]
    publisher.prune(2)
    kept = {message.manifest_digest for message in messages[2:]} | {messages[0].assets_digest}
    assert digests(run_dir) == kept
    assert Version(1, 1) not in publisher.versions
    publisher.prune(100)
    assert digests(run_dir) == {messages[3].manifest_digest, messages[0].assets_digest}


def test_a_resumed_learner_knows_the_versions_of_its_line_and_drops_the_dead(
    make: Make, run_dir: Path, tiny_folder: Path
) -> None:
    for step in range(4):
        make().publish(Version(1, step))
    lineage = Lineage(starts=[(1, 0), (2, 2)])
    publisher = make()
    publisher.versions.find(lineage)
    assert [Version(1, step) in publisher.versions for step in range(4)] == [True] * 3 + [False]
    message = publisher.publish(Version(2, 2))
    publisher.prune(0)
    assert len(digests(run_dir)) == 5  # 1.0, 1.1, 1.2, 2.2 and the assets
    assert message.manifest_digest in digests(run_dir)
    publisher.versions.load(Version(1, 2), Policy.load(tiny_folder))


def test_where_the_origin_is_is_read_anew_each_time(make: Make, run_dir: Path) -> None:
    publisher = make()
    assert publisher.publish(Version(1, 0)).origin == "tcp://127.0.0.1:5555"
    moved = {"endpoint": "tcp://127.0.0.1:6666", "public_key": "n" * 40, "pid": 2}
    (run_dir / "origin.json").write_text(json.dumps(moved))
    message = publisher.publish(Version(1, 1))
    assert (message.origin, message.origin_key) == ("tcp://127.0.0.1:6666", "n" * 40)


def test_a_publication_waits_for_the_origin_until_its_deadline(make: Make, run_dir: Path) -> None:
    content = (run_dir / "origin.json").read_text()
    (run_dir / "origin.json").unlink()
    with pytest.raises(WaitTimeoutError, match="start `echo2 origin`"):
        make().publish(Version(1, 0))
    found: list[VersionPublished] = []
    waiting = threading.Thread(
        target=lambda: found.append(make(timeout_s=30.0).publish(Version(1, 1)))
    )
    waiting.start()
    aside = run_dir / "aside"
    aside.write_text(content)
    aside.replace(run_dir / "origin.json")
    waiting.join(30.0)
    assert [message.version for message in found] == [Version(1, 1)]
    (run_dir / "origin.json").write_text("{}")
    with pytest.raises(LearnerError, match="does not say where the origin is"):
        make().publish(Version(1, 2))


def test_a_stopped_learner_removes_nothing_of_the_one_that_took_its_place(
    make: Make, tiny: Policy, run_dir: Path
) -> None:
    stopped, second = make(), make()
    old = stopped.publish(Version(1, 0)).manifest_digest
    nudge(tiny)
    own = stopped.publish(Version(1, 1)).manifest_digest
    nudge(tiny)
    taken_over = second.publish(Version(2, 1)).manifest_digest
    stopped.prune(1)
    assert digests(run_dir) >= {own, taken_over}
    assert old not in digests(run_dir)


def test_a_version_that_somebody_removed_is_named(run_dir: Path, tiny: Policy) -> None:
    versions = PublishedVersions(run_dir / "versions")
    versions.take({"1.0": "0" * 64})
    with pytest.raises(LearnerError, match="version 000000000000 is not in"):
        versions.load(Version(1, 0), tiny)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_travels_alone_and_a_worker_computes_what_a_merged_version_holds(
    dtype: torch.dtype, tiny_folder: Path, run_dir: Path
) -> None:
    pytest.importorskip("peft")
    policy = Policy.load(tiny_folder, trained=True, adapters=LoraTable(rank=2, alpha=4))
    publishers = [
        Publisher(
            policy,
            run_dir,
            scratch=Policy.load(tiny_folder, dtype=dtype),
            run_name="r",
            origin_timeout_s=0.2,
            adapters_alone=alone,
        )
        for alone in (True, False)
    ]
    with torch.no_grad():
        for tensor in policy.tensors().values():
            tensor.normal_(0.0, 0.3)
    first, merged = (each.publish(Version(1, step)) for step, each in enumerate(publishers))
    nudge(policy)
    second = publishers[0].publish(Version(1, 2))
    assert first.num_bytes < merged.num_bytes / 2
    alone, whole, later = (
        stored_tensors(run_dir / "versions", message.manifest_digest)
        for message in (first, merged, second)
    )
    assert list(alone) == list(whole)
    for name in whole:
        assert alone[name][:2] == whole[name][:2]
        assert bytes(alone[name][2]) == bytes(whole[name][2])
    assert any(bytes(alone[name][2]) != bytes(later[name][2]) for name in whole)
    assert first.probe_logprobs == merged.probe_logprobs != second.probe_logprobs
    reader = Policy.load(tiny_folder, dtype=dtype)
    publishers[0].versions.load(Version(1, 0), reader)
    for name, tensor in publishers[1].scratch.tensors().items():
        assert torch.equal(reader.tensors()[name], tensor)


def test_a_delta_is_offered_beside_the_next_version_and_stays_with_it(
    tiny: Policy, tiny_folder: Path, run_dir: Path, tmp_path: Path
) -> None:
    def a_publisher() -> Publisher:
        return Publisher(
            tiny,
            run_dir,
            scratch=Policy.load(tiny_folder),
            run_name="r",
            origin_timeout_s=0.2,
            deltas=True,
        )

    publisher = a_publisher()
    first = publisher.publish(Version(1, 0))
    with torch.no_grad():
        tiny.tensors()["model.norm.weight"].add_(0.01)
    second = publisher.publish(Version(1, 1))
    assert first.deltas == ()
    (offer,) = second.deltas
    assert offer.base == first.manifest_digest
    assert offer.num_bytes < second.num_bytes / 2
    store = ChunkStore(tmp_path / "store", 1 << 30)
    with (
        opened(run_dir, first.manifest_digest) as base,
        opened(run_dir, offer.manifest_digest) as delta,
        apply_delta(store, delta, base) as made,
    ):
        assert made.manifest.manifest_digest == second.manifest_digest
    publisher.prune(keep_from=1)
    kept = {second.manifest_digest, second.assets_digest, offer.manifest_digest}
    assert digests(run_dir) == kept
    resumed = a_publisher()
    resumed.versions.find(Lineage(starts=[(1, 0), (2, 1)]))
    resumed.prune(keep_from=1)
    assert digests(run_dir) == kept - {second.assets_digest}
    nudge(tiny)
    third = resumed.publish(Version(2, 2))
    assert [offer.base for offer in third.deltas] == [second.manifest_digest] * len(third.deltas)


def opened(run_dir: Path, digest: str) -> StoredVersion:
    stored = open_version(run_dir / "versions", digest)
    assert stored is not None
    return stored


def test_what_adapters_go_onto_stays_as_long_as_one_of_them(
    tiny_folder: Path, run_dir: Path
) -> None:
    pytest.importorskip("peft")
    policy = Policy.load(tiny_folder, trained=True, adapters=LoraTable(rank=2, alpha=4))
    scratch = Policy.load(tiny_folder)

    def a_publisher() -> Publisher:
        return Publisher(
            policy,
            run_dir,
            scratch=scratch,
            run_name="r",
            origin_timeout_s=0.2,
            adapters_alone=True,
        )

    publisher = a_publisher()
    messages = [publisher.publish(Version(1, step)) for step in range(2)]
    publisher.prune(keep_from=1)
    assets, newest = messages[1].assets_digest, messages[1].manifest_digest
    (base,) = digests(run_dir) - {assets, newest}
    resumed = a_publisher()
    resumed.versions.find(Lineage(starts=[(1, 0), (2, 1)]))
    resumed.prune(keep_from=1)
    assert digests(run_dir) == {newest, base}
    assert resumed.publish(Version(2, 2)).manifest_digest in digests(run_dir)
    assert base in digests(run_dir)
