"""Which network interface workers are told to use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv import wording
from rdzv.interfaces import interface_of, interface_variables, leads_to_loopback

OURS = ("127.0.1.1", "127.0.0.1", "::1", "10.0.0.7", "fd00::7")


@pytest.mark.parametrize(
    ("addresses", "loopback"),
    [
        (["127.0.1.1"], True),
        (["::1", "10.0.0.7"], True),
        (["10.0.0.7", "127.0.1.1"], False),
        (["fd00::7"], False),
        (["192.0.2.9"], True),  # not of this host: the libraries fall back to loopback
        (["192.0.2.9", "10.0.0.7"], False),
        ([], True),
    ],
)
def test_a_library_takes_the_first_address_of_the_host_name_that_it_can_listen_at(
    addresses: list[str], loopback: bool
) -> None:
    assert leads_to_loopback(addresses, lambda address: address in OURS) == loopback


def test_loopback_is_the_interface_of_nobody() -> None:
    assert interface_of("127.0.0.1") == ""
    assert interface_of("::1") == ""
    assert interface_of("") == ""


def test_the_console_names_what_was_set() -> None:
    assert wording.interface({"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}) == (
        "GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME set to eth0 for the workers, as the name of this host leads to a "
        "loopback address"
    )


HOST = """
import json, sys
from rdzv.interfaces import interface_variables
print(json.dumps([interface_variables(environ, address) for environ, address in json.loads(sys.argv[1])]))
"""
SETUP = (
    "ip link set lo up && ip address add 10.9.8.7/24 dev lo && ip address add 10.9.8.8/24 dev lo && hostname debian && "
    'mount --bind {hosts} /etc/hosts && exec {python} -c "$HOST" "$CASES"'
)


def on_a_host(tmp_path: Path, hosts: str, cases: str) -> str:
    """Run HOST on a host with these names and two addresses that its peers reach, on lo."""
    (tmp_path / "hosts").write_text(hosts)
    command = SETUP.format(hosts=tmp_path / "hosts", python=sys.executable)
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "sh", "-c", command],
        env={**os.environ, "HOST": HOST, "CASES": cases},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no namespaces of one's own here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_on_a_host_whose_name_leads_to_loopback_the_interface_is_named_unless_it_is_already(tmp_path: Path) -> None:
    both = '{"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}'
    cases = (
        '[[{}, "10.9.8.7"], [{}, "10.9.8.8"], [{"GLOO_SOCKET_IFNAME": "ib0"}, "10.9.8.7"], [{}, "127.0.0.1"], [{}, ""]]'
    )
    said = on_a_host(tmp_path, "127.0.0.1 localhost\n127.0.1.1 debian\n", cases)
    assert said == f'[{both}, {both}, {{"TP_SOCKET_IFNAME": "lo"}}, {{}}, {{}}]'


def test_on_a_host_whose_name_leads_to_its_address_nothing_is_set(tmp_path: Path) -> None:
    assert on_a_host(tmp_path, "127.0.0.1 localhost\n10.9.8.7 debian\n", '[[{}, "10.9.8.7"]]') == "[{}]"


def test_a_host_without_netlink_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no netlink here")

    monkeypatch.setattr("rdzv.interfaces._interface_addresses", refuse)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert interface_variables({}, "192.0.2.2") == {}
