"""Live join tokens as the keys that open the enrolment socket, and no other.

Looked at in each handshake and for each message: a token that expires, is used up or is revoked
meanwhile opens nothing any more. What tokens there are says `net.token_book`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from echo2.net.keys import FolderWatch
from echo2.net.token_book import TokenBook, TokenRecord


class TokenKeys:
    """Live tokens as keys of the enrolment socket (a `KeyList`).

    Each connection has a name of its own, "ID.N": machines that share a token are told apart.
    """

    def __init__(self, book: TokenBook, *, clock: Callable[[], float] = time.time) -> None:
        self.generation = 0
        self._book = book
        self._clock = clock
        self._watch = FolderWatch(book.folder)
        self._by_key: dict[str, TokenRecord] = {}
        self._by_id: dict[str, TokenRecord] = {}
        self._num_named = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the folder if it changed. Costs one stat otherwise."""
        if not self._watch.changed():
            return
        records = self._book.records()
        by_key = {record.public_key: record for record in records}
        if by_key != self._by_key:
            self._by_key = by_key
            self._by_id = {record.id: record for record in records}
            self.generation += 1

    def name_of(self, public_key: str) -> str | None:
        self.refresh()
        record = self._by_key.get(public_key)
        if record is None or record.refusal(self._clock()):
            return None
        self._num_named += 1
        return f"{record.id}.{self._num_named}"

    def refusal(self, public_key: str) -> str:
        record = self._by_key.get(public_key)
        return "token_unknown" if record is None else record.refusal(self._clock())

    def holds(self, name: str, public_key: str) -> bool:
        record = self._by_id.get(id_of_connection(name))
        return (
            record is not None
            and record.public_key == public_key
            and not record.refusal(self._clock())
        )

    def names(self) -> tuple[str, ...]:
        """The ids of all tokens that are there."""
        return tuple(sorted(self._by_id))


def id_of_connection(name: str) -> str:
    """The token of a connection that `TokenKeys` named."""
    return name.partition(".")[0]
