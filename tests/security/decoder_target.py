"""What must hold of the decoder, whatever it is given.

The result is a message, or a RemoteProtocolError with one of the documented reasons; a message
that was taken encodes again, and what that decodes to is the same message.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2 import wire
from echo2.errors import RemoteProtocolError
from echo2.messages import MESSAGES, Lane, Message, Role

REASONS = frozenset(
    {
        *("frames", "oversized", "malformed", "unknown_message", "wrong_lane", "wrong_sender"),
        "wrong_receiver",
    }
)
ERROR_MAX_CHARACTERS = 1000

Route = tuple[Lane, Role, Role]
"""(lane, sender, receiver)."""


def decodes_or_is_refused(frames: Sequence[bytes], route: Route) -> Message | str:
    """The message, or the reason. AssertionError when a promise is broken; any other exception
    of the decoder comes through as it is."""
    lane, sender, receiver = route
    try:
        message = wire.decode(frames, lane=lane, sender=sender, receiver=receiver)
    except RemoteProtocolError as error:
        _check_refusal(error)
        return error.reason
    cls = type(message)
    assert MESSAGES.get(cls.__name__) is cls, f"{cls} came out"
    assert cls.LANE is lane, f"{cls} came on {lane}"
    again = wire.decode(wire.encode(message), lane=lane, sender=sender, receiver=receiver)
    assert again == message, f"{cls.__name__} changes when it is sent on"
    return message


def _check_refusal(error: RemoteProtocolError) -> None:
    text = str(error)
    assert error.remote
    assert error.reason in REASONS, f"reason {error.reason!r} is not documented"
    assert text.isprintable(), "foreign text goes into logs"
    assert len(text) < ERROR_MAX_CHARACTERS
