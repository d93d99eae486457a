"""The character tokenizer of the built-in environments and models: 32 ids, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PAD: Final = 0
BOS: Final = 1
EOS: Final = 2
CHARACTERS: Final = "0123456789+-*=() \n"
FIRST_CHARACTER: Final = 3
VOCAB_SIZE: Final = 32
"""Ids from 21 on are unused; the size is a round one for the model."""

_IDS: Final = {character: FIRST_CHARACTER + i for i, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """Ids of the characters, without <bos> and <eos>. Raises ValueError for any other."""
    try:
        return [_IDS[character] for character in text]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} has no token; known are {CHARACTERS!r}") from None


def decode(token_ids: Iterable[int]) -> str:
    """Text of the ids; <pad>, <bos> and <eos> vanish, an unused id becomes U+FFFD."""
    characters = []
    for token_id in token_ids:
        index = token_id - FIRST_CHARACTER
        if 0 <= index < len(CHARACTERS):
            characters.append(CHARACTERS[index])
        elif index >= len(CHARACTERS):
            characters.append("\ufffd")
    return "".join(characters)
