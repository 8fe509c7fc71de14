"""A slow and moody cable: what the kernel's netem does, on machines that lack it.

The cable of a host is taken out of the bridge, and this process carries every frame from one to the other, later.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import random
import select
import socket
import struct
import subprocess
import threading
import time
from types import TracebackType

FRAME_MAX = 65536  # with offload off a frame is no longer than the MTU; whatever comes is taken whole
STALL_CHANCE = 0.1  # a second: that nothing comes through
STALL_S = (0.5, 2.0)  # for so long
_ETH_P_ALL = 3
_OUTGOING = 4  # PACKET_OUTGOING: our own, seen again
_SIOCETHTOOL = 0x8946
_OFF = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO


def without_offload(interface: str) -> None:
    """In this namespace: frames leave cut to size and with checksums, as on a real cable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFF:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


class SlowWire:
    """In its scope all frames between `cable` and `bridge` take `delay_s`, more or less `jitter_s`, in their order."""

    def __init__(self, cable: str, bridge: str, delay_s: float, jitter_s: float, seed: int) -> None:
        self._cable, self._bridge = cable, bridge
        self._near, self._far = f"{cable}-s", f"{cable}-t"
        self._delay_s, self._jitter_s = delay_s, jitter_s
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, name=f"slow wire {cable}", daemon=True)

    def __enter__(self) -> SlowWire:
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        for end in (self._near, self._far):
            without_offload(end)
            _ip("link", "set", end, "up")
        _ip("link", "set", self._cable, "nomaster")
        self._sockets = [_frames(self._cable), _frames(self._near)]
        self._thread.start()
        _ip("link", "set", self._far, "master", self._bridge)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        for each in self._sockets:
            each.close()
        _ip("link", "del", self._near)
        _ip("link", "set", self._cable, "master", self._bridge)

    def _carry(self) -> None:
        inside, outside = self._sockets
        poll = select.poll()
        for each in self._sockets:
            poll.register(each, select.POLLIN)
        under_way: list[tuple[float, int, socket.socket, bytes]] = []
        last = dict.fromkeys(self._sockets, 0.0)  # when the last frame that way is due: none overtakes another
        count, stalled_until, look_at = 0, 0.0, time.monotonic()
        while not self._over.is_set():
            now = time.monotonic()
            if now >= look_at:
                look_at = now + 1.0
                if self._chance.random() < STALL_CHANCE:
                    stalled_until = now + self._chance.uniform(*STALL_S)
            due_at = max(under_way[0][0], stalled_until) if under_way else now + 0.1
            for fd, _ in poll.poll(max(0.0, min(due_at - now, 0.1)) * 1000):
                here, there = (inside, outside) if fd == inside.fileno() else (outside, inside)
                frame, address = here.recvfrom(FRAME_MAX)
                if address[2] == _OUTGOING:
                    continue
                takes_s = self._delay_s + self._chance.uniform(-self._jitter_s, self._jitter_s)
                last[there] = max(last[there], time.monotonic() + takes_s)
                count += 1
                heapq.heappush(under_way, (last[there], count, there, frame))
            now = time.monotonic()
            while under_way and under_way[0][0] <= now and now >= stalled_until:
                _, _, there, frame = heapq.heappop(under_way)
                try:
                    there.send(frame)
                except OSError:  # the other end is down, or its queue is full: cables lose frames
                    continue


def _frames(interface: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    found.bind((interface, 0))
    return found


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
