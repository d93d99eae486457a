"""Files that are either whole or not there, and disk errors that say what to do.

A file is written aside under a name that carries the writer's process id, flushed to the
disk and renamed, so that a reader never sees half of it and a killed writer leaves only a
file that the next `remove_stale` takes away.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from echo2.errors import WeightsError

BIN: Final = ".bin"
MANIFEST: Final = ".manifest"
PARTIAL: Final = ".partial"
BITMAP: Final = ".have"
SUFFIXES: Final = (BIN, MANIFEST, PARTIAL, BITMAP)

_ASIDE: Final = re.compile(r"^\.aside-(\d+)-\d+$")
_DIGEST: Final = re.compile(r"^[0-9a-f]{64}$")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_serial = itertools.count()


@contextlib.contextmanager
def disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn an OSError into a WeightsError that says what was done and what would help."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise WeightsError(
                f"{what}: the disk of {folder} is full ({error.strerror}); free space there or "
                "choose another folder; what was there before is unchanged"
            ) from error
        raise WeightsError(f"{what} in {folder} failed: {error}") from error


@contextlib.contextmanager
def aside(folder: Path, *, mode: int = 0o666) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in `folder`, flushed to the disk at the end for the caller to rename.

    If it was not renamed when the context ends, it is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".aside-{os.getpid()}-{next(_serial)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb", buffering=1 << 20) as file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a small file so that it is whole or not there; it survives a power cut. It has
    `mode`, less the umask, from its first byte on."""
    with aside(path.parent, mode=mode) as (written, file):
        file.write(content)
        flush(file)
        os.replace(written, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in it durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder that is there after a power cut, with those above it, whoever made them."""
    folder.mkdir(parents=True, exist_ok=True)
    device = folder.stat().st_dev
    for above in folder.resolve().parents:
        if above.stat().st_dev != device:
            return
        try:
            sync_folder(above)
        except PermissionError:  # of somebody else, so not made just now
            return


def version_files(folder: Path) -> dict[str, set[str]]:
    """manifest_digest -> suffixes of its files; files of other names are not ours."""
    found: dict[str, set[str]] = {}
    if not folder.is_dir():
        return found
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, dot, suffix = entry.name.partition(".")
            if _DIGEST.match(stem) and dot + suffix in SUFFIXES:
                found.setdefault(stem, set()).add(dot + suffix)
    return found


def remove_version(folder: Path, manifest_digest: str) -> None:
    """Remove a version's files; half removed, it no longer counts as a version.

    Whoever has it mapped keeps his bytes; the disk space is free when he lets go.
    """
    for suffix in (MANIFEST, BITMAP, PARTIAL, BIN):
        (folder / (manifest_digest + suffix)).unlink(missing_ok=True)


def remove_stale(folder: Path) -> None:
    """Remove what writers that no longer live were writing aside."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _ASIDE.match(entry.name)
            if match and not _lives(int(match[1])):
                Path(entry.path).unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
