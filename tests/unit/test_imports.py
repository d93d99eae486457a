"""What may import what: the base is light, the core is pure, --help is quick."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import echo2

PACKAGE = Path(echo2.__file__).parent
HEAVY = {"torch", "transformers", "vllm", "safetensors"}
SLOW_FOR_HELP = HEAVY | {"zmq", "aiohttp", "pydantic", "numpy", "prometheus_client", "uvloop"}
NOT_IN_CORE = HEAVY | {
    "aiohttp", "asyncio", "concurrent", "datetime", "fcntl", "http", "io", "logging",
    "multiprocessing", "mmap", "msgpack", "msgspec", "numpy", "os", "pathlib", "pickle",
    "prometheus_client", "queue", "random", "rich", "secrets", "select", "selectors", "shutil",
    "signal", "socket", "sqlite3", "ssl", "structlog", "subprocess", "sys", "tempfile",
    "threading", "time", "typer", "urllib", "uuid", "uvloop", "zmq",
}  # fmt: skip
CORE_MAY_USE_OF_ECHO2 = {"core", "errors", "messages", "types"}


def modules_after(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that ran `code`."""
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name.partition(".")[0] for name in json.loads(ran.stdout.splitlines()[-1])}


def imports_of(path: Path) -> Iterator[str]:
    """Every absolute module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module or ""


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_importing_echo2_loads_no_heavy_library() -> None:
    assert not modules_after("import echo2") & HEAVY


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys\nfrom echo2.cli import main\nsys.argv = ['echo2', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert not modules_after(code) & SLOW_FOR_HELP


def test_a_configuration_is_read_without_sockets_or_tensors() -> None:
    loaded = modules_after(
        "from echo2.config import Config, config_to_toml\nconfig_to_toml(Config())"
    )
    assert not loaded & (HEAVY | {"zmq", "aiohttp", "numpy"})


@pytest.mark.parametrize("path", files_of(PACKAGE), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_base_package_never_imports_a_heavy_library(path: Path) -> None:
    heavy = {name for name in imports_of(path) if name.partition(".")[0] in HEAVY}
    assert not heavy, f"{path} imports {heavy}; that belongs to echo2_workers or echo2_learner"


@pytest.mark.parametrize(
    "path", files_of(PACKAGE / "core"), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_the_core_neither_waits_nor_sends_nor_logs_nor_tells_time(path: Path) -> None:
    names = set(imports_of(path))
    impure = {name for name in names if name.partition(".")[0] in NOT_IN_CORE}
    assert not impure, f"{path} imports {impure}; the core gets such things as arguments"
    ours = {name.split(".")[1] for name in names if name.startswith("echo2.")}
    assert ours <= CORE_MAY_USE_OF_ECHO2, f"{path} imports {ours - CORE_MAY_USE_OF_ECHO2} of echo2"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    waits = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Await | ast.AsyncFunctionDef)]
    assert not waits, f"{path} waits at lines {waits}"


@pytest.mark.parametrize("name", ["eval", "exec", "open", "print", "input", "__import__"])
def test_the_core_calls_no_builtin_that_does_io(name: str) -> None:
    for path in files_of(PACKAGE / "core"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == name
        ]
        assert not called, f"{path} calls {name}() at lines {called}"
