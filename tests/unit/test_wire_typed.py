"""A reader of headers is made only where msgspec checks all that pydantic checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from pydantic import Field

from echo2.wire_typed import reader_of


@dataclass
class Small:
    count: Annotated[int, Field(ge=0, le=9), Meta(ge=0, le=9)]
    blob: bytes = b""


@dataclass
class OneBoundMissing:
    count: Annotated[int, Field(ge=0, le=9), Meta(ge=0)]


@dataclass
class OtherBound:
    parts: Annotated[tuple[Small, ...], Field(max_length=3), Meta(max_length=4)]


@dataclass
class BoundWithin:
    parts: tuple[OneBoundMissing, ...]


@dataclass
class NaNAllowed:
    rate: Annotated[float, Field(ge=0, allow_inf_nan=False), Meta(ge=0)]


@dataclass
class Pattern:
    name: Annotated[str, Field(pattern="^a$"), Meta(pattern="^a$")]


@dataclass
class Mapping:
    counts: dict[str, int]


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (OneBoundMissing, "OneBoundMissing.count is bounded by"),
        (OtherBound, "OtherBound.parts is bounded by"),
        (BoundWithin, r"BoundWithin.parts\[\].count is bounded by"),
        (NaNAllowed, "NaNAllowed.rate is a float without both bounds"),
        (Pattern, "Pattern.name has .*, which msgspec does not check"),
        (Mapping, "Mapping.counts is dict"),
    ],
)
def test_a_field_that_msgspec_would_not_check_alike_is_not_read(cls: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        reader_of(cls, without=frozenset())


def test_the_fields_come_out_of_a_header_of_the_right_name_only() -> None:
    read = reader_of(Small, without=frozenset({"blob"}))
    assert read(msgspec.msgpack.encode(["Small", {"count": 3}])) == {"count": 3}
    assert read(msgspec.msgpack.encode(["Other", {"count": 3}])) is None
    assert read(msgspec.msgpack.encode(["Small", {"count": 10}])) is None
    assert read(msgspec.msgpack.encode(["Small", {"count": 3, "blob": b""}])) is None
