"""Calls that no part of echo2 may make: what has broken others cannot come in unnoticed.

Nothing makes code or objects out of bytes (pickle, eval and their kin). ZeroMQ's sockets belong
to `echo2.net`, where one task owns each; publish and subscribe, which lose what is sent before
a subscriber is there and beyond a mark, are not used. No receive is cancelled by `wait_for`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import echo2
import echo2_learner
import echo2_workers

ROOTS = [Path(package.__file__).parent for package in (echo2, echo2_learner, echo2_workers)]
NET = ROOTS[0] / "net"
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CODE_MAKERS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("torch", "save")}
SOCKET_CALLS = {
    *("recv_multipart", "send_multipart", "recv_pyobj", "send_pyobj", "recv_json", "send_json"),
    *("recv_string", "send_string", "recv_serialized", "send_serialized"),
}
PUBLISHERS = {"PUB", "SUB", "XPUB", "XSUB"}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
                yield path, node


NODES = list(nodes())


def places(found: Iterator[tuple[Path, ast.AST]]) -> list[str]:
    return [f"{path}:{getattr(node, 'lineno', 0)}" for path, node in found]


def named(node: ast.AST) -> tuple[str, str]:
    """("torch", "load") of `torch.load`; ("", "eval") of `eval`."""
    if isinstance(node, ast.Attribute):
        return (node.value.id if isinstance(node.value, ast.Name) else "?"), node.attr
    return "", node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_nothing_makes_objects_or_code_out_of_bytes() -> None:
    assert not places((p, n) for p, n in NODES if imported(n) & UNPICKLERS)
    calls = [(path, node) for path, node in NODES if isinstance(node, ast.Call)]
    assert not places((p, n) for p, n in calls if named(n.func) in LOADERS)
    assert not places(
        (p, n) for p, n in calls if not named(n.func)[0] and named(n.func)[1] in CODE_MAKERS
    )


def test_only_the_net_package_touches_sockets_of_zeromq() -> None:
    outside = [(path, node) for path, node in NODES if NET not in path.parents]
    assert not places(
        (p, n) for p, n in outside if isinstance(n, ast.Attribute) and n.attr in SOCKET_CALLS
    )
    assert any(isinstance(n, ast.Attribute) and n.attr in SOCKET_CALLS for _, n in NODES)


def test_nothing_is_published_to_subscribers_that_may_not_be_there() -> None:
    assert not places(
        (p, n) for p, n in NODES if named(n)[0] == "zmq" and named(n)[1] in PUBLISHERS
    )


def test_no_wait_is_cut_off_by_wait_for() -> None:
    """It may cancel a receive that has just got its message, and lose it."""
    assert not places((p, n) for p, n in NODES if named(n)[1] == "wait_for")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", {"pickle"}),
        ("from yaml.loader import Loader", {"yaml"}),
        ("import numpy.random", {"numpy"}),
    ],
)
def test_imports_are_seen_in_all_their_forms(text: str, found: set[str]) -> None:
    assert imported(ast.parse(text).body[0]) == found
