"""Log files, beside those of a real torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.kit import Stage
from tests.e2e.speaking import SPEAKER, out_of, start

OPTIONS = (
    "--nproc-per-node=2",
    "--max-restarts=1",
    "--rdzv-id=job",
    "--redirects=0:3,1:2",
    "--tee=1:1",
    "--duplicate-stdout-filters=apple,plum",
    "--duplicate-stderr-filters=err",
)
PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}${rank}]:"}


def tree(log_dir: Path) -> dict[str, bytes]:
    """Every file below the directory of the one run, and what is in it."""
    (run,) = log_dir.iterdir()
    assert run.name.startswith("job_")
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_log_files_are_those_of_torchrun(stage: Stage) -> None:
    theirs, ours = stage.directory / "theirs", stage.directory / "ours"
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    with (stage.directory / "torchrun.out").open("wb") as out:
        subprocess.run(
            [*command, *OPTIONS, f"--log-dir={theirs}", SPEAKER, "attempts"],
            env=stage.environment("torchrun", PREFIX), stdout=out, stderr=subprocess.DEVNULL, timeout=250, check=True,
        )  # fmt: skip
    for path in stage.directory.glob("said-*"):
        path.unlink()
    launcher = start(stage, *OPTIONS, f"--log-dir={ours}", SPEAKER, "attempts", env=PREFIX)
    assert launcher.ends() == 0
    assert tree(ours) == tree(theirs)
    assert out_of(launcher.log).read_bytes() == (stage.directory / "torchrun.out").read_bytes()
    launcher.says(r"^log files: .*/ours/job_")
    launcher.says(r"^round 1 is over: rank 1 .* failed with exit code 3$")


def test_a_stream_that_goes_to_a_file_alone_is_quoted_as_well(stage: Stage) -> None:
    # No --log-dir: they are made where temporary files are, and stay.
    launcher = start(
        stage, "--nproc-per-node=2", "--redirects=3", SPEAKER, "raises", env={"TMPDIR": str(stage.directory)}
    )
    assert launcher.ends() == 1
    assert launcher.summary()[-1].strip() == "LookupError: no such shard"
    assert out_of(launcher.log).read_text() == ""
    (log,) = stage.directory.glob("torchelastic_*/*/attempt_0/1/stderr.log")
    assert "LookupError" in log.read_text()
    assert not list(stage.directory.glob("rdzvrun-*"))
