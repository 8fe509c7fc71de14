"""What people see of several workers, or of one, on the launcher's stdout and stderr."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import termios
import threading
from typing import Any

import pytest

from tests.e2e.kit import RDZVRUN, Stage
from tests.e2e.speaking import SPEAKER, out_of, read_all, said, start


def numbered(data: bytes, workers: int) -> tuple[list[int], int]:
    """How many lines of each worker arrived, and how many are said to be dropped; each line whole and in its turn."""
    seen, dropped = [0] * workers, 0
    for line in data.splitlines():
        if note := re.fullmatch(rb"\[host\] \.\.\. (\d+) lines dropped here \.\.\.", line):
            dropped += int(note[1])
            continue
        found = re.fullmatch(rb"\[host:(\d)\] (\d) (\d+) (x*)", line)
        assert found, line
        rank, number = int(found[1]), int(found[3])
        assert rank == int(found[2])
        assert len(found[4]) == number % 150
        assert number >= seen[rank] if dropped else number == seen[rank]
        seen[rank] = number + 1 if not dropped else seen[rank] + 1
    return seen, dropped


def test_torrents_of_several_workers_arrive_complete_and_untorn(stage: Stage) -> None:
    ours, theirs = os.pipe()
    launcher = start(stage, "--nproc-per-node=3", SPEAKER, "torrent", "100000", stdout=theirs, zygote=True)
    os.close(theirs)
    assert numbered(read_all(ours), 3) == ([100_000] * 3, 0)
    assert launcher.ends() == 0


def test_a_console_that_nobody_reads_holds_up_no_worker_and_log_files_are_complete(stage: Stage) -> None:
    lines = 200_000  # of 85 bytes each, two workers: more than a console keeps
    ours, theirs = os.pipe()
    logs = [f"--log-dir={stage.directory}", "--tee=1:1"]
    launcher = start(stage, "--nproc-per-node=2", *logs, SPEAKER, "torrent", str(lines), stdout=theirs)
    os.close(theirs)
    said(stage, 0, 1)
    seen, dropped = numbered(read_all(ours), 2)
    assert launcher.ends() == 0
    assert sum(seen) + dropped == 2 * lines
    assert dropped > 0
    (log,) = stage.directory.glob("*/attempt_0/1/stdout.log")
    assert [int(line.split()[1]) for line in log.read_bytes().splitlines()] == list(range(lines))


def test_a_worker_that_dies_in_the_middle_of_a_line(stage: Stage) -> None:
    launcher = start(stage, "--nproc-per-node=2", SPEAKER, "dies")
    assert launcher.ends() == 128 + 9
    out = out_of(launcher.log).read_text().splitlines()
    assert sorted(out) == ["[host:0] out of 0", "[host:1] a whole line", "[host:1] and a half", "[host:1] out of 1"]
    assert "SIGKILL" in launcher.summary()[0]


def test_a_worker_without_record_is_quoted_with_the_end_of_its_stderr(stage: Stage) -> None:
    stage.daemon()
    endpoint = (f"--rdzv-endpoint={stage.daemons[-1].endpoint}", "--rdzv-id=job")
    both = [start(stage, "--nnodes=2", *endpoint, SPEAKER, "raises") for _ in range(2)]
    assert [launcher.ends() for launcher in both] == [1, 1]
    for launcher in both:
        head, *rest = (line.strip() for line in launcher.summary())
        assert head == "job failed: rank 1 (local rank 0) on node host failed with exit code 1"
        assert rest[:2] == ["it said:", "Traceback (most recent call last):"]
        assert rest[-1] == "LookupError: no such shard"
    outs = [out_of(launcher.log).read_text() for launcher in both]
    assert sorted(outs) == ["", "a line without end"], "a worker that speaks alone has no prefix"


def test_the_console_of_rank_0(stage: Stage) -> None:
    launcher = start(stage, "--nproc-per-node=3", "--console=rank0", SPEAKER, "both")
    assert launcher.ends() == 0
    assert out_of(launcher.log).read_text() == "[host:0] out of 0\n"
    assert set(re.findall(r"^\[host:\d\] .*$", launcher.text(), re.MULTILINE)) == {
        f"[host:{rank}] err of {rank}" for rank in range(3)
    }


def test_the_prefix_can_be_chosen_in_torchruns_words(stage: Stage) -> None:
    template = "<${role_name} ${local_rank} ${rank} ${other}>"
    launcher = start(
        stage, "--nproc-per-node=2", "--role=trainer", "--local-ranks-filter=1", SPEAKER, "both",
        env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template},
    )  # fmt: skip
    assert launcher.ends() == 0
    assert out_of(launcher.log).read_text() == "<trainer 1 1 ${other}>out of 1\n"
    assert "<trainer 1 1 ${other}>err of 1\n" in launcher.text()
    assert "of 0" not in launcher.text()


# ---------------------------------------------------------------------------------------------------- terminals


def streams(stage: Stage, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage.directory / f"streams-{rank}").read_text())
    return found


@pytest.mark.parametrize(("workers", "zygote"), [(1, False), (2, True)])
def test_where_the_launcher_has_a_terminal_its_workers_have_one(stage: Stage, workers: int, zygote: bool) -> None:
    console, end = pty.openpty()
    termios.tcsetwinsize(end, (40, 120))
    # Somebody has to look at the screen, or the launcher waits for it to be read.
    screen = threading.Thread(target=_look, args=(console,))
    screen.start()
    launcher = start(stage, f"--nproc-per-node={workers}", SPEAKER, "streams", stdout=end, stderr=end, zygote=zygote)
    os.close(end)
    assert launcher.ends() == 0
    screen.join()
    for rank in range(workers):
        assert (streams(stage, rank)["stdout"], streams(stage, rank)["stderr"]) == (True, True)


def _look(console: int) -> None:
    try:
        while os.read(console, 4096):
            pass
    except OSError:  # how a terminal ends
        os.close(console)


def test_one_worker_writes_to_the_launchers_own_stdout(stage: Stage) -> None:
    launcher = start(stage, SPEAKER, "streams", zygote=True)
    assert launcher.ends() == 0
    assert streams(stage)["where"][1] == str(out_of(launcher.log))
    assert (streams(stage)["stdout"], streams(stage)["stderr"]) == (False, False)


def test_one_stream_for_both_keeps_their_order(stage: Stage) -> None:
    ours, theirs = os.pipe()
    launcher = start(stage, SPEAKER, "both", stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert b"out of 0\nerr of 0\n" in read_all(ours)
    assert launcher.ends() == 0


def test_descriptors_that_were_closed_are_not_given_to_anybody(stage: Stage) -> None:
    command = f"exec '{RDZVRUN}' --nproc-per-node=2 '{SPEAKER}' streams <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], env=stage.environment("a"), timeout=120, check=False)
    assert done.returncode == 0
    for rank in (0, 1):
        assert streams(stage, rank)["where"][0] == os.devnull
