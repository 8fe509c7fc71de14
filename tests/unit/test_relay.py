"""What workers write, from real pipes and files to a real pipe."""

from __future__ import annotations

import asyncio
import os
import pty
import random
import termios
import threading
import tty
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rdzv.outlet import Outlet
from rdzv.relay import TAIL_BYTES, Copy, Relay, Stream, channel

PATIENCE_S = 60.0  # for what must happen, on however busy a machine


class Reader:
    """Somebody who reads a pipe as fast as it goes, in a thread."""

    def __init__(self) -> None:
        self.fd, self.theirs = os.pipe()
        self.data = b""
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> bytes:
        """All that was written, once nobody can write any more."""
        os.close(self.theirs)
        self._thread.join()
        os.close(self.fd)
        return self.data

    def _read(self) -> None:
        while chunk := os.read(self.fd, 1 << 20):
            self.data += chunk


@asynccontextmanager
async def relaying() -> AsyncIterator[tuple[Relay, Outlet, Reader]]:
    """A relay to one outlet; when the scope ends all of it has been written."""
    reader = Reader()
    outlet, relay = Outlet(reader.theirs, "host"), Relay()
    reader.start()
    try:
        yield relay, outlet, reader
    finally:
        try:
            await relay.close()
        finally:
            await asyncio.to_thread(outlet.close)
            reader.end()


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await story()

    asyncio.run(bounded())


def write(fd: int, data: bytes) -> None:
    """As a worker does: all of it, in one write where the pipe has room."""
    while data:
        data = data[os.write(fd, data) :]


def worker(relay: Relay, outlet: Outlet | None, rank: int | None) -> tuple[Stream, int]:
    """A stream from a pipe, and the end to write to."""
    ours, theirs = channel(like=0 if not os.isatty(0) else 1)
    stream = Stream(ours, outlet=outlet, prefix=None if rank is None else b"[host:%d] " % rank)
    relay.add(stream)
    return stream, theirs


def test_torrents_of_several_workers_arrive_complete_and_whole() -> None:
    workers, lines = 4, 20_000
    seen: dict[bytes, int] = {}

    def say(rank: int, fd: int) -> None:
        dice = random.Random(rank)
        rest = b"".join(b"%d %d %s\n" % (rank, i, b"x" * dice.randrange(100)) for i in range(lines))
        while rest:
            size = dice.choice([1, 10, 1000, 100_000])
            write(fd, rest[:size])
            rest = rest[size:]
        os.close(fd)

    async def story() -> None:
        async with relaying() as (relay, outlet, reader):
            streams, speakers = [], []
            for rank in range(workers):
                stream, fd = worker(relay, outlet, rank)
                streams.append(stream)
                speakers.append(asyncio.to_thread(say, rank, fd))
            await asyncio.gather(*speakers)
            await relay.finish(streams)
        for line in reader.data.splitlines():
            prefix, speaker, number, *_ = line.split(b" ")
            assert prefix == b"[host:%s]" % speaker
            assert seen.setdefault(speaker, 0) == int(number)
            seen[speaker] += 1
        assert list(seen.values()) == [lines] * workers

    run(story)


def test_long_lines_binary_bytes_and_a_last_line_without_end() -> None:
    dice = random.Random(1)
    blob = bytes(c for c in dice.randbytes(100_000) if c != 0x0A)
    said = [blob, b"y" * 3_000_000, b"", b"\x00\xff\xfe", b"cut off"]

    async def story() -> None:
        async with relaying() as (relay, outlet, reader):
            stream, fd = worker(relay, outlet, 0)
            await asyncio.to_thread(write, fd, b"\n".join(said))
            os.close(fd)
            await relay.finish([stream])
        assert reader.data == b"".join(b"[host:0] " + line + b"\n" for line in said)

    run(story)


def test_a_worker_that_speaks_alone_is_passed_on_as_it_is() -> None:
    async def story() -> None:
        async with relaying() as (relay, outlet, reader):
            stream, fd = worker(relay, outlet, None)
            write(fd, b"\r 10%")
            await relay.drain([stream])
            outlet.put(b"[host] said in between\n")
            write(fd, b"\r 20%\n\x00")
            os.close(fd)
            await relay.finish([stream])
        assert reader.data == b"\r 10%\n[host] said in between\n\r 20%\n\x00"

    run(story)


def test_the_end_of_a_stream_is_known_when_it_was_drained() -> None:
    async def story() -> None:
        async with relaying() as (relay, outlet, _):
            shown, fd = worker(relay, outlet, 0)
            hidden, other = worker(relay, None, 1)
            for i in range(3000):
                write(fd, b"line %d\n" % i)
            write(other, b"nobody sees this")
            await relay.drain([shown, hidden])
            assert len(shown.tail) == TAIL_BYTES
            assert shown.tail.endswith(b"line 2998\nline 2999\n")
            assert hidden.tail == b"nobody sees this"
            os.close(fd)
            os.close(other)
            await relay.finish([shown, hidden])

    run(story)


def test_a_stream_that_nobody_writes_to_any_more_ends_by_itself() -> None:
    async def story() -> None:
        async with relaying() as (relay, outlet, reader):
            stream, fd = worker(relay, outlet, 0)
            write(fd, b"last words")
            os.close(fd)
            while not stream.ended:
                await relay.drain([])  # what was asked before is done
        assert reader.data == b"[host:0] last words\n"

    run(story)


