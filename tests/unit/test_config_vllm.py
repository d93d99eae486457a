"""The table [worker.vllm]: what may be passed on to vLLM, and its class of precision."""

from __future__ import annotations

from typing import Any

import pytest

from echo2.config import config_from_mapping
from echo2.config_vllm import precision_class
from echo2.errors import ConfigError


def a_config(vllm: dict[str, Any], **tables: Any) -> Any:
    return config_from_mapping({"worker": {"engine": "vllm", "vllm": vllm}, **tables})


def test_any_argument_that_is_not_ours_is_passed_on() -> None:
    config = a_config({"engine_args": {"block_size": 32, "swap_space": 1}})
    assert config.worker.vllm.engine_args == {"block_size": 32, "swap_space": 1}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": "other"}, "cannot be set: the run's assets name it"),
        ({"logprobs_mode": "raw_logprobs"}, "those that the learner computes"),
        ({"max_num_seqs": 8}, "a setting of its own: worker.vllm.sequences_max"),
        ({"--block-size": 8}, "no name of an argument"),
    ],
)
def test_what_echo2_decides_or_names_itself_is_refused(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        a_config({"engine_args": arguments})


def test_stop_texts_need_vllm() -> None:
    stop = {"stop": ["\n"], "stop_token_ids": [7]}
    assert a_config({}, sampling=stop).sampling.stop == ["\n"]
    with pytest.raises(ConfigError, match=r'need worker.engine = "vllm"'):
        config_from_mapping({"worker": {"engine": "transformers"}, "sampling": stop})


@pytest.mark.parametrize(
    ("quantization", "precision"),
    [("fp8", "fp8"), ("experts_int8", "int8"), ("awq", "int4"), ("mxfp8", "fp8")],
)
def test_a_quantization_has_a_class_of_precision(quantization: str, precision: str) -> None:
    assert precision_class(quantization) == precision
