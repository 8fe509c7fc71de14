"""Whether workers can run at all is known before anything starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.interpreter import problem
from rdzv.options import parse
from tests.e2e.kit import RDZVRUN


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter that has no torch: ours, without what is installed for it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_an_interpreter_without_torch_is_named_with_what_to_do(bare: str) -> None:
    options = parse([__file__], {})
    assert problem(options, {"PYTHON_EXEC": bare}) == f"no torch in {bare}: {bare} -m pip install torch"
    assert problem(options, {}) == ""
    assert problem(options, {"PYTHON_EXEC": sys.executable}) == ""


def test_nothing_is_started_without_torch(bare: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    done = subprocess.run(
        [RDZVRUN, "--max-restarts=20", str(script)],
        env={"PYTHON_EXEC": bare, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"rdzvrun: error: no torch in {bare}: {bare} -m pip install torch\n"


def test_a_torch_beside_the_script_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout of torch itself."""
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    options = parse([str(script)], {})
    assert problem(options, {}).startswith("no torch in ")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    assert problem(options, {}) == ""


def test_a_program_of_its_own_needs_no_torch_and_a_missing_interpreter_is_told_later(bare: str) -> None:
    assert problem(parse(["--no-python", "true"], {}), {"PYTHON_EXEC": bare}) == ""
    assert problem(parse([__file__], {}), {"PYTHON_EXEC": "/nowhere/python"}) == ""
