"""First code of a child: `python -m echo2.net.child MODULE ARGS...`.

Ties the process to its parent's life before the module, whose imports may take seconds, is
run as `__main__`. Imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

PIPE_VARIABLE: Final = "ECHO2_PIPE"
"""Environment variable that names the child's descriptor of the pipe."""
PARENT_VARIABLE: Final = "ECHO2_PARENT"
"""Environment variable with the parent's process id."""

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends (Linux; elsewhere the end of the
    pipe has to do)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        sys.exit(f"the parent, process {parent}, ended before its child began")


def main() -> None:
    os.set_inheritable(int(os.environ[PIPE_VARIABLE]), False)  # its own children would keep it open
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    module = sys.argv[1]
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
