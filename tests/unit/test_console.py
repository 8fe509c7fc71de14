"""What a person reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rdzv.console import WAIT_AGAIN_S, Console
from rdzv.model import WORKER_FAILED, Cause, Exit, Failure, Say, Topic
from rdzv.outlet import OWN_MAX, Outlet


def read(story: Callable[[Console], None]) -> list[str]:
    """The lines that a story leaves behind."""
    ours, theirs = os.pipe()
    chunks: list[bytes] = []

    def drain() -> None:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    console = Console("node", Outlet(theirs, "node"))
    story(console)
    console.close()
    os.close(theirs)
    reader.join()
    os.close(ours)
    return b"".join(chunks).decode().splitlines()


def wait(text: str) -> Say:
    return Say(Topic.WAIT, text)


def test_a_reason_to_wait_is_said_when_it_lasts_and_again_when_it_changes_or_after_a_while() -> None:
    def story(console: Console) -> None:
        console.say(wait("1 of 2 nodes, 600 s left"), 0)
        console.say(wait("1 of 2 nodes, 599.5 s left"), 0.5)
        console.tick(1)
        for second in range(2, 29):
            console.say(wait(f"1 of 2 nodes, {600 - second} s left"), second)
        console.say(wait("2 of 3 nodes, 9 s left"), 29)
        console.tick(29 + WAIT_AGAIN_S)

    said = ["1 of 2 nodes, 599.5 s left", "2 of 3 nodes, 9 s left", "2 of 3 nodes, 9 s left"]
    assert read(story) == [f"[node] {text}" for text in said]


def test_a_wait_that_is_over_at_once_is_not_worth_a_line() -> None:
    def story(console: Console) -> None:
        console.say(wait("0 of 1 nodes"), 0)
        assert console.wakes_at() is not None
        console.say(Say(Topic.NEWS, "round 1"), 0.5)
        assert console.wakes_at() is None
        console.tick(100)

    assert read(story) == ["[node] round 1"]


def test_the_end_is_one_line_and_what_the_root_cause_said() -> None:
    failure = Failure(rank=3, local_rank=1, exit_code=1, signal=0, text="Traceback\nValueError: x", ended_at=0)

    def story(console: Console) -> None:
        cause = Cause(kind=WORKER_FAILED, node_name="b", failure=failure)
        console.finish(Exit(code=1, text="job failed: rank 3 on b", cause=cause))
        console.finish(Exit(code=1, text="job failed: 3 short rounds", cause=Cause(kind="X", failure=failure)))

    assert read(story) == [
        "[node] job failed: rank 3 on b",
        "[node]   it said:",
        "[node]     Traceback",
        "[node]     ValueError: x",
        "[node] job failed: 3 short rounds",
        "[node]   rank 3 (local rank 1) on this node: exit code 1",
        "[node]   it said:",
        "[node]     Traceback",
        "[node]     ValueError: x",
    ]


def test_a_terminal_that_is_stopped_holds_up_nobody_and_what_it_missed_is_counted() -> None:
    ours, theirs = os.pipe()
    console = Console("node", Outlet(theirs, "node", pending_max=0))
    line = "x" * 1000
    for _ in range(2 * OWN_MAX // len(line)):  # a pipe takes 64 KiB; then the writer hangs, and the queue fills
        console.say(Say(Topic.NEWS, line), 0)
    got = b""
    while b"dropped here" not in got:
        got += os.read(ours, 1 << 20)
        console.say(Say(Topic.NEWS, "more"), 0)
    os.close(ours)
    console.close()
    os.close(theirs)
