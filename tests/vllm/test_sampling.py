"""What vLLM samples, and what its logprobs mean: held against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo2_workers.engine import RequestError

PROMPT = [1, 5, 9, 4]


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.6), (1.6, 0.6), (0.0, 1.0)]
)
def test_logprobs_are_those_after_temperature_and_before_top_p(
    bench: Callable[..., Any], models: Any, temperature: float, top_p: float
) -> None:
    here = bench()
    # One greedy beside sampling ones, so that vLLM's mixed batch is what is tested.
    for seed in range(3):
        here.ask(PROMPT, seed=seed, temperature=temperature, top_p=top_p)
    here.ask(PROMPT, temperature=0.0)
    here.finish()
    for number in range(3):
        difference = models.difference(1, PROMPT, here.done[number], temperature=temperature or 1.0)
        assert difference < 1e-4
    assert models.difference(1, PROMPT, here.done[3]) < 1e-4


def test_top_p_leaves_out_the_unlikely_tokens(bench: Callable[..., Any], models: Any) -> None:
    import torch

    here = bench()
    for seed in range(8):
        here.ask(PROMPT, seed=seed, top_p=0.4)
    here.finish()
    for generated in here.done.values():
        ids = torch.tensor([[*PROMPT, *generated.token_ids.tolist()]])
        logits = models.model(1)(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        probabilities = logits.softmax(-1)
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        rank = (order == ids[0, len(PROMPT) :, None]).float().argmax(-1)
        assert float(before.gather(-1, rank[:, None]).max()) < 0.4 + 1e-4


def test_greedy_takes_the_likeliest_token(bench: Callable[..., Any], models: Any) -> None:
    import torch

    here = bench()
    here.ask(PROMPT, temperature=0.0)
    here.finish()
    ids = torch.tensor([[*PROMPT, *here.done[0].token_ids.tolist()]])
    logits = models.model(1)(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == here.done[0].token_ids.tolist()


def test_the_same_seed_gives_the_same_tokens_in_any_company(bench: Callable[..., Any]) -> None:
    here = bench()
    here.ask(PROMPT, seed=7)
    here.finish()
    for seed in (1, 7, 2, 3):
        here.ask(PROMPT, seed=seed)
    here.steps(3)
    late = here.ask(PROMPT, seed=7)
    here.finish()
    alone = here.done[0].token_ids
    assert np.array_equal(here.done[2].token_ids, alone)
    assert np.array_equal(here.done[late].token_ids, alone)
    assert not np.array_equal(here.done[1].token_ids, alone)


def test_more_prompts_than_one_step_may_prefill_are_sampled_as_alone(
    bench: Callable[..., Any], models: Any
) -> None:
    here = bench()
    prompts = [[3 + (i * k) % 20 for i in range(100)] for k in range(1, 11)]
    for seed, prompt in enumerate(prompts):
        here.ask(prompt, seed=seed, max_tokens=10)
    here.finish()
    alone = here.ask(prompts[9], seed=9, max_tokens=10)
    here.finish()
    for number, prompt in enumerate(prompts):
        assert models.difference(1, prompt, here.done[number]) < 1e-4
    assert np.array_equal(here.done[alone].token_ids, here.done[9].token_ids)


def test_tokens_are_counted_and_sequences_end_at_their_limit(bench: Callable[..., Any]) -> None:
    here = bench()
    here.ask(PROMPT, max_tokens=5)
    here.ask([3] * 250, max_tokens=40)
    here.finish()
    assert (len(here.done[0].token_ids), here.done[0].finish) == (5, "length")
    assert (len(here.done[1].token_ids), here.done[1].finish) == (6, "length"), "positions"
    assert here.counts == {0: 5, 1: 6}
    assert here.core.steps >= 6


def test_end_tokens_and_stop_texts_end_a_sequence_and_are_kept(
    bench: Callable[..., Any], models: Any
) -> None:
    ends = bench(endless=False)
    for seed in range(20):
        ends.ask(PROMPT, seed=seed, max_tokens=200)
    ends.finish()
    stopped = [each for each in ends.done.values() if each.finish == "stop"]
    assert stopped
    assert all(each.token_ids[-1] == 2 and 2 not in each.token_ids[:-1] for each in stopped)

    from echo2_workers.tokenizer import encode

    texts = bench(stop=("=",))
    for seed in range(8):
        texts.ask(PROMPT, seed=seed, max_tokens=200)
    texts.finish()
    equals = encode("=")[0]
    stopped = [each for each in texts.done.values() if each.finish == "stop"]
    assert stopped
    assert all(each.token_ids[-1] == equals for each in stopped)
    assert all(models.difference(1, PROMPT, each) < 1e-4 for each in stopped)


@pytest.mark.parametrize(
    ("prompt", "how", "told"),
    [
        ([], {}, "empty"),
        ([1, 99], {}, "vocabulary"),
        ([1] * 256, {}, "positions"),
        ([1], {"temperature": 0.001}, "lowest"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(
    bench: Callable[..., Any], prompt: list[int], how: dict[str, Any], told: str
) -> None:
    here = bench()
    with pytest.raises(RequestError, match=told):
        here.ask(prompt, **how)
    here.ask(PROMPT)
    here.finish()
    assert 0 in here.done or 1 in here.done


def test_a_removed_sequence_is_forgotten(bench: Callable[..., Any]) -> None:
    from echo2.types import Sampling
    from echo2_workers.engine import GenerateRequest

    here = bench()
    request = GenerateRequest(token_ids=PROMPT, seed=1, sampling=Sampling(max_tokens=40))
    sequence = here.core.add(request, lambda _: None, lambda _: pytest.fail("it was removed"))
    here.ask(PROMPT, seed=2)
    here.steps(2)
    here.core.remove(sequence)
    here.finish()
    assert len(here.done[0].token_ids) == 40
