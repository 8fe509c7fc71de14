"""What the tests of consoles, logs and signals share: a launcher whose stdout and stderr the test holds itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.kit import RDZVRUN, WORKERS, Launcher, Stage

SPEAKER = str(WORKERS / "speaker.py")


def start(
    stage: Stage,
    *arguments: str,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    zygote: bool = False,
) -> Launcher:
    """Start `rdzvrun` as a node `host` of a job of its own. Where no descriptor is given its output goes to a file
    each: the launcher's `log` is stderr, and stdout is beside it. Workers start plainly, without a zygote that imports
    torch first, unless they are asked for."""
    name = f"host-{len(stage.launchers)}"
    log = stage.directory / f"{name}.err"
    with log.open("ab") as err, out_of(log).open("ab") as out:
        process = subprocess.Popen(
            [RDZVRUN, "--rdzv-conf=node_name=host", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out if stdout is None else stdout,
            stderr=err if stderr is None else stderr,
            env=stage.environment(name, {"PET_START_METHOD": "zygote" if zygote else "exec", **(env or {})}),
            start_new_session=True,
        )
    launcher = Launcher(name, process, log)
    stage.launchers.append(launcher)
    return launcher


def out_of(log: Path) -> Path:
    """Where the stdout of the launcher with this log is."""
    return log.with_suffix(".out")


def said(stage: Stage, *ranks: int) -> None:
    """Wait until these ranks have said what they had to say."""
    stage.until(
        lambda: all((stage.directory / f"said-{rank}").exists() for rank in ranks), f"ranks {ranks} have spoken"
    )


def read_all(fd: int) -> bytes:
    """Until nobody can write any more; closes it."""
    data = bytearray()
    while chunk := os.read(fd, 1 << 20):
        data += chunk
    os.close(fd)
    return bytes(data)
