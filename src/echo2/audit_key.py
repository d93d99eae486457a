"""RUN/audit.key: the secret with which a run's coordinators choose the groups that are audited.

Whoever has it knows which groups are looked at, so only its owner may read it. It stays the same
over restarts: a group that is chosen stays chosen.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from echo2.errors import ConfigError
from echo2.folder_errors import folder_errors
from echo2.weights.files import write_whole

FILE: Final = "audit.key"
BYTES: Final = 32


def load_or_create_audit_key(run_dir: Path) -> bytes:
    """The key in the file, made on first use. ConfigError when others can read it, or when it
    holds none."""
    path = run_dir / FILE
    with folder_errors(run_dir):
        if not path.exists():
            write_whole(path, secrets.token_hex(BYTES).encode(), mode=0o600)
        with path.open(encoding="ascii", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024).strip()
    if mode & 0o077:
        raise ConfigError(
            f"{path} can be read by others (mode {mode & 0o777:04o}): they would know which groups "
            f"are audited; run: chmod 600 {path}"
        )
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != BYTES:
        raise ConfigError(
            f"{path} holds no key ({2 * BYTES} hexadecimal digits); remove it: a new one is made, "
            "and other groups are audited from then on"
        )
    return key
