"""A real daemon process on a free loopback port, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Daemon:
    process: subprocess.Popen[bytes]
    endpoint: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def text(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def daemon(directory: Path, *options: str, listen: str = "127.0.0.1:0") -> Iterator[Daemon]:
    """Run `rendezvousd` in this scope; it is serving when the scope begins."""
    reader, writer = os.pipe()
    log = directory / f"daemon-{os.urandom(3).hex()}.log"
    command = [sys.executable, "-m", "rendezvousd", "--listen", listen, "--ready-fd", str(writer), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, pass_fds=(writer,))
    os.close(writer)
    try:
        with os.fdopen(reader) as ready:
            endpoint = ready.readline().strip()
        assert endpoint, f"the daemon did not start: {log.read_text()}"
        yield Daemon(process, endpoint, log)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
