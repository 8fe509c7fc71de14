"""Endpoint strings: what is read, what is refused by name, and that writing is the inverse of reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.endpoints import Endpoint, format_endpoint, grpc_target, is_loopback, parse_endpoint, parse_endpoints


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host", "host", 29400),
        ("host:1234", "host", 1234),
        ("head.example.org:5", "head.example.org", 5),
        ("job_master-0.ns", "job_master-0.ns", 29400),
        ("1.2.3.4:5", "1.2.3.4", 5),
        ("1.2.3.4", "1.2.3.4", 29400),
        ("[::1]:5", "::1", 5),
        ("::1", "::1", 29400),
        ("[::1]", "::1", 29400),
        ("[0:0:0:0:0:0:0:1]:65535", "0:0:0:0:0:0:0:1", 65535),
        ("fe80::1%eth0", "fe80::1%eth0", 29400),
        (" host:1 ", "host", 1),
    ],
)
def test_endpoints_that_work(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == Endpoint(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "host:",
        "host:0",
        "host:65536",
        "host:99999999999999999999",
        "host:abc",
        "host:-1",
        "host:\u0663",
        "http://h:1",
        "h/x",
        ":5",
        "[::1",
        "[::1]5",
        "[::1]:",
        "[host]:5",
        "1:2:3",
        "1.2.3:5",
        "1.2.3.400",
        "a b",
        "-x",
        "h\u00f6st",
        "x" * 254,
    ],
)
def test_endpoints_that_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        parse_endpoint(text)
    assert f"'{text}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_are_separated_by_commas() -> None:
    assert parse_endpoints("a, b:1,a:29400") == (Endpoint("a", 29400), Endpoint("b", 1))
    for text in ("a,", ",a", ""):
        with pytest.raises(ValueError, match="empty"):
            parse_endpoints(text)


def test_gRPC_targets_do_not_look_up_addresses() -> None:  # noqa: N802
    assert grpc_target(Endpoint("head", 1)) == "dns:///head:1"
    assert grpc_target(Endpoint("1.2.3.4", 1)) == "ipv4:1.2.3.4:1"
    assert grpc_target(Endpoint("fe80::1%eth0", 1)) == "ipv6:[fe80::1%25eth0]:1"


def test_names_of_this_machine() -> None:
    assert all(is_loopback(host) for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1"))
    assert not any(is_loopback(host) for host in ("head", "10.0.0.1", "localhost.example.org", "::"))


HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z]([a-z0-9.-]{0,20}[a-z])?", fullmatch=True),
)


@given(HOSTS, st.integers(1, 65535))
def test_writing_is_the_inverse_of_reading(host: str, port: int) -> None:
    assert parse_endpoint(format_endpoint(host, port)) == Endpoint(host, port)
    assert parse_endpoint(str(Endpoint(host, port))) == Endpoint(host, port)


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_endpoint(text)
    except ValueError as error:
        said = str(error)
        found = None
    else:
        said = text
    assert text.strip() in said
    assert found is None or parse_endpoint(str(found)) == found
