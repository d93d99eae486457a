"""Hostile messages: valid ones with a few things changed, and some that were never valid.

Begins from a pool of valid messages of every class. What changes is bytes of the header, values
and shape of its fields, the number, sizes and order of the frames, and who sends it where. Every
draw comes from the `random.Random` that it is given, so a seed repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from echo2 import wire
from echo2.errors import RemoteProtocolError
from echo2.messages import MESSAGES, Lane, Role

from .decoder_target import Route
from .samples import a_message

PER_CLASS: Final = 8
SPLICED_MAX: Final = 64
BIG_BYTES: Final = 5 << 20
"""More than any header may have."""
WILD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 127, 128, 255, 2**31, 2**32, 2**53, 2**53 + 1),
    *(2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "0", "\x00", "a" * 300, "\U0001f600" * 40, "../../x", "tcp://*:1", "NaN", "1e999"),
    *(b"", b"\x00", b"\xff" * 40, [], [[]], {}, {"": None}, {"a": {"b": {"c": []}}}),
    *([0] * 300, ["x"] * 300, {str(n): n for n in range(300)}),
)
BAD_BYTES: Final = (
    *(b"", b"\xc1", b"\xc0", b"\x90", b"\x92", b"\x92\xa0\x80", b"\x92\xc4\x00\x80"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc9\xff\xff\xff\xff\x01", b"\xd4\x01\x00", b"\xd6\xff\x00\x00\x00\x00"),
    *(b"\x91" * 2000, b"\x81\xa1a" * 2000, b"\x92\xa9Heartbeat\xdf\x00\x01\x00\x00"),
    *(b"\x92\xa9Heartbeat\x81\x90\x00", b"\x92\xa9Heartbeat\x81\xc0\x00"),
)


class Mutator:
    """Draws messages as frames, each with the route that it pretends to take. `lane` and
    `sender` narrow what it begins from; the mutated ones come on that lane all the same."""

    def __init__(
        self, rng: random.Random, *, lane: Lane | None = None, sender: Role | None = None
    ) -> None:
        self.rng = rng
        self._pool: list[tuple[str, list[bytes], Route]] = []
        for name in sorted(MESSAGES):
            cls = MESSAGES[name]
            if lane not in (None, cls.LANE) or (sender is not None and sender not in cls.SENDERS):
                continue
            route = (cls.LANE, sender or min(cls.SENDERS), min(cls.RECEIVERS))
            self._pool += [
                (name, wire.encode(a_message(rng, cls)), route) for _ in range(PER_CLASS)
            ]
        self._changes: tuple[Callable[[list[bytes]], list[bytes]], ...] = (
            *(self._flip, self._flip, self._insert, self._cut, self._splice),
            *(self._value, self._value, self._value, self._missing, self._more, self._name),
            *(self._frame_dropped, self._frame_added, self._frame_resized, self._frames_swapped),
            self._bad_header,
        )

    def valid(self) -> tuple[list[bytes], Route]:
        """One of the pool."""
        _, frames, route = self.rng.choice(self._pool)
        return list(frames), route

    def mutated(self) -> tuple[list[bytes], Route]:
        """Of the pool, with one to four changes; rarely the route is another one too."""
        frames, route = self.valid()
        rng = self.rng
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
            frames = rng.choice(self._changes)(frames)
        if rng.random() < 0.05:
            route = (rng.choice(list(Lane)), rng.choice(list(Role)), rng.choice(list(Role)))
        return frames, route

    def mutate(self, frames: list[bytes]) -> list[bytes]:
        """One change to any frames."""
        return self.rng.choice(self._changes)(list(frames))

    def noise(self) -> list[bytes]:
        """Random bytes in a few frames."""
        rng = self.rng
        return [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 6))]

    # ------------------------------------------------------------------- bytes of the header

    def _flip(self, frames: list[bytes]) -> list[bytes]:
        header = bytearray(frames[0] if frames else b"")
        for _ in range(self.rng.randint(1, 3)):
            if header:
                place = self.rng.randrange(len(header))
                header[place] = self.rng.choice((0, 0xFF, 0xC1, self.rng.getrandbits(8)))
        return [bytes(header), *frames[1:]]

    def _insert(self, frames: list[bytes]) -> list[bytes]:
        header = frames[0] if frames else b""
        place = self.rng.randint(0, len(header))
        more = self.rng.randbytes(self.rng.randint(1, 8))
        return [header[:place] + more + header[place:], *frames[1:]]

    def _cut(self, frames: list[bytes]) -> list[bytes]:
        header = frames[0] if frames else b""
        start = self.rng.randint(0, len(header))
        end = self.rng.choice((len(header), min(len(header), start + self.rng.randint(1, 8))))
        return [header[:start] + header[end:], *frames[1:]]

    def _splice(self, frames: list[bytes]) -> list[bytes]:
        """A piece of another message's header."""
        header = frames[0] if frames else b""
        other = self.rng.choice(self._pool)[1][0]
        start = self.rng.randrange(len(other))
        piece = other[start : start + self.rng.randint(1, SPLICED_MAX)]
        place = self.rng.randint(0, len(header))
        return [header[:place] + piece + header[place + len(piece) :], *frames[1:]]

    def _bad_header(self, frames: list[bytes]) -> list[bytes]:
        return [self.rng.choice(BAD_BYTES), *frames[1:]]

    # ------------------------------------------------------------------ values of the header

    def _value(self, frames: list[bytes]) -> list[bytes]:
        return self._with_fields(frames, self._set_somewhere)

    def _missing(self, frames: list[bytes]) -> list[bytes]:
        def drop(fields: dict[str, Any]) -> None:
            if fields:
                del fields[self.rng.choice(list(fields))]

        return self._with_fields(frames, drop)

    def _more(self, frames: list[bytes]) -> list[bytes]:
        def add(fields: dict[str, Any]) -> None:
            key = self.rng.choice(("more", "payload", "token_ids", "__class__", "", "a" * 500))
            fields[key] = self.rng.choice(WILD)

        return self._with_fields(frames, add)

    def _name(self, frames: list[bytes]) -> list[bytes]:
        name = self.rng.choice((*MESSAGES, "Message", "__init__", "", "x" * 400))
        return self._with_fields(frames, lambda fields: None, name=name)

    def _set_somewhere(self, fields: dict[str, Any]) -> None:
        """A wild value in place of a field, or deep inside of one."""
        container: Any = fields
        while container:
            keys = list(container) if isinstance(container, dict) else range(len(container))
            key = self.rng.choice(keys)
            inner = container[key]
            if isinstance(inner, dict | list) and inner and self.rng.random() < 0.7:
                container = inner
                continue
            container[key] = self.rng.choice(WILD)
            if isinstance(container, list) and self.rng.random() < 0.1:
                container *= self.rng.choice((2, 300))
            return

    def _with_fields(
        self,
        frames: list[bytes],
        change: Callable[[dict[str, Any]], None],
        *,
        name: str | None = None,
    ) -> list[bytes]:
        """The frames with other fields; bytes are flipped where the header holds none."""
        try:
            found = wire.unpack(frames[0], max_bytes=BIG_BYTES)
        except (RemoteProtocolError, IndexError):
            return self._flip(frames)
        if not (isinstance(found, list) and len(found) == 2 and isinstance(found[1], dict)):
            return self._flip(frames)
        change(found[1])
        return [wire.pack([found[0] if name is None else name, found[1]]), *frames[1:]]

    # ------------------------------------------------------------------------------- frames

    def _frame_dropped(self, frames: list[bytes]) -> list[bytes]:
        if not frames:
            return frames
        place = self.rng.randrange(len(frames))
        return frames[:place] + frames[place + 1 :]

    def _frame_added(self, frames: list[bytes]) -> list[bytes]:
        place = self.rng.randint(0, len(frames))
        more = self.rng.choice((b"", self.rng.randbytes(16), frames[-1] if frames else b"x"))
        return [*frames[:place], *[more] * self.rng.choice((1, 1, 1, 7)), *frames[place:]]

    def _frame_resized(self, frames: list[bytes]) -> list[bytes]:
        if len(frames) < 2:
            return self._frame_added(frames)
        place = self.rng.randrange(1, len(frames))
        frame = frames[place]
        changed = self.rng.choice((frame[:-1], frame + b"\0", b"", frame * 2))
        return [*frames[:place], changed, *frames[place + 1 :]]

    def _frames_swapped(self, frames: list[bytes]) -> list[bytes]:
        return self.rng.sample(frames, len(frames))
