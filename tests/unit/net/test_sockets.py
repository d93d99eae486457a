from __future__ import annotations

import pytest

from echo2.errors import ConfigError
from echo2.messages import (
    CHUNK_MAX_BYTES,
    GROUP_FRAME_MAX_BYTES,
    HEADER_MAX_BYTES,
    MANIFEST_MAX_BYTES,
    Lane,
    Role,
)
from echo2.net.sockets import (
    LANES,
    check_endpoint,
    frame_max_bytes,
    is_loopback,
    split_endpoint,
)


def test_each_lane_takes_the_largest_frame_of_its_messages_and_no_more() -> None:
    assert frame_max_bytes(Lane.CONTROL, Role.COORDINATOR) == HEADER_MAX_BYTES
    assert frame_max_bytes(Lane.ROLLOUTS, Role.COORDINATOR) == GROUP_FRAME_MAX_BYTES
    assert frame_max_bytes(Lane.CHUNKS, Role.ORIGIN) == HEADER_MAX_BYTES
    assert frame_max_bytes(Lane.CHUNKS, Role.WORKER) == max(MANIFEST_MAX_BYTES, CHUNK_MAX_BYTES)


def test_a_ping_passes_well_within_the_silence_that_a_lane_allows() -> None:
    assert set(LANES) == set(Lane)
    for limits in LANES.values():
        assert 4 * limits.ping_ms <= limits.silence_ms <= 6_553_599  # ZeroMQ's largest TTL


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://127.0.0.1:5700", "127.0.0.1", "5700"),
        ("tcp://[::1]:5700", "::1", "5700"),
        ("tcp://host.example:0", "host.example", "0"),
        ("tcp://*:*", "*", "*"),
    ],
)
def test_an_endpoint_has_a_host_and_a_port(endpoint: str, host: str, port: str) -> None:
    assert split_endpoint(endpoint) == (host, port)


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://host", "tcp://:5700", "ipc:///x:1", "host:5700", "tcp://a:b"]
)
def test_what_is_no_endpoint_is_a_config_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        split_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1"]
)
def test_loopback_needs_no_curve(endpoint: str) -> None:
    assert is_loopback(endpoint)
    check_endpoint(endpoint, encrypted=False)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://localhost.evil:1"],
)
def test_beyond_loopback_curve_is_needed(endpoint: str) -> None:
    check_endpoint(endpoint, encrypted=True)
    with pytest.raises(ConfigError, match="only loopback is allowed"):
        check_endpoint(endpoint, encrypted=False)
