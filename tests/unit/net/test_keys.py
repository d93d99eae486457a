from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import ConfigError
from echo2.net import keys as keys_module
from echo2.net.keys import AllowList, KeyPair, check_public_key, load_or_create_key


def an_allow_list(tmp_path: Path) -> AllowList:
    return AllowList(tmp_path / "authorized")


def a_key() -> str:
    return KeyPair.generate().public


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ------------------------------------------------------------------------ secret keys


def test_a_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "keys" / "w-1.key"
    made = load_or_create_key(path)
    assert load_or_create_key(path) == made
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == mode_of(path.parent.parent) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["w-1.key"]
    assert load_or_create_key(path.with_name("w-2.key")) != made


def test_the_secret_is_not_shown(tmp_path: Path) -> None:
    pair = load_or_create_key(tmp_path / "w.key")
    assert pair.secret not in repr(pair)
    assert pair.public in repr(pair)
    assert pair.public not in (tmp_path / "w.key").read_text()
    assert KeyPair.from_secret(pair.secret) == pair


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "w.key"
    load_or_create_key(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        load_or_create_key(path)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "too short\n", "é", "x" * 41])
def test_a_file_without_a_key_is_refused_and_not_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.key"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}"):
        load_or_create_key(path)
    assert path.read_text() == text


