"""The batched sampler: its logprobs are those of a full forward, whatever happens around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from echo2.errors import EngineError
from echo2.types import Span, Version
from echo2_workers.engine import Generated, GenerateRequest, PoisonedEngineError, RequestError
from echo2_workers.engines.noise import uniforms
from echo2_workers.engines.sampler import Sampler
from echo2_workers.engines.sampling import sample_tokens

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


class Batch:
    """Requests in a sampler, and what became of them."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.requests: list[GenerateRequest] = []
        self.done: dict[int, Generated] = {}
        self.tokens: dict[int, int] = {}

    def add(self, request: GenerateRequest) -> Any:
        number = len(self.requests)
        self.requests.append(request)
        self.tokens[number] = 0

        def count(tokens: int) -> None:
            self.tokens[number] += tokens

        return self.sampler.add(
            request, count, lambda generated: self.done.__setitem__(number, generated)
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.sampler.step()

    def finish(self) -> None:
        while self.sampler.running or self.sampler.waiting:
            self.sampler.step()

    def sequence(self, number: int) -> list[int]:
        return [*self.requests[number].token_ids, *self.done[number].token_ids.tolist()]


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths."""
    return [[1, *(3 + (7 * i + j) % 18 for j in range(i % 6))] for i in range(count)]


def check(tiny: Any, batch: Batch, number: int, seed: int, *, temperature: float = 1.0) -> None:
    prompt = len(batch.requests[number].token_ids)
    full = tiny.logprobs(seed, batch.sequence(number), temperature=temperature)
    generated = batch.done[number]
    assert np.abs(full[prompt - 1 :] - generated.logprobs).max() < 1e-5
    assert batch.tokens[number] == len(generated.token_ids)


def test_logprobs_are_those_of_a_full_forward_for_prompts_of_any_length(tiny: Any) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    for i, prompt in enumerate(prompts(8)):
        batch.add(tiny.request(prompt, seed=i, max_tokens=4 + i))
    batch.finish()
    for i in range(8):
        check(tiny, batch, i, 1)
        generated = batch.done[i]
        assert generated.spans == (Span(V1, 0, len(generated.token_ids)),)
        ended = generated.token_ids[-1] == 2
        assert generated.finish == ("stop" if ended else "length")
        assert ended or len(generated.token_ids) == 4 + i
        assert 2 not in generated.token_ids[:-1]


def test_requests_that_join_a_running_batch_change_nothing_for_it(tiny: Any) -> None:
    def play(late: bool) -> list[Generated]:
        sampler = tiny.sampler()
        sampler.load(tiny.tensors(1), V1)
        batch = Batch(sampler)
        for i, prompt in enumerate(prompts(6)):
            if late and i in (2, 4):
                batch.steps(2)
            batch.add(tiny.request(prompt, seed=100 + i, max_tokens=12))
        batch.finish()
        for i in range(6):
            check(tiny, batch, i, 1)
        return [batch.done[i] for i in range(6)]

    for together, joined in zip(play(False), play(True), strict=True):
        assert together.token_ids.tolist() == joined.token_ids.tolist()


def test_the_batch_is_bounded_and_the_rest_waits(tiny: Any) -> None:
    sampler = tiny.sampler(sequences_max=2)
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    for i, prompt in enumerate(prompts(5)):
        batch.add(tiny.request(prompt, seed=i, max_tokens=5))
    sampler.step()
    assert sampler.running <= 2
    assert sampler.running + sampler.waiting + len(batch.done) == 5
    batch.finish()
    for i in range(5):
        check(tiny, batch, i, 1)


def test_an_install_in_mid_generation_changes_later_tokens_only(tiny: Any) -> None:
    """`continue`: the KV cache of the old version stays, later tokens are of the new one."""
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    prompt = [1, 5, 9]
    batch.add(tiny.request(prompt, seed=7, max_tokens=10, temperature=1.5))
    batch.steps(3)
    before = len(batch.sampler._rows[0].tokens)
    sampler.load(tiny.tensors(2), V2)
    batch.finish()
    generated = batch.done[0]
    total = len(generated.token_ids)
    assert generated.spans == (Span(V1, 0, before), Span(V2, before, total))
    logprobs = mixed_logprobs(tiny, batch.sequence(0), len(prompt), before)
    assert np.abs(logprobs - generated.logprobs).max() < 1e-5
    old = tiny.logprobs(1, batch.sequence(0), temperature=1.5)[len(prompt) - 1 :]
    assert np.abs(old - generated.logprobs)[before:].max() > 1e-2


def mixed_logprobs(tiny: Any, sequence: list[int], prompt: int, switched: int) -> Any:
    """By hand: tokens up to the switch cached by the old model, then one by one by the new."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    logprobs: list[float] = []
    with torch.inference_mode():
        fed = 0
        for position in range(prompt, len(sequence)):
            model = tiny.model(1 if position - prompt < switched else 2)
            ids = torch.tensor([sequence[fed:position]])
            positions = torch.arange(fed, position)[None]
            logits = model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits[0, -1]
            logprobs.append(float(torch.log_softmax(logits / 1.5, -1)[sequence[position]]))
            fed = position
    return np.asarray(logprobs)


def test_abort_starts_again_from_the_prompt_under_the_new_version(tiny: Any) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    for i, prompt in enumerate(prompts(3)):
        batch.add(tiny.request(prompt, seed=i, max_tokens=8))
    batch.steps(2)
    thrown = [row.tokens for row in sampler._rows]
    sampler.restart_running()
    assert (sampler.running, sampler.waiting) == (0, len(thrown))
    sampler.load(tiny.tensors(2), V2)
    finished = set(batch.done)
    batch.finish()
    for i in set(range(3)) - finished:
        generated = batch.done[i]
        assert {span.version for span in generated.spans} == {V2}
        assert batch.tokens[i] > len(generated.token_ids), "thrown away tokens stay counted"


def test_a_removed_request_is_gone_and_the_others_go_on(tiny: Any) -> None:
    sampler = tiny.sampler(sequences_max=3)
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    rows = [
        batch.add(tiny.request(prompt, seed=i, max_tokens=9)) for i, prompt in enumerate(prompts(5))
    ]
    batch.steps(1)
    sampler.remove(rows[0])
    sampler.remove(rows[4])
    sampler.remove(rows[4])
    batch.finish()
    assert set(batch.done) - {0} == {1, 2, 3}
    for i in (1, 2, 3):
        check(tiny, batch, i, 1)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_logprobs_are_after_temperature(tiny: Any, temperature: float) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    batch.add(tiny.request([1, 4], seed=3, max_tokens=8, temperature=temperature))
    batch.finish()
    check(tiny, batch, 0, 1, temperature=temperature)


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_1(tiny: Any) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    batch.add(tiny.request([1, 4], seed=3, temperature=0.0))
    batch.add(tiny.request([1, 4], seed=4, temperature=1.0))
    batch.finish()
    check(tiny, batch, 0, 1)
    sequence = batch.sequence(0)
    with torch.inference_mode():
        logits = tiny.model(1)(input_ids=torch.tensor([sequence])).logits[0]
    assert logits.argmax(-1)[1:-1].tolist() == sequence[2:]


def test_the_same_request_gives_the_same_tokens_in_any_company(tiny: Any) -> None:
    def alone_or_not(others: int) -> list[int]:
        sampler = tiny.sampler()
        sampler.load(tiny.tensors(1), V1)
        batch = Batch(sampler)
        batch.add(tiny.request([1, 8], seed=42, max_tokens=12))
        for i in range(others):
            batch.add(tiny.request([1, 8], seed=i, max_tokens=12))
        batch.finish()
        return [*batch.done[0].token_ids.tolist()]

    assert alone_or_not(0) == alone_or_not(5)


def test_max_tokens_ends_at_the_models_positions(tiny: Any) -> None:
    sampler = tiny.sampler(eos_ids=[])
    sampler.load(tiny.tensors(1), V1)
    batch = Batch(sampler)
    batch.add(tiny.request([1] * 60, max_tokens=1000))
    batch.finish()
    assert len(batch.done[0].token_ids) == 4
    assert batch.done[0].finish == "length"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "empty"), ([1] * 64, "64 positions"), ([1, 32], "vocabulary"), ([-1], "vocabulary")],
)
def test_a_request_that_can_never_be_served_says_why(
    tiny: Any, prompt: list[int], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        Batch(tiny.sampler()).add(tiny.request(prompt))


def test_nothing_is_sampled_before_a_version_is_loaded(tiny: Any) -> None:
    with pytest.raises(EngineError, match="no version"):
        tiny.sampler().step()


# ----------------------------------------------------------------------------- versions


def test_a_load_is_whole_and_ties_the_head(tiny: Any) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    assert sampler.version == V1
    for name, tensor in tiny.model(1).state_dict().items():
        assert torch.equal(sampler.model.state_dict()[name], tensor), name
    head, embedding = sampler.model.lm_head.weight, sampler.model.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()


def test_names_shapes_and_dtypes_must_fit_or_nothing_changes(tiny: Any) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    good = dict(tiny.tensors(2))
    name = "model.norm.weight"
    dtype, shape, content = good[name]
    wrong = {
        "missing are model.norm.weight": {k: v for k, v in good.items() if k != name},
        "unexpected are lm_head.weight": good | {"lm_head.weight": good[name]},
        "model.norm.weight is F32": good | {name: (dtype, (16, 2), content)},
        "model.norm.weight is BF16": good | {name: ("BF16", shape, content)},
    }
    for said, tensors in wrong.items():
        with pytest.raises(EngineError, match=said):
            sampler.load(tensors, V2)
        assert sampler.version == V1
    for key, tensor in tiny.model(1).state_dict().items():
        assert torch.equal(sampler.model.state_dict()[key], tensor)


def test_a_load_that_breaks_off_leaves_nothing_that_could_serve(tiny: Any) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    torn = dict(tiny.tensors(2))
    dtype, shape, content = torn["model.norm.weight"]
    torn["model.norm.weight"] = (dtype, shape, content[:-4])
    with pytest.raises(PoisonedEngineError):
        sampler.load(torn, V2)
    assert sampler.version is None
    sampler.load(tiny.tensors(2), V2)
    assert sampler.version == V2


def test_bfloat16_weights_compute_in_float32_where_that_is_asked_for(tiny: Any) -> None:
    model = tiny.fresh(98)
    sampler = Sampler(model, eos_ids=[2], sequences_max=4, weights_dtype=torch.bfloat16)
    with pytest.raises(EngineError, match="is F32"):
        sampler.load(tiny.tensors(1), V1)
    sampler.load(tiny.tensors(1, dtype=torch.bfloat16), V1)
    for name, tensor in tiny.model(1, dtype=torch.bfloat16).state_dict().items():
        assert model.state_dict()[name].dtype == torch.float32
        assert torch.equal(model.state_dict()[name], tensor.float())


def test_bfloat16_weights_are_loaded_bit_for_bit(tiny: Any) -> None:
    model = tiny.fresh(98, dtype=torch.bfloat16)
    sampler = Sampler(model, eos_ids=[2], sequences_max=4)
    sampler.load(tiny.tensors(1, dtype=torch.bfloat16), V1)
    for name, tensor in tiny.model(1, dtype=torch.bfloat16).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    batch = Batch(sampler)
    batch.add(tiny.request([1, 5]))
    batch.finish()
    assert batch.done[0].logprobs.dtype == np.float32


def test_score_gives_a_full_forwards_logprobs_with_a_given_first_token(tiny: Any) -> None:
    sampler = tiny.sampler()
    sampler.load(tiny.tensors(1), V1)
    rows = np.asarray([[1, 5, 9, 4], [1, 3, 3, 2]], np.int32)
    scored = sampler.score(rows)
    assert scored.shape == (2, 4)
    assert (scored[:, 0] == 0.0).all()
    for row, logprobs in zip(rows.tolist(), scored, strict=True):
        assert np.abs(tiny.logprobs(1, row) - logprobs[1:]).max() < 1e-5


# ----------------------------------------------------------------------------- sampling


def test_tokens_are_drawn_with_their_probabilities(tiny: Any) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2, 0.0]])).expand(20_000, 4)
    requests = [tiny.request([1], seed=seed) for seed in range(20_000)]
    tokens, logprobs = sample_tokens(logits, requests, [0] * 20_000)
    shares = np.bincount(tokens, minlength=4) / 20_000
    assert np.abs(shares - [0.5, 0.3, 0.2, 0.0]).max() < 0.015
    assert logprobs[0] == pytest.approx(np.log([0.5, 0.3, 0.2][tokens[0]]), abs=1e-6)


