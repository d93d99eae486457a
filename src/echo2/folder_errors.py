"""A folder that cannot be made or written to is a mistake of the settings, told in one sentence."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from echo2.errors import ConfigError

_MENDS: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable for this user"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "move the file away that lies in its place"),
}


@contextlib.contextmanager
def folder_errors(folder: Path, *, setting: str = "--run-dir") -> Iterator[None]:
    """Turn an OSError into a ConfigError that names `folder`, the cause and what mends it.
    `setting` names the folder."""
    try:
        yield
    except OSError as error:
        mend = _MENDS.get(error.errno or 0, "mend that")
        raise ConfigError(
            f"{folder} cannot be used ({error.strerror or error}): {mend}, or give another "
            f"{setting}"
        ) from error
