"""The two launchers that are compared, and how each is started."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import Protocol

from tests.bench.harness import PROBE, Stage, command_path, start_daemon
from tests.ports import free_port

MAX_RESTARTS = 20  # a benchmark measures restarts; it must not run out of them


class Side(Protocol):
    """A launcher under test. One object serves one scenario."""

    name: str
    orphans: bool  # whether the workers outlive a killed launcher

    def prepare(self, scene: Stage) -> None:
        """Start what must run before the first node, if anything."""

    def standalone(self, scene: Stage, workers: int) -> subprocess.Popen[bytes]:
        """One node, nothing else to start."""

    def node(self, scene: Stage, index: int, nnodes: str, workers: int = 1) -> subprocess.Popen[bytes]:
        """Node number `index` of a job on several nodes; number 0 is started first."""


@dataclass
class Torchrun:
    """Stock torchrun, c10d, with a store of its own for each round: without that its restarts sometimes fail."""

    name: str = "torchrun"
    conf: str = ""  # more of --rdzv-conf
    orphans: bool = True
    port: int = field(default_factory=free_port)

    def prepare(self, scene: Stage) -> None:
        """Nothing: the store lives in node 0."""

    def standalone(self, scene: Stage, workers: int) -> subprocess.Popen[bytes]:
        """One node."""
        return self._start(scene, 0, "--standalone", f"--nproc-per-node={workers}")

    def node(self, scene: Stage, index: int, nnodes: str, workers: int = 1) -> subprocess.Popen[bytes]:
        """One node of several."""
        conf = ",".join(filter(None, (f"is_host={int(index == 0)}", self.conf)))
        return self._start(
            scene,
            index,
            f"--nnodes={nnodes}",
            f"--nproc-per-node={workers}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=bench",
            f"--rdzv-conf={conf}",
            "--local-addr=127.0.0.1",
        )

    def _start(self, scene: Stage, index: int, *options: str) -> subprocess.Popen[bytes]:
        command = [command_path("torchrun"), *options, f"--max-restarts={MAX_RESTARTS}"]
        return scene.launch(
            f"torchrun-{index}",
            [*command, str(PROBE), str(scene.events_file)],
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )


@dataclass
class Ours:
    """rdzvrun and a rendezvousd on the same machine."""

    name: str = "ours"
    conf: str = ""  # more of --rdzv-conf
    start_method: str = "zygote"
    orphans: bool = False
    port: int = 0

    def prepare(self, scene: Stage) -> None:
        """Start the daemon and wait until it listens."""
        self.port = free_port()
        start_daemon(scene, self.port)

    def standalone(self, scene: Stage, workers: int) -> subprocess.Popen[bytes]:
        """One node, the daemon inside its launcher."""
        return self._start(scene, 0, "--standalone", f"--nproc-per-node={workers}")

    def node(self, scene: Stage, index: int, nnodes: str, workers: int = 1) -> subprocess.Popen[bytes]:
        """One node of several."""
        conf = ",".join(filter(None, (f"node_name=node-{index}", self.conf)))
        return self._start(
            scene,
            index,
            f"--nnodes={nnodes}",
            f"--nproc-per-node={workers}",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=bench",
            f"--rdzv-conf={conf}",
            "--local-addr=127.0.0.1",
        )

    def _start(self, scene: Stage, index: int, *options: str) -> subprocess.Popen[bytes]:
        common = [f"--max-restarts={MAX_RESTARTS}", f"--start-method={self.start_method}"]
        command = [command_path("rdzvrun"), *options, *common]
        return scene.launch(f"rdzvrun-{index}", [*command, str(PROBE), str(scene.events_file)])
