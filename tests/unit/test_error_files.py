"""What a failed worker leaves behind, and what is made of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rdzv.errors import (
    MESSAGE_BYTES_MAX,
    READ_BYTES_MAX,
    TRACEBACK_BYTES_MAX,
    ErrorReport,
    cut,
    describe_exit,
    looks_like_victim,
    read_error_file,
)

# As torch's @record writes it.
RECORDED = {
    "message": {
        "message": "ValueError: no such batch",
        "extraInfo": {
            "py_callstack": 'Traceback (most recent call last):\n  File "a.py", line 3\nValueError: no such batch\n',
            "timestamp": "1764500000",
        },
        "errorCode": 1,
    }
}


def write(tmp_path: Path, content: str | bytes | object) -> Path:
    path = tmp_path / "error.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_recorded_exception(tmp_path: Path) -> None:
    assert read_error_file(write(tmp_path, RECORDED)) == ErrorReport(
        message="ValueError: no such batch",
        traceback='Traceback (most recent call last):\n  File "a.py", line 3\nValueError: no such batch',
        timestamp=1764500000,
    )


def test_the_older_format_has_a_message_only(tmp_path: Path) -> None:
    path = write(tmp_path, {"message": "it broke", "timestamp": 17})
    assert read_error_file(path) == ErrorReport(message="it broke", traceback="", timestamp=17)


def test_nothing_to_read_is_no_report(tmp_path: Path) -> None:
    assert read_error_file(tmp_path / "missing") is None
    assert read_error_file(tmp_path) is None
    assert read_error_file(write(tmp_path, "")) is None
    assert read_error_file(write(tmp_path, " \n")) is None
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert read_error_file(fifo) is None, "and nobody waits for its writer"


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.7, 0.95])
def test_a_truncated_file_gives_what_it_has(tmp_path: Path, kept: float) -> None:
    text = json.dumps(RECORDED)
    report = read_error_file(write(tmp_path, text[: int(len(text) * kept)]))
    assert report is not None
    assert report.message == "ValueError: no such batch"
    assert report.traceback == "" or report.traceback.startswith("Traceback (most")


def test_a_file_cut_within_an_escape(tmp_path: Path) -> None:
    report = read_error_file(write(tmp_path, r'{"message": {"message": "caf\u00'))
    assert report is not None
    assert report.message.startswith("caf")


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\xff\xfe\x80 not text",
        "plain words",
        [1, 2],
        "null",
        {"message": None},
        {"message": {"extraInfo": 3}},
        {"message": {"message": 7, "extraInfo": {"py_callstack": [], "timestamp": "soon"}}},
        "[" * 100_000,
        '{"message": "\\ud800 half a pair"}',
        '{"message": "x", "timestamp": 1e999}',
        '{"message": "x", "timestamp": -5}',
    ],
)
def test_a_foreign_file_is_shown_as_it_stands(tmp_path: Path, content: object) -> None:
    report = read_error_file(write(tmp_path, content))
    assert report is not None
    assert report.message
    assert "\0" not in report.message
    assert len(report.message.encode()) <= MESSAGE_BYTES_MAX + 64
    assert report.timestamp == 0


def test_a_huge_report_keeps_its_ends(tmp_path: Path) -> None:
    """A message may hold a whole tensor. Both of its copies are cut, and the file is not read whole."""
    noise = "0.123, " * (READ_BYTES_MAX // 4)
    message = f"ValueError: begin {noise} end"
    extra = {"py_callstack": f"Traceback (most recent call last):\n{message}", "timestamp": "5"}
    report = read_error_file(write(tmp_path, {"message": {"message": message, "extraInfo": extra}}))
    assert report is not None
    assert report.message.startswith("ValueError: begin")
    assert len(report.message.encode()) <= MESSAGE_BYTES_MAX + 64
    assert "bytes cut" in report.message

    middling = f"ValueError: {'x' * 100_000} end"
    extra = {"py_callstack": f"Traceback:\n{middling}", "timestamp": "5"}
    report = read_error_file(write(tmp_path, {"message": {"message": middling, "extraInfo": extra}}))
    assert report is not None
    assert report.timestamp == 5
    assert report.traceback.startswith("Traceback:")
    assert report.traceback.endswith("end")
    assert len(report.traceback.encode()) <= TRACEBACK_BYTES_MAX + 64


def test_cut_says_how_much_and_never_splits_a_character() -> None:
    assert cut("short", 100) == "short"
    text = cut("é" * 1000, 101)
    assert f"[{2000 - 101} bytes cut]" in text
    assert "\ufffd" not in text
    assert cut("nul\0", 100) == "nul\\0"


def test_exits_in_words() -> None:
    assert describe_exit(3, 0) == "exit code 3"
    assert describe_exit(0, signal.SIGKILL) == "signal 9 (SIGKILL)"
    assert describe_exit(0, 40) == "signal 40"


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4321",
        "RuntimeError: [enforce fail at pair.cc] Read error [10.0.0.1]:4: Connection reset by peer, from gloo",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there"
        " was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
        "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU"
        " operations might run on corrupted/incomplete data.",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote"
        " server shutdown or crash?",
        'File "torch/distributed/distributed_c10d.py", line 3000, in all_reduce\nRuntimeError: Broken pipe',
    ],
)
def test_victims(text: str) -> None:
    assert looks_like_victim(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: loss is nan",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "ProtocolError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_culprits(text: str) -> None:
    assert not looks_like_victim(text)
