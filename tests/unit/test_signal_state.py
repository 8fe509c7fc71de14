"""What the tests start is as sensitive to signals as anywhere, however the tests themselves were started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Prints whether it ignores or blocks any signal that a Python started by a shell does not.
LOOKS = """
import signal
numbers = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
print(sorted(n for n in numbers if signal.getsignal(n) is signal.SIG_IGN), sorted(signal.pthread_sigmask(0, ())))
"""
# Ignores and blocks what it can, and then loads conftest.py as pytest does.
DEAF = f"""
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
import tests.conftest
signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGHUP)
subprocess.run([sys.executable, "-c", {LOOKS!r}], check=True)
"""


def test_what_a_test_starts_ignores_and_blocks_no_signal() -> None:
    assert _printed(LOOKS) == "[] []"


def test_a_runner_that_ignores_signals_is_left_alone_by_them_and_what_it_starts_is_not() -> None:
    assert _printed(DEAF) == "[] []"


def _printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_the_interpreter_that_runs_the_tests_blocks_nothing() -> None:
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
