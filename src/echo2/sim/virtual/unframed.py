"""Messages as their receiver's core has them, made without the checks of the wire and without the
bytes of tokens.

The core reads the headers of a group and hands its frames on unread; a simulated group has none, so
that a fleet's buffer fits in memory. Nothing simulated is ever sent or stored as bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from echo2.messages import Message

M = TypeVar("M", bound=Message)


def unframed(cls: type[M], **fields: Any) -> M:
    """A message with these fields; the names must be all of the class's own."""
    made = object.__new__(cls)
    made.__dict__.update(fields)
    return made
