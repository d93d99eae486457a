"""What a worker that joined by token is told of its run, and what it does not take from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from echo2.config import Config, config_from_mapping, load_config
from echo2.errors import ConfigError
from echo2.join_settings import SHARED, joined_config, shared_settings
from echo2.messages import JOIN_SETTINGS_MAX, PROTOCOL, Enrolled
from echo2.net.keys import KeyPair

KEY = KeyPair.generate().public


def an_answer(settings: str) -> Enrolled:
    return Enrolled(
        protocol=PROTOCOL,
        name="joined-1",
        run_id="r",
        control="tcp://203.0.113.7:5700",
        rollouts="tcp://203.0.113.7:5701",
        server_key=KEY,
        settings=settings,
    )


def joined(run: Config, *overrides: str) -> Config:
    return joined_config(an_answer(shared_settings(run)), overrides)


def told(**settings: Any) -> Config:
    return joined_config(an_answer(json.dumps(settings)), ())


def test_a_worker_samples_as_the_run_says_and_dials_where_the_answer_says() -> None:
    run = load_config("configs/quickstart.toml")
    config = joined(run)
    assert config.model.dtype == run.model.dtype
    assert config.sampling == run.sampling
    assert config.environment.name == "addition"
    assert config.worker.engine == "transformers"
    assert config.worker.slots == run.worker.slots
    assert config.worker.transformers == run.worker.transformers
    assert config.net.coordinator == "tcp://203.0.113.7:5700"
    assert config.net.coordinator_rollouts == "tcp://203.0.113.7:5701"
    assert config.net.coordinator_key == KEY


def test_every_shared_setting_arrives() -> None:
    run = config_from_mapping(
        {
            "model": {"dtype": "bfloat16", "compute": "float32"},
            "sampling": {"stop": ["\n"], "stop_token_ids": [7], "max_tokens": 99},
            "dispatch": {"group_size": 3},
            "worker": {
                "engine": "vllm",
                "canary_max_diff": 0.25,
                "relay": False,
                "vllm": {"quantization": "fp8", "enforce_eager": True},
            },
        }
    )
    sent, arrived = run.model_dump(), joined(run).model_dump()
    for key in SHARED:
        table, _, rest = key.partition(".")
        before, after = sent[table], arrived[table]
        for part in rest.split("."):
            before, after = before[part], after[part]
        assert after == before, key


def test_what_belongs_to_one_machine_is_not_sent() -> None:
    run = config_from_mapping(
        {
            "worker": {"name": "w", "python": "/opt/python", "price_usd_per_h": 0.3},
            "http": {"token": "secret"},
            "environment": {"settings": {"answer": 42}},
        }
    )
    text = shared_settings(run)
    for kept in ("/opt/python", "0.3", "secret", "42"):
        assert kept not in text


def test_the_machine_s_own_settings_win() -> None:
    config = joined(Config(), "worker.slots=3", "worker.price_usd_per_h=0.35")
    assert (config.worker.slots, config.worker.price_usd_per_h) == (3, 0.35)
    with pytest.raises(ConfigError, match=r"worker\.slot = 3: no such setting"):
        joined(Config(), "worker.slot=3")
    with pytest.raises(ConfigError, match="--set slots: the form is"):
        joined(Config(), "slots")


def test_a_class_is_imported_only_if_the_machine_names_it_too() -> None:
    run = config_from_mapping({"environment": {"name": "os.path:join"}})
    with pytest.raises(ConfigError, match=r"not done at a coordinator's word.*--set environment"):
        joined(run)
    assert joined(run, "environment.name=os.path:join").environment.name == "os.path:join"


@pytest.mark.parametrize("name", ["addition", "registered", "reasoning_gym:chain_sum"])
def test_an_environment_that_is_installed_here_needs_no_word(name: str) -> None:
    assert joined(config_from_mapping({"environment": {"name": name}})).environment.name == name


@pytest.mark.parametrize("key", ["worker.python", "net.keys_dir", "__class__", "run.dir", "a.b.c"])
def test_a_setting_that_no_coordinator_sends_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="settings that a worker does not take"):
        told(**{key: "x"})


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000])
def test_settings_that_are_no_table_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the coordinator sent settings that are no"):
        joined_config(an_answer(text), ())


def test_a_wrong_value_is_told_as_in_a_file() -> None:
    with pytest.raises(ConfigError, match=r"worker\.slots = 0: allowed is an integer from 1"):
        told(**{"worker.slots": 0})


def test_settings_that_no_message_holds_are_told_at_the_coordinator() -> None:
    long = config_from_mapping(
        {"worker": {"engine": "vllm"}, "sampling": {"stop": ["x" * 256] * 2000}}
    )
    with pytest.raises(ConfigError, match=f"can be told {JOIN_SETTINGS_MAX}"):
        shared_settings(long)
