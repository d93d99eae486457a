"""`echo2 status` in lines for people."""

from __future__ import annotations

from typing import Any

from echo2.commands.status import BROADCASTS_SHOWN, told


def a_broadcast(version: str, **changes: Any) -> dict[str, Any]:
    return {
        "version": version,
        "workers": 4,
        "installed": 3,
        "t50_s": 1.25,
        "t90_s": 2.5,
        "t100_s": None,
        "fetch_share": 0.8,
        "install_share": 0.1,
        "predicted_s": 2.0,
        "bound_s": 1.5,
        **changes,
    }


def test_a_wait_is_told_with_its_age_its_owner_and_what_ends_it() -> None:
    wait = {
        "wait": "worker w-1",
        "owner": "coordinator",
        "text": "worker w-1 is silent",
        "since_s": 9.6,
        "ends_in_s": 5.4,
        "then": "its leases are given to others",
    }
    assert (
        "waits     worker w-1 is silent, since 10 s  "
        "(coordinator: its leases are given to others in 5 s)"
    ) in told({"waits": [wait]})
    (line,) = [x for x in told({"waits": [wait | {"ends_in_s": None}]}) if "waits" in x]
    assert line.endswith("(coordinator: its leases are given to others)")


def test_an_empty_status_has_no_lines_of_relays() -> None:
    lines = told({})
    assert not [line for line in lines if line.startswith(("relay", "link", "t_bcast", "worker"))]


def test_relays_say_what_they_do_and_why_not() -> None:
    relay = {
        "endpoint": "tcp://10.0.0.1:7", "accepts": False, "forwards": False,
        "reason": "it fell silent", "up_mbit": 93.42, "down_mbit": None,
    }  # fmt: skip
    fetch = {"missing": 12, "chunks": 300}
    lines = told({"workers": [{"name": "w-1", "relay": relay, "fetch": fetch}]})
    assert (
        "relay     w-1  only dials, forwards nothing  up 93.4  down - Mbit/s  (it fell silent)"
    ) in lines
    assert any(line.endswith("12 of 300 chunks missing") for line in lines)


def test_a_worker_without_a_relay_has_no_line_of_it() -> None:
    lines = told({"workers": [{"name": "w-1", "relay": None, "fetch": None}]})
    assert not [line for line in lines if line.startswith("relay")]


def test_links_and_the_newest_broadcasts_are_shown() -> None:
    links = [{"from": "origin", "to": "w-1", "mbit": 93.42}]
    broadcasts = [a_broadcast(f"1.{step}") for step in range(6)]
    lines = told({"links": links, "broadcasts": broadcasts})
    assert "link      origin > w-1  93.4 Mbit/s" in lines
    shown = [line for line in lines if line.startswith("t_bcast")]
    assert len(shown) == BROADCASTS_SHOWN
    assert shown[-1] == (
        "t_bcast   version 1.5  1.25 s, 2.5 s, - s at half, 90 % and all of 4  planned 2 s, bound "
        "1.5 s  fetching 0.8, installing 0.1 of it"
    )
    (line,) = [
        x for x in told({"broadcasts": [a_broadcast("1.0", predicted_s=None)]}) if "1.0" in x
    ]
    assert "planned" not in line


def test_who_stands_by_what_was_decided_and_which_machines_are_on_are_told() -> None:
    activation = {
        "decision": "enough: 2 ± 0.1 of 2 groups/s",
        "active": 2,
        "standby": 1,
        "lead_s": {"gpu": 61.26},
        "machines": [
            {"worker": "gpu-1", "offer": "gpu", "state": "starting", "text": ""},
            {"worker": "gpu-2", "offer": "gpu", "state": "stopping", "text": "code 3: no"},
        ],
    }
    workers = [
        {"name": "w-1", "state": "ready", "active": True, "usd_per_1000_rollouts": 0.123456},
        {"name": "w-2", "state": "ready", "active": False, "usd_per_1000_rollouts": None},
    ]
    lines = told({"activation": activation, "workers": workers})
    assert "active    2, standby 1: enough: 2 ± 0.1 of 2 groups/s" in lines
    assert "lead      gpu 61.3 s" in lines
    assert "machine   gpu-1  gpu  starting" in lines
    assert "machine   gpu-2  gpu  stopping  code 3: no" in lines
    (first, second) = (line for line in lines if line.startswith("worker"))
    assert first.endswith("$0.1235 per 1000 rollouts")
    assert second.startswith("worker    w-2  ready (standby)  version")
    assert "per 1000" not in second
