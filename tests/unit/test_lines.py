"""Bytes of a worker as lines of a console, however they come."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from rdzv.lines import LINE_MAX, Lines

PREFIX = b"[host:3] "
PARTS = st.one_of(st.sampled_from([b"\n", b"\r", b"\r\n", b"", PREFIX, b"\x00\xff"]), st.binary(max_size=20))


def shown(chunks: Iterable[bytes]) -> bytes:
    lines = Lines(PREFIX)
    return b"".join([*(lines.feed(chunk) for chunk in chunks), lines.end()])


def expected(data: bytes) -> bytes:
    """Every line behind the prefix; the last one gets the newline that it lacks."""
    whole = data if not data or data.endswith(b"\n") else data + b"\n"
    return b"".join(PREFIX + line + b"\n" for line in whole.split(b"\n")[:-1])


@given(st.lists(PARTS))
def test_any_bytes_cut_anywhere_give_the_same_lines(chunks: list[bytes]) -> None:
    assert shown(chunks) == expected(b"".join(chunks))


@given(st.lists(PARTS))
def test_what_is_shown_at_any_time_ends_with_a_line(chunks: list[bytes]) -> None:
    lines = Lines(PREFIX)
    for chunk in chunks:
        said = lines.feed(chunk)
        assert not said or (said.startswith(PREFIX) and said.endswith(b"\n"))


@given(st.lists(st.tuples(PARTS, st.booleans())))
def test_a_progress_bar_shown_while_it_moves_loses_no_byte(chunks: list[tuple[bytes, bool]]) -> None:
    lines = Lines(PREFIX)
    said = []
    for chunk, look in chunks:
        said.append(lines.feed(chunk))
        if look:
            said.append(lines.live())
    said.append(lines.end())
    data = b"".join(chunk for chunk, _ in chunks)
    if PREFIX not in data:
        assert b"".join(said).replace(PREFIX, b"").removesuffix(b"\n") == data.removesuffix(b"\n")


def test_a_progress_bar_keeps_its_prefix_as_it_rewrites_itself() -> None:
    lines = Lines(PREFIX)
    assert lines.feed(b"\r 10%") == b""
    assert lines.live() == PREFIX + b"\r" + PREFIX + b" 10%"
    assert lines.live() == b""
    assert lines.feed(b"\r 20%") == b""
    assert lines.live() == b"\r" + PREFIX + b" 20%"
    assert lines.feed(b"\rdone\nnext\n") == b"\r" + PREFIX + b"done\n" + PREFIX + b"next\n"


def test_a_line_that_only_waits_for_its_end_is_not_shown_before() -> None:
    lines = Lines(PREFIX)
    assert lines.feed(b"loading ... ") == b""
    assert lines.live() == b""
    assert lines.feed(b"done\n") == PREFIX + b"loading ... done\n"


def test_a_line_without_end_is_shown_in_pieces() -> None:
    lines = Lines(PREFIX)
    piece = b"x" * (LINE_MAX // 2)
    assert lines.feed(piece) == lines.feed(piece) == b""
    assert lines.feed(b"!") == PREFIX + piece + piece + b"!\n"
    assert lines.feed(b"next\n") == PREFIX + b"next\n"