def test_of_two_that_make_the_key_at_once_both_get_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.key"
    first: list[KeyPair] = []
    link = os.link

    def other_is_first(source: Path, target: Path) -> None:
        if not first:
            first.append(KeyPair.generate())
            keys_module._create_key(target, first[0])
        link(source, target)

    monkeypatch.setattr(os, "link", other_is_first)
    assert load_or_create_key(path) == first[0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("key", ["", "x" * 39, "x" * 41, "x" * 39 + "\n", "'" * 40, "é" * 40])
def test_what_is_no_key_is_named_by_its_owner(key: str) -> None:
    with pytest.raises(ConfigError, match="public key of w-1"):
        check_public_key(key, owner="w-1")


# ------------------------------------------------------------------------ allow-list


def test_an_authorized_key_has_its_name_until_it_is_revoked(tmp_path: Path) -> None:
    allow_list, key = an_allow_list(tmp_path), a_key()
    assert mode_of(allow_list.folder) == 0o700
    assert allow_list.name_of(key) is None
    allow_list.authorize("w-1", key)
    assert allow_list.name_of(key) == "w-1"
    assert allow_list.holds("w-1", key)
    assert (allow_list.key_of("w-1"), allow_list.key_of("w-2")) == (key, None)
    assert allow_list.names() == ("w-1",)
    assert (allow_list.folder / "w-1.pub").read_text() == f"{key}\n"
    assert allow_list.revoke("w-1")
    assert allow_list.name_of(key) is None
    assert not allow_list.holds("w-1", key)
    assert not allow_list.revoke("w-1")


def test_a_change_by_another_process_is_seen(tmp_path: Path) -> None:
    """Ours is read between their changes, which may share one time stamp."""
    ours, theirs = an_allow_list(tmp_path), an_allow_list(tmp_path)
    for index in range(50):
        key = a_key()
        theirs.authorize(f"w-{index}", key)
        assert ours.name_of(key) == f"w-{index}"
        theirs.revoke(f"w-{index}")
        assert ours.name_of(key) is None


def test_a_settled_folder_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_list = an_allow_list(tmp_path)
    allow_list.authorize("w-1", a_key())
    os.utime(allow_list.folder, (1_000_000, 1_000_000))
    allow_list.refresh()
    monkeypatch.setattr(allow_list, "_read", lambda: pytest.fail("read again"))
    allow_list.refresh()
    assert allow_list.names() == ("w-1",)


def test_of_a_folder_that_changed_only_new_files_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = an_allow_list(tmp_path), an_allow_list(tmp_path)
    keys = {f"w-{index}": a_key() for index in range(20)}
    for name, key in keys.items():
        theirs.authorize(name, key)
        os.utime(ours.folder / f"{name}.pub", (1_000_000, 1_000_000))
    assert ours.name_of(keys["w-0"]) == "w-0"
    assert ours.names() == tuple(sorted(keys))
    opened = []
    read_text = Path.read_text

    def counted(path: Path, *args: Any, **options: Any) -> str:
        opened.append(path.stem)
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    (ours.folder / "new.pub").write_text(f"{a_key()}\n")
    (ours.folder / "w-3.pub").unlink()
    assert ours.name_of(keys["w-3"]) is None
    assert set(opened) == {"new"}
    assert ours.names() == tuple(sorted({*keys, "new"} - {"w-3"}))
    assert all(ours.holds(name, key) for name, key in keys.items() if name != "w-3")


@pytest.mark.parametrize("asks", ["the new", "the old", "nobody"])
def test_a_file_with_the_number_of_a_removed_one_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """A file system may give the number of a file that was removed to the next one."""
    monkeypatch.setattr(keys_module, "_LOOK_AGAIN_S", -1.0)  # each look counts, whenever it is
    ours = an_allow_list(tmp_path)
    old, new = a_key(), a_key()
    for index in range(200):
        ours.authorize(f"other-{index}", a_key())
    ours.authorize("w-1", old)
    for path in ours.folder.glob("*.pub"):
        os.utime(path, (1_000_000, 1_000_000))
    assert ours.names()
    for _ in range(20):
        ours.refresh()
    with (ours.folder / "w-1.pub").open("w") as file:  # the same number, and the name
        file.write(f"{new}\n")
    an_allow_list(tmp_path).authorize("w-2", a_key())
    if asks == "the new":
        assert ours.name_of(new) == "w-1"
    elif asks == "the old":
        assert ours.name_of(old) is None
    else:
        os.utime(ours.folder, (1_000_000, 1_000_000))
        for _ in range(20):
            ours.refresh()
        assert ours.holds("w-1", new)
        assert not ours.holds("w-1", old)


def test_while_others_come_an_old_key_costs_no_reading_and_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = an_allow_list(tmp_path), an_allow_list(tmp_path)
    old, new = a_key(), a_key()
    theirs.authorize("old", old)
    os.utime(ours.folder / "old.pub", (1_000_000, 1_000_000))
    theirs.authorize("new", new)
    assert ours.name_of(old) == "old"  # the folder's change is known
    ours._watch.is_settled = False
    ours._watch._look_again_at = float("inf")
    with monkeypatch.context() as patch:
        patch.setattr(ours, "_read", lambda: pytest.fail("read again"))
        assert ours.name_of(old) == "old"
    stamp = (ours.folder.stat().st_atime_ns, ours.folder.stat().st_mtime_ns)
    (ours.folder / "old.pub").unlink()
    os.utime(ours.folder, ns=stamp)
    assert ours.name_of(old) is None
    assert ours.name_of(new) == "new"


def test_the_generation_counts_changes_only(tmp_path: Path) -> None:
    allow_list = an_allow_list(tmp_path)
    before = allow_list.generation
    allow_list.refresh()
    assert allow_list.generation == before
    allow_list.authorize("w-1", a_key())
    assert allow_list.generation == before + 1
    (allow_list.folder / "note.txt").write_text("nothing")
    allow_list.refresh()
    assert allow_list.generation == before + 1


def test_a_new_key_replaces_the_old_one_of_a_name(tmp_path: Path) -> None:
    allow_list, old, new = an_allow_list(tmp_path), a_key(), a_key()
    allow_list.authorize("w-1", old)
    allow_list.authorize("w-1", new)
    assert not allow_list.holds("w-1", old)
    assert allow_list.name_of(old) is None
    assert allow_list.name_of(new) == "w-1"


def test_without_replace_a_name_keeps_its_key_whoever_was_first(tmp_path: Path) -> None:
    allow_list, theirs, ours = an_allow_list(tmp_path), a_key(), a_key()
    allow_list.authorize("w-1", theirs, replace=False)
    allow_list.authorize("w-1", theirs, replace=False)
    with pytest.raises(ConfigError, match=r"has another key already.*echo2 keys revoke w-1"):
        allow_list.authorize("w-1", ours, replace=False)
    assert allow_list.keys() == {"w-1": theirs}
    assert [entry.name for entry in allow_list.folder.iterdir()] == ["w-1.pub"]


def test_a_key_has_one_name(tmp_path: Path) -> None:
    allow_list, key = an_allow_list(tmp_path), a_key()
    allow_list.authorize("w-1", key)
    allow_list.authorize("w-1", key)
    with pytest.raises(ConfigError, match="already authorized as w-1"):
        allow_list.authorize("w-2", key)
    (allow_list.folder / "w-0.pub").write_text(key)
    assert allow_list.names() == ("w-0",)  # the first in order; the other is logged


@pytest.mark.parametrize("name", ["", ".", "..", ".w", "a/b", "a b", "x" * 65, "w\n", "a:b"])
def test_a_name_that_cannot_be_a_file_or_a_peer_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a peer"):
        an_allow_list(tmp_path).authorize(name, a_key())


def test_files_that_hold_no_key_are_passed_over(tmp_path: Path) -> None:
    allow_list, key = an_allow_list(tmp_path), a_key()
    for name, text in {"a.pub": "", "b.pub": "é" * 40, "c.key": key, ".d.pub": key}.items():
        (allow_list.folder / name).write_text(text)
    (allow_list.folder / "e.pub").mkdir()
    (allow_list.folder / "f.pub").write_text(f"  {key}\n\n")
    assert allow_list.names() == ("f",)


def test_without_its_folder_the_list_is_empty(tmp_path: Path) -> None:
    allow_list = an_allow_list(tmp_path)
    allow_list.authorize("w-1", a_key())
    (allow_list.folder / "w-1.pub").unlink()
    allow_list.folder.rmdir()
    assert allow_list.names() == ()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_list_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "authorized"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 700"):
        AllowList(folder)
