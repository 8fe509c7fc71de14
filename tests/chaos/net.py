"""Hosts with an address and a cable each, on one bridge, in network namespaces; and what becomes of their packets."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tests.chaos.cage import NETNS
from tests.chaos.slow_wire import SlowWire, without_offload

T = TypeVar("T")

NET = "10.77.0"
BRIDGE = "bridge"
Direction = Literal["both", "in", "out"]
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def run(*command: str, text: str = "") -> None:
    """Raises CalledProcessError with what it said."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr + text)


@dataclass(frozen=True)
class Host:
    """One network namespace. Its end of the cable is eth0, the bridge's is called like the host."""

    name: str
    number: int

    @property
    def address(self) -> str:
        return f"{NET}.{self.number}"

    def inside(self, *command: str) -> list[str]:
        """The command as it runs on this host; the process is the command itself."""
        return ["nsenter", f"--net={NETNS / self.name}", *command]

    def do(self, call: Callable[[], T]) -> T:
        """What `call` returns on this host: in a thread of its own, whose sockets are this host's."""
        result: Future[T] = Future()

        def enter() -> None:
            try:
                self._enter()
                result.set_result(call())
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
                result.set_exception(error)

        threading.Thread(target=enter, name=f"on {self.name}", daemon=True).start()
        return result.result()

    def _enter(self) -> None:
        """From now on the sockets that this thread makes are this host's."""
        with (NETNS / self.name).open() as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.name}")

    def pull(self) -> None:
        """Pull the cable: no carrier."""
        run("ip", "link", "set", self.name, "down")

    def plug(self) -> None:
        run("ip", "link", "set", self.name, "up")

    def drop(self, direction: Direction) -> None:
        """Silently lose what goes one way, or both ways. The loopback works."""
        hooks = {"in": ("input", "iifname"), "out": ("output", "oifname")}
        chosen = hooks.values() if direction == "both" else [hooks[direction]]
        rules = [
            f"chain {hook} {{ type filter hook {hook} priority 0; policy drop; {name} lo accept; }};"
            for hook, name in chosen
        ]
        run(*self.inside("nft", "-f", "-"), text=f"table inet chaos {{ {' '.join(rules)} }}\n")

    def mend(self) -> None:
        """Lose nothing any more. Nothing was lost: no-op."""
        with contextlib.suppress(subprocess.CalledProcessError):
            run(*self.inside("nft", "delete", "table", "inet", "chaos"))

    @contextlib.contextmanager
    def slow(self, delay_s: float, jitter_s: float, seed: int) -> Iterator[None]:
        """Every packet of this host takes so long in this scope, and now and then none comes through for a while."""
        with SlowWire(self.name, BRIDGE, delay_s, jitter_s, seed):
            yield


def build(names: dict[str, int]) -> dict[str, Host]:
    """Lay the cables. `names`: each host's number in the network, from 2 on; 1 is the caller's own. Only in a cage."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{NET}.1/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    hosts = {}
    for name, number in names.items():
        host = hosts[name] = Host(name, number)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", name, "master", BRIDGE, "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        # A slow wire carries what was cut to size, with its checksums.
        without_offload(name)
        host.do(lambda: without_offload("eth0"))
    without_offload(BRIDGE)
    # While a cable is out of the bridge nobody but its owner may answer for the bridge's own address.
    Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")
    return hosts
