"""The key that chooses groups, and the operator's pardons, as files of the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.audit_key import BYTES, FILE, load_or_create_audit_key
from echo2.errors import ConfigError
from echo2.pardons import FOLDER, read_pardons, remove_pardon, write_pardon
from echo2.types import PeerId


def test_the_key_is_made_once_and_stays(tmp_path: Path) -> None:
    key = load_or_create_audit_key(tmp_path)
    assert len(key) == BYTES
    assert load_or_create_audit_key(tmp_path) == key
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").mkdir()
    assert load_or_create_audit_key(tmp_path / "other") != key


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_or_create_audit_key(tmp_path)
    (tmp_path / FILE).chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 0644.*chmod 600"):
        load_or_create_audit_key(tmp_path)


@pytest.mark.parametrize("content", ["", "zz", "abcd", "é" * 64, "00" * 31])
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / FILE
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        load_or_create_audit_key(tmp_path)


def test_pardons_are_read_until_they_are_removed(tmp_path: Path) -> None:
    assert read_pardons(tmp_path) == []
    write_pardon(tmp_path, "w-2")
    write_pardon(tmp_path, "w-1")
    write_pardon(tmp_path, "w-1")
    (tmp_path / FOLDER / ".aside").touch()
    assert read_pardons(tmp_path) == ["w-1", "w-2"]
    remove_pardon(tmp_path, PeerId("w-1"))
    remove_pardon(tmp_path, PeerId("w-1"))
    assert read_pardons(tmp_path) == ["w-2"]
