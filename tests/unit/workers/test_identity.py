"""Names, keys and addresses of a worker on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.config import Config, config_from_mapping
from echo2.config_vllm import precision_of
from echo2.errors import ConfigError, Echo2Error
from echo2.net.keys import AllowList
from echo2_workers.environment import About
from echo2_workers.identity import claim_identity
from echo2_workers.links import find_coordinator
from echo2_workers.parts import doubts, settings_of


def a_config(**net: Any) -> Config:
    return config_from_mapping({"net": net} if net else {})


def test_names_are_numbered_and_free_again_after_their_process(tmp_path: Path) -> None:
    first = claim_identity(a_config(), tmp_path, "")
    second = claim_identity(a_config(), tmp_path, "")
    assert first.name.endswith("-1")
    assert second.name.endswith("-2")
    first.release()
    third = claim_identity(a_config(), tmp_path, "")
    assert third.name == first.name
    for identity in (second, third):
        identity.release()


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    held = claim_identity(a_config(), tmp_path, "gpu-7")
    with pytest.raises(ConfigError, match="another daemon on this machine"):
        claim_identity(a_config(), tmp_path, "gpu-7")
    held.release()


@pytest.mark.parametrize("name", ["learner", "learner-2", "coordinator", "origin", "a b", ".x"])
def test_a_name_of_another_part_or_of_strange_signs_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"worker\.name"):
        claim_identity(a_config(), tmp_path, name)


def test_a_worker_beside_its_coordinator_authorizes_itself(tmp_path: Path) -> None:
    identity = claim_identity(a_config(), tmp_path, "w-1")
    assert identity.keys is not None
    assert AllowList(tmp_path / "keys" / "authorized").name_of(identity.keys.public) == "w-1"
    assert (tmp_path / "keys" / "w-1.key").stat().st_mode & 0o077 == 0
    assert identity.folder == tmp_path / "workers" / "w-1"
    identity.release()


def test_a_worker_elsewhere_has_to_be_authorized_there(tmp_path: Path) -> None:
    net = {
        "coordinator": "tcp://10.0.0.1:5700",
        "coordinator_rollouts": "tcp://10.0.0.1:5701",
        "coordinator_key": "k" * 40,
        "keys_dir": str(tmp_path / "my-keys"),
    }
    config = a_config(**net)
    identity = claim_identity(config, tmp_path / "run", "w-1")
    assert identity.keys is not None
    assert not (tmp_path / "my-keys" / "authorized").exists()
    assert find_coordinator(config, tmp_path).rollouts == "tcp://10.0.0.1:5701"
    identity.release()


def test_without_curve_there_is_no_key(tmp_path: Path) -> None:
    identity = claim_identity(a_config(curve=False), tmp_path, "w-1")
    assert identity.keys is None
    assert not (tmp_path / "keys").exists()
    identity.release()


def test_the_coordinators_address_is_read_from_the_run_folder(tmp_path: Path) -> None:
    with pytest.raises(Echo2Error, match="start the coordinator"):
        find_coordinator(a_config(), tmp_path)
    path = tmp_path / "coordinator.json"
    path.write_text("{")
    with pytest.raises(Echo2Error, match="does not say where"):
        find_coordinator(a_config(), tmp_path)
    path.write_text(json.dumps({"control": "a", "rollouts": "b", "public_key": "c"}))
    assert find_coordinator(a_config(), tmp_path).key == "c"


def test_the_state_machine_learns_what_the_engine_needs() -> None:
    config = config_from_mapping({"worker": {"engine": "null", "slots": 3}})
    settings = settings_of(config, "w-1", About("1", replays=True))
    assert (settings.needs_weights, settings.takes_leases, settings.slots) == (False, True, 3)
    assert settings.precision == precision_of(config) == "none"
    none = config_from_mapping({"worker": {"engine": "none"}})
    assert not settings_of(none, "w-1", About("1")).takes_leases
    assert "worker_idle" in doubts(none)
    cut = {"worker": {"engine": "null", "null": {"tokens_mean": 1000.0}}}
    assert "sampling.max_tokens 16" in doubts(config_from_mapping(cut))["null_tokens_cut"]
    assert not doubts(a_config())
