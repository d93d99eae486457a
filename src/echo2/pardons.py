"""RUN/pardons/NAME: the operator's word that a quarantined worker may come back.

Written by `echo2 keys pardon`, whether or not the coordinator runs; taken by the coordinator,
which removes it when it has been told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from echo2.folder_errors import folder_errors
from echo2.net.keys import NAME_PATTERN
from echo2.types import PeerId

FOLDER: Final = "pardons"
PARDONS_MAX: Final = 10_000


def write_pardon(run_dir: Path, name: str) -> None:
    """ConfigError when the folder does not take it."""
    with folder_errors(run_dir):
        (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
        (run_dir / FOLDER / name).touch()


def read_pardons(run_dir: Path) -> list[PeerId]:
    """Who is pardoned, in order of names; files of other names are let be."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir())[:PARDONS_MAX]
    return [PeerId(name) for name in names if NAME_PATTERN.fullmatch(name)]


def remove_pardon(run_dir: Path, name: PeerId) -> None:
    (run_dir / FOLDER / name).unlink(missing_ok=True)
