"""New weights while sequences run: token by token what its own version computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from echo2.errors import EngineError
from echo2.types import Span, Version
from echo2_workers.engine import Generated, PoisonedEngineError, StoredTensors

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
PROMPT = [1, 5, 9, 4]
EXACT = 1e-4
APART = 1e-2
"""The models differ by far more than this, whatever the tokens."""


def parts(
    models: Any, generated: Generated, prompt: Sequence[int] = PROMPT
) -> list[npt.NDArray[np.float64]]:
    """|logprob difference| of each span's tokens to the model of its version (by step)."""
    ids = [*prompt, *generated.token_ids.tolist()]
    found = []
    for span in generated.spans:
        own = models.logprobs(span.version.step, ids)[len(prompt) - 1 :]
        found.append(np.abs(own - generated.logprobs)[span.start : span.end])
    return found


def test_each_token_has_the_logprob_of_its_own_version(
    bench: Callable[..., Any], models: Any
) -> None:
    """With the cache cleared, a token's logprob is that of its version over all before it."""
    here = bench(kv_on_update="clear")
    for seed in range(4):
        here.ask(PROMPT, seed=seed, max_tokens=60)
    here.steps(15)
    here.install(models.stored(2), V2)
    here.steps(20)
    here.install(models.stored(3), V3)
    here.finish()
    for generated in here.done.values():
        assert generated.spans == (Span(V1, 0, 15), Span(V2, 15, 35), Span(V3, 35, 60))
        assert max(part.max() for part in parts(models, generated)) < EXACT


def test_a_kept_cache_is_the_old_version_s_and_nothing_else(
    bench: Callable[..., Any], models: Any
) -> None:
    """With the cache kept, the tokens after an update see keys and values of the version
    before: exactly what transformers computes when it goes on with such a cache."""
    import torch
    from transformers.cache_utils import DynamicCache

    here = bench(kv_on_update="keep")
    here.ask(PROMPT, seed=3, max_tokens=60)
    here.steps(20)
    here.install(models.stored(2), V2)
    here.finish()
    generated = here.done[0]
    assert generated.spans == (Span(V1, 0, 20), Span(V2, 20, 60))
    before, after = parts(models, generated)
    assert before.max() < EXACT
    assert after.max() > APART, "no single version computes it"

    ids = torch.tensor([[*PROMPT, *generated.token_ids.tolist()]])
    cached = len(PROMPT) + 20 - 1  # the last sampled token was not computed yet
    cache = DynamicCache()
    with torch.inference_mode():
        models.model(1)(input_ids=ids[:, :cached], past_key_values=cache, use_cache=True)
        logits = models.model(2)(
            input_ids=ids[:, cached:-1], past_key_values=cache, use_cache=True
        ).logits[0]
    expected = logits.log_softmax(-1).gather(-1, ids[0, cached + 1 :, None])[:, 0].numpy()
    assert np.abs(expected - generated.logprobs[20:]).max() < EXACT


def test_finish_lets_the_running_end_and_none_that_waits_begin(
    bench: Callable[..., Any], models: Any
) -> None:
    here = bench()
    here.ask(PROMPT, seed=1, max_tokens=30)
    here.steps(5)
    here.ask(PROMPT, seed=2, max_tokens=10)
    here.install(models.stored(2), V2, "finish")
    here.finish()
    assert here.done[0].spans == (Span(V1, 0, 30),)
    assert here.done[1].spans == (Span(V2, 0, 10),)
    assert max(parts(models, here.done[0])[0].max(), parts(models, here.done[1])[0].max()) < EXACT


def test_an_adapter_is_added_to_its_base_layer_by_layer(
    bench: Callable[..., Any], models: Any
) -> None:
    """vLLM joins q, k and v into one layer; an adapter changes q alone."""
    adapted = models.adapter(4, onto=2)
    here = bench()
    here.ask(PROMPT, seed=3, max_tokens=60)
    here.steps(20)
    here.install(adapted, V2)
    generated = here.ask(PROMPT, seed=5, max_tokens=40)
    here.finish()
    assert here.done[generated].spans == (Span(V2, 0, 40),)
    assert models.difference(4, PROMPT, here.done[generated]) < EXACT
    assert models.difference(2, PROMPT, here.done[generated]) > APART


def test_abort_starts_again_from_the_prompt(bench: Callable[..., Any], models: Any) -> None:
    here = bench()
    aborted = here.ask(PROMPT, seed=1, max_tokens=30)
    here.steps(5)
    here.install(models.stored(2), V2, "abort")
    here.finish()
    fresh = here.ask(PROMPT, seed=1, max_tokens=30)
    here.finish()
    assert here.done[aborted].spans == (Span(V2, 0, 30),)
    assert np.array_equal(here.done[aborted].token_ids, here.done[fresh].token_ids)
    assert parts(models, here.done[aborted])[0].max() < EXACT
    assert here.counts[aborted] == 35, "what was thrown away stays counted"


@pytest.mark.parametrize("kv", ["keep", "clear"])
def test_no_prompt_is_read_from_another_version_s_cache(
    bench: Callable[..., Any], models: Any, kv: str
) -> None:
    """Blocks of a shared prompt are reused within a version, never over an update; neither
    by those that come after it, nor by those that waited during it."""
    here = bench(kv_on_update=kv)
    long = [3 + i % 20 for i in range(100)]
    here.ask(long, seed=1, max_tokens=60)  # runs on over the update, so that blocks are in use
    here.ask(long, seed=2, max_tokens=5)
    here.steps(8)
    assert here.done[1].spans == (Span(V1, 0, 5),)
    assert here.core.pause("continue")
    waited = here.ask(long, seed=3, max_tokens=20)
    here.core.load(models.stored(2), V2)
    here.core.resume()
    late = here.ask(long, seed=4, max_tokens=20)
    here.finish()
    for number in (waited, late):
        assert here.done[number].spans == (Span(V2, 0, 20),)
        assert parts(models, here.done[number], long)[0].max() < EXACT


