"""Who is shown and who is logged, and what is kept of a worker that died."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

from rdzv.errors import TRACEBACK_BYTES_MAX, last_words, looks_like_victim
from rdzv.logs import ERR, OUT, LogDir, last_bytes, streams_of
from rdzv.options import Options, parse
from rdzv.stdio import fates

SLOTS = 3
CHOICES = ["0", "1", "2", "3", "0:1,2:3", "1:2"]


def options(*argv: str) -> Options:
    return parse([f"--nproc-per-node={SLOTS}", *argv, __file__], {})


def torchs(redirects: str, tee: str, only: set[int] | None, directory: str) -> LogsDest:
    specs = DefaultLogsSpecs(
        log_dir=directory, redirects=Std.from_str(redirects), tee=Std.from_str(tee), local_ranks_filter=only
    )
    return specs.reify({rank: {"TORCHELASTIC_RUN_ID": "job"} for rank in range(SLOTS)})


@pytest.mark.parametrize("only", [None, {0}, {1, 2}])
@pytest.mark.parametrize("tee", CHOICES)
@pytest.mark.parametrize("redirects", CHOICES)
def test_every_stream_goes_where_torchrun_sends_it(
    tmp_path: Path, redirects: str, tee: str, only: set[int] | None
) -> None:
    filters = [f"--local-ranks-filter={','.join(map(str, only))}"] if only else []
    ours = fates(options(f"--redirects={redirects}", f"--tee={tee}", *filters), first_rank=0)
    theirs = torchs(redirects, tee, only, str(tmp_path))
    for stream, to, tailed in ((OUT, theirs.stdouts, theirs.tee_stdouts), (ERR, theirs.stderrs, theirs.tee_stderrs)):
        for rank in range(SLOTS):
            fate = ours[rank, stream]
            assert fate.logged == to[rank].endswith(".log")
            assert fate.shown == (to[rank] == "" or rank in tailed)


def test_no_log_files_at_all_is_said_with_the_null_device() -> None:
    for fate in fates(options("--redirects=3", "--tee=1", f"--log-dir={os.devnull}"), first_rank=0).values():
        assert (fate.shown, fate.logged) == (True, False)


def test_the_console_of_rank_0_also_shows_the_errors_of_all() -> None:
    first = fates(options("--console=rank0"), first_rank=0)
    second = fates(options("--console=rank0"), first_rank=SLOTS)
    assert [key for key, fate in first.items() if not fate.shown] == [(1, OUT), (2, OUT)]
    assert [key for key, fate in second.items() if not fate.shown] == [(0, OUT), (1, OUT), (2, OUT)]


def test_streams_by_number_and_by_rank() -> None:
    assert streams_of("3", 2) == (3, 3)
    assert streams_of("1:2,7:3", 3) == (0, 2, 0)


def test_a_run_has_a_directory_of_its_own_whatever_its_name(tmp_path: Path) -> None:
    for run_id in ("job", "a/b c", "../up", "x" * 250):
        dirs = [LogDir(str(tmp_path / "logs"), run_id) for _ in range(2)]
        paths = [Path(each.worker(7, 1)) for each in dirs]
        assert paths[0] != paths[1]
        for path in paths:
            assert path.is_dir()
            assert (path.name, path.parent.name) == ("1", "attempt_7")
            assert path.parents[2] == tmp_path / "logs"


def test_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    assert last_bytes(str(path), 4) == b""
    path.write_bytes(b"abc")
    assert last_bytes(str(path), 4) == b"abc"
    path.write_bytes(b"abcdef")
    assert last_bytes(str(path), 4) == b"cdef"


# ------------------------------------------------------------------------------------------------ last words

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"""


def test_a_traceback_is_taken_whole_and_nothing_before_it() -> None:
    noise = "".join(f"epoch {i}\n" for i in range(1000))
    found = last_words((noise + "Traceback (most recent call last):\nold\n" + noise + TRACEBACK + "\nbye\n").encode())
    assert found == TRACEBACK + "\nbye"
    assert looks_like_victim(found)


def test_a_chain_of_exceptions_is_taken_from_its_beginning() -> None:
    first = "Traceback (most recent call last):\n  KeyError: 'x'\n"
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert last_words(f"noise\n{first}{link}{TRACEBACK}\n".encode()) == f"{first}{link}{TRACEBACK}".strip()


def test_without_a_traceback_the_last_lines_are_taken() -> None:
    found = last_words("".join(f"line {i}\n" for i in range(100)).encode())
    assert found.splitlines() == [f"line {i}" for i in range(70, 100)]
    assert last_words(b"") == ""


def test_last_words_are_clean_whatever_was_written() -> None:
    assert last_words(b"\x1b[31mred\x1b[0m \x1b]0;title\x07text\n") == "red text"
    assert last_words(b"\r 10%\r 20%\r\nOSError: \xff\x00\x08!\r\n") == " 20%\nOSError: \\xff!".strip()
    assert len(last_words(b"x" * 100_000).encode()) < 1.1 * TRACEBACK_BYTES_MAX
