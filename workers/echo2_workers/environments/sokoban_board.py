"""The rules of Sokoban on a board of characters, as reasoning-gym writes it.

    + wall   - floor   X goal   @ box   $ box on a goal   * player   % player on a goal

A move into a wall, or against a box that cannot move, changes nothing.
"""

from __future__ import annotations

from typing import Final

STEPS: Final = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
CHARACTERS: Final = "+-X@$*%"


class Board:
    """`rows`: text lines of equal length with one player, closed by walls. Raises ValueError."""

    def __init__(self, rows: str) -> None:
        self._cells = [list(row) for row in rows.split("\n")]
        places = [
            (r, c) for r, row in enumerate(self._cells) for c, x in enumerate(row) if x in "*%"
        ]
        sides = [character for row in self._cells for character in (*row[:1], *row[-1:])]
        edge = {*self._cells[0], *self._cells[-1], *sides}
        if (
            len({len(row) for row in self._cells}) != 1
            or not set(rows) <= {*CHARACTERS, "\n"}
            or len(places) != 1
            or edge != {"+"}
        ):
            raise ValueError(
                f"no board: {rows!r}; it is rows of equal length of {CHARACTERS}, with + all "
                "around and one player (* or %)"
            )
        self._player = places[0]

    def __str__(self) -> str:
        return "\n".join("".join(row) for row in self._cells)

    @property
    def num_boxes(self) -> int:
        return sum(row.count("@") + row.count("$") for row in self._cells)

    @property
    def num_on_goals(self) -> int:
        return sum(row.count("$") for row in self._cells)

    @property
    def is_solved(self) -> bool:
        return self.num_on_goals == self.num_boxes

    def move(self, letter: str) -> bool:
        """One step U, D, L or R, with a push; False when nothing moved."""
        down, right = STEPS[letter]
        row, column = self._player
        target, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
        ahead = self._at(target)
        if ahead == "+":
            return False
        if ahead in "@$":
            if self._at(behind) not in "-X":
                return False
            self._put(behind, "@", "$")
            self._set(target, "-" if ahead == "@" else "X")
        self._set(self._player, "-" if self._at(self._player) == "*" else "X")
        self._put(target, "*", "%")
        self._player = target
        return True

    def _at(self, place: tuple[int, int]) -> str:
        return self._cells[place[0]][place[1]]

    def _set(self, place: tuple[int, int], character: str) -> None:
        self._cells[place[0]][place[1]] = character

    def _put(self, place: tuple[int, int], on_floor: str, on_goal: str) -> None:
        self._set(place, on_goal if self._at(place) == "X" else on_floor)