def test_a_stream_that_somebody_keeps_open_ends_with_its_round() -> None:
    async def story() -> None:
        async with relaying() as (relay, outlet, reader):
            stream, fd = worker(relay, outlet, 0)
            write(fd, b"last words")
            await relay.finish([stream])
            assert stream.ended
            os.close(fd)
        assert reader.data == b"[host:0] last words\n"

    run(story)


def test_a_log_file_is_followed_to_its_end_and_what_matches_is_copied(tmp_path: Path) -> None:
    log, copied = tmp_path / "stdout.log", tmp_path / "filtered_stdout.log"

    async def story() -> None:
        async with relaying() as (relay, outlet, reader):
            with log.open("ab", buffering=0) as writer:
                copy = Copy(copied.open("ab"), ("apple", "", "orange"))
                stream = Stream(
                    os.open(log, os.O_RDONLY), outlet=outlet, prefix=b"[host:0] ", follow=True, copy=copy
                )  # fmt: skip
                relay.add(stream)
                for i in range(50_000):
                    writer.write(b"%s %d\n" % ((b"apple", b"pear", b"plum")[i % 3], i))
                writer.write(b"an orange without end")
            await relay.finish([stream])
            copy.close()
        lines = log.read_bytes().splitlines()
        assert len(lines) == 50_001
        assert reader.data.splitlines() == [b"[host:0] " + line for line in lines]
        wanted = [line for line in lines if b"apple" in line or b"orange" in line]
        assert copied.read_bytes().splitlines() == [b"[host:0] " + line for line in wanted]

    run(story)


def test_nobody_is_held_up_by_a_console_that_is_not_read_and_what_it_missed_is_counted() -> None:
    lines, pending_max = 200_000, 1 << 20

    async def story() -> None:
        reader = Reader()
        outlet, relay = Outlet(reader.theirs, "host", pending_max), Relay()
        stream, fd = worker(relay, outlet, 0)
        said = b"".join(b"%d %s\n" % (i, b"x" * 90) for i in range(lines))
        await asyncio.to_thread(write, fd, said)
        os.close(fd)
        await relay.finish([stream])
        assert outlet._pending <= pending_max
        reader.start()
        await relay.close()
        await asyncio.to_thread(outlet.close)
        shown, dropped = 0, 0
        for line in reader.end().splitlines():
            match line.split():
                case [b"[host:0]", number, _]:
                    assert int(number) == shown + dropped
                    shown += 1
                case [b"[host]", b"...", number, b"lines", b"dropped", b"here", b"..."]:
                    dropped += int(number)
                case _:
                    raise AssertionError(line)
        assert shown + dropped == lines
        assert shown > 0
        assert dropped > 0

    run(story)


def test_where_the_console_is_a_terminal_the_worker_finds_one_of_its_size() -> None:
    console, end = pty.openpty()
    tty.setraw(end)
    termios.tcsetwinsize(end, (33, 99))

    async def story() -> None:
        outlet, relay = Outlet(end, "host"), Relay()
        ours, theirs = channel(like=end)
        assert os.isatty(theirs)
        stream = Stream(ours, outlet=outlet, prefix=b"[host:0] ", terminal=end)
        relay.add(stream)
        write(theirs, b"one\ntwo\n")
        await relay.drain([stream])
        assert termios.tcgetwinsize(theirs) == (33, 99 - len("[host:0] "))
        os.close(theirs)
        await relay.finish([stream])
        await relay.close()
        outlet.close()
        assert os.read(console, 1000) == b"[host:0] one\n[host:0] two\n"

    run(story)
    os.close(console)
    os.close(end)


def test_what_nobody_can_read_any_more_is_no_error() -> None:
    async def story() -> None:
        async with relaying() as (relay, _, _):
            ours, theirs = os.pipe()
            os.close(ours)
            outlet = Outlet(theirs, "host")
            stream, fd = worker(relay, outlet, 0)
            write(fd, b"hello\n" * 1000)
            os.close(fd)
            await relay.finish([stream])
            outlet.close()
            os.close(theirs)

    run(story)


def test_a_descriptor_that_does_not_block_gets_everything() -> None:
    reader = Reader()
    os.set_blocking(reader.theirs, False)
    outlet = Outlet(reader.theirs, "host")
    line = b"x" * 999 + b"\n"
    for _ in range(1000):
        assert outlet.put(line)
    reader.start()
    outlet.close()
    assert reader.end() == line * 1000


def test_whoever_ends_the_thread_may_be_slower_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for more calls before it sleeps, and may end before it is woken for the call that ends it."""

    async def story() -> None:
        async with relaying() as (relay, outlet, _):
            ours, theirs = channel(like=os.open(os.devnull, os.O_WRONLY))
            os.close(theirs)
            relay.add(Stream(ours, outlet=outlet, prefix=b"", follow=False))
            wake = os.eventfd_write

            def slowly(fd: int, value: int) -> None:
                wake(fd, value)
                relay._thread.join(PATIENCE_S)
                wake(fd, value)

            monkeypatch.setattr(os, "eventfd_write", slowly)

    run(story)
