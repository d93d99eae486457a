"""Thousands of hostile messages through the decoder: refused by a documented reason, or valid.

The millions are `benchmarks/fuzz_decoder.py`; hypothesis draws others in
`tests/property/test_wire_fuzz.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from echo2 import wire
from echo2.messages import MESSAGES, Message

from .decoder_target import REASONS, decodes_or_is_refused
from .mutator import Mutator
from .samples import a_message, hints_of

NUM_MESSAGES = 5000


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_sample_is_taken_as_it_is(name: str) -> None:
    """Else a fuzzer that begins from them would only try what is refused."""
    rng = random.Random(1)
    cls = MESSAGES[name]
    route = (cls.LANE, min(cls.SENDERS), min(cls.RECEIVERS))
    for _ in range(20):
        message = a_message(rng, cls)
        assert decodes_or_is_refused(wire.encode(message), route) == message
    assert set(hints_of(cls)) == {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_are_refused_by_reason_or_taken_as_they_are(seed: int) -> None:
    mutator = Mutator(random.Random(seed))
    found: Counter[str] = Counter()
    for _ in range(NUM_MESSAGES):
        frames, route = mutator.mutated()
        result = decodes_or_is_refused(frames, route)
        found["taken" if isinstance(result, Message) else result] += 1
    assert found["taken"] > NUM_MESSAGES // 50, "what is taken is tried too"
    assert found["malformed"] > NUM_MESSAGES // 10
    assert {*REASONS, "taken"} - {*found} <= {"oversized"}, "every way out was tried"


def test_noise_is_refused() -> None:
    mutator = Mutator(random.Random(3))
    for _ in range(NUM_MESSAGES):
        _, route = mutator.valid()
        assert isinstance(decodes_or_is_refused(mutator.noise(), route), str)


def test_a_seed_repeats_its_messages() -> None:
    first, second = (Mutator(random.Random(5)) for _ in range(2))
    for _ in range(100):
        assert first.mutated() == second.mutated()