def test_without_a_salt_of_its_own_a_version_would_read_the_old_cache(
    bench: Callable[..., Any], models: Any
) -> None:
    """The fault that the test above would catch."""
    here = bench(kv_on_update="keep")
    long = [3 + i % 20 for i in range(100)]
    here.ask(long, seed=1, max_tokens=60)
    here.steps(8)
    assert here.core.pause("continue")
    salt = here.core._salt
    here.core.load(models.stored(2), V2)
    here.core._salt = salt
    here.core.resume()
    late = here.ask(long, seed=4, max_tokens=20)
    here.finish()
    assert parts(models, here.done[late], long)[0].max() > APART


def test_scoring_is_exact_and_disturbs_no_sequence(bench: Callable[..., Any], models: Any) -> None:
    rows = (np.arange(48, dtype=np.int32).reshape(4, 12) * 7) % 32
    here = bench()
    undisturbed = here.ask(PROMPT, seed=5, max_tokens=50)
    here.finish()
    disturbed = here.ask(PROMPT, seed=5, max_tokens=50)
    here.steps(10)
    assert here.core.pause("continue")
    scored = here.core.score(rows)
    again = here.core.score(rows)
    here.core.resume()
    here.finish()
    for row, ids in zip(scored, rows.tolist(), strict=True):
        assert row[0] == 0.0
        assert np.abs(row[1:] - models.logprobs(1, ids)).max() < EXACT
    assert np.array_equal(scored, again)
    assert np.array_equal(here.done[disturbed].token_ids, here.done[undisturbed].token_ids)
    assert parts(models, here.done[disturbed])[0].max() < EXACT


def test_scoring_finds_room_when_the_cache_is_full(bench: Callable[..., Any], models: Any) -> None:
    """Running sequences give their cache up, and compute it again when they go on."""
    here = bench()
    for seed in range(32):
        here.ask(PROMPT, seed=seed, max_tokens=60)
    here.steps(35)
    assert here.core._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < 2
    assert here.core.pause("continue")
    rows = np.asarray([[3 + i % 20 for i in range(40)]] * 2, np.int32)  # two blocks each
    scored = here.core.score(rows)
    here.core.resume()
    here.finish()
    assert np.abs(scored[1, 1:] - models.logprobs(1, rows[1].tolist())).max() < EXACT
    for generated in here.done.values():
        assert generated.spans == (Span(V1, 0, 60),)
        assert parts(models, generated)[0].max() < EXACT


def test_a_version_that_does_not_fit_changes_nothing(
    bench: Callable[..., Any], models: Any
) -> None:
    good = models.stored(2)
    name = "model.layers.0.mlp.up_proj.weight"
    dtype, shape, content = good[name]

    def changed(**tensors: Any) -> StoredTensors:
        every = {**good, **tensors}
        return StoredTensors(
            {key: value for key, value in every.items() if value is not None},
            folder=good.folder,
            digest=good.digest,
        )

    here = bench()
    here.ask(PROMPT, seed=1)
    here.steps(4)
    assert here.core.pause("continue")
    for wrong, told in (
        (changed(**{name: None}), "missing"),
        (changed(extra=(dtype, shape, content)), "unexpected"),
        (changed(**{name: ("BF16", shape, content)}), "BF16"),
        (changed(**{name: (dtype, shape[::-1], content)}), "the model has"),
    ):
        with pytest.raises(EngineError, match=told) as refused:
            here.core.load(wrong, V2)
        assert not isinstance(refused.value, PoisonedEngineError)
    here.core.resume()
    here.finish()
    assert here.done[0].spans == (Span(V1, 0, 40),)
    assert parts(models, here.done[0])[0].max() < EXACT


def test_bfloat16_weights_compute_in_float32_where_that_is_asked_for(
    bench: Callable[..., Any], models: Any
) -> None:
    import torch

    from echo2_workers.engines.vllm_tensors import expected_tensors

    here = bench()
    here.core._expected = expected_tensors(models.assets, torch.bfloat16)
    with pytest.raises(EngineError, match="is F32"):
        here.install(models.stored(2), V2)
    here.install(models.rounded(7), V2)
    here.ask(PROMPT, seed=1)
    here.finish()
    (generated,) = here.done.values()
    assert generated.spans == (Span(V2, 0, 40),)
    assert models.difference(7, PROMPT, generated) < EXACT


def test_after_a_load_that_broke_off_a_whole_one_mends_all(
    bench: Callable[..., Any], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echo2_workers.engines import vllm_worker

    whole = vllm_worker.views

    def torn(tensors: Any) -> Any:
        for position, pair in enumerate(whole(tensors)):
            if position == 4:  # within a layer whose q, k and v lie in one weight
                raise OSError("the disk went away")
            yield pair

    here = bench()
    assert here.core.pause("continue")
    monkeypatch.setattr(vllm_worker, "views", torn)
    with pytest.raises(PoisonedEngineError, match="the disk went away"):
        here.core.load(models.stored(2), V2)
    assert here.core.version is None
    monkeypatch.undo()
    here.core.load(models.stored(2), V2)
    here.core.resume()
    here.ask(PROMPT)
    here.finish()
    assert parts(models, here.done[0])[0].max() < EXACT