def test_top_p_leaves_out_the_tail_and_keeps_the_logprob(tiny: Any) -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).expand(2000, 3)
    for top_p, allowed in ((0.4, {1}), (0.6, {1, 2}), (1.0, {0, 1, 2})):
        requests = [tiny.request([1], seed=seed, top_p=top_p) for seed in range(2000)]
        tokens, logprobs = sample_tokens(logits, requests, [3] * 2000)
        assert set(tokens) == allowed
        assert logprobs[0] == pytest.approx(np.log([0.2, 0.5, 0.3][tokens[0]]), abs=1e-6)


def test_logprobs_that_are_no_numbers_are_an_engine_error(tiny: Any) -> None:
    with pytest.raises(EngineError, match="no numbers"):
        sample_tokens(torch.full((1, 4), float("nan")), [tiny.request([1])], [0])


def test_noise_depends_on_seed_and_position_alone_and_is_uniform() -> None:
    seeds = np.arange(50, dtype=np.uint64).repeat(200)
    counters = np.tile(np.arange(200, dtype=np.uint64), 50)
    noise = uniforms(seeds, counters)
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    assert len(set(noise.tolist())) == len(noise)
    assert np.abs(np.histogram(noise, 10, (0, 1))[0] / len(noise) - 0.1).max() < 0.02
    again = uniforms(seeds[::-1], counters[::-1])
    assert np.array_equal(again[::-1], noise)
