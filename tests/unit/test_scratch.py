"""Directories that outlive nobody for long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rdzv.scratch import PREFIX, Scratch, remove_stale


def test_what_a_killed_launcher_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    mine = Scratch(str(tmp_path))
    code = (
        "import sys, time\n"
        "from rdzv.scratch import Scratch\n"
        f"print(Scratch({str(tmp_path)!r}).path, flush=True)\n"
        "time.sleep(600)\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            (theirs / "1").mkdir()
            (theirs / "1" / "error.json").touch()
            assert remove_stale(str(tmp_path)) == 0
        finally:
            other.kill()
    assert remove_stale(str(tmp_path)) == 1
    assert os.listdir(tmp_path) == [os.path.basename(mine.path)]
    mine.remove()
    mine.remove()
    assert os.listdir(tmp_path) == []


def test_what_looks_like_one_and_is_none_stays(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}file").touch()
    shared = tmp_path / f"{PREFIX}shared"
    shared.mkdir(mode=0o755)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    assert remove_stale(str(tmp_path)) == 0
    assert len(os.listdir(tmp_path)) == 4
    assert remove_stale(str(tmp_path / "missing")) == 0
