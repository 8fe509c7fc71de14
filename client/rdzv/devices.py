"""How many accelerators there are, counted without importing torch and without touching a driver in this process."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping

from rdzv.interpreter import workers_python

# No such node, no driver: nothing to ask torch for. NVIDIA (also Jetson and WSL) and AMD ...
_GPU_NODES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd")
# ... and, for "auto" and "xpu", Intel, Habana and Ascend.
_OTHER_NODES = ("/dev/dri/renderD*", "/dev/accel*", "/dev/davinci*")

# Importing torch takes 2 s from a local disk, and up to a minute from a cold network file system.
_COUNT_TIMEOUT_S = 180

_COUNT = {
    "gpu": "torch.cuda.device_count()",
    "xpu": "torch.xpu.device_count() if hasattr(torch, 'xpu') and torch.xpu.is_available() else 0",
    "auto": (
        "(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
        " if hasattr(torch, 'accelerator') else torch.cuda.device_count()"
    ),
}


class DeviceError(Exception):
    """The devices cannot be counted. The text is one line and says why."""


def cpu_count() -> int:
    """CPUs that this process may use, as torchrun counts them."""
    return len(os.sched_getaffinity(0))


def count_devices(kind: str, environ: Mapping[str, str]) -> int:
    """Devices of `kind` ("gpu", "xpu", "auto": any accelerator, or torch's name of a plugged-in backend).

    `environ` is that of the workers: CUDA_VISIBLE_DEVICES and its like count. DeviceError: torch could not be asked.
    """
    if kind in _COUNT and not _has_node(_GPU_NODES if kind == "gpu" else (*_GPU_NODES, *_OTHER_NODES)):
        return 0
    return _ask_torch(_COUNT.get(kind) or _plugin_count(kind), environ)


def has_plugin_backends() -> bool:
    """Whether a torch extension is installed that may bring a device of its own."""
    from importlib.metadata import entry_points  # slow to import, and almost never needed

    return bool(entry_points(group="torch.backends"))


def _plugin_count(name: str) -> str:
    return (
        f"getattr(torch, {name!r}).device_count()"
        f" if torch._C._get_privateuse1_backend_name() == {name!r} and getattr(torch, {name!r}).is_available() else 0"
    )


def _has_node(patterns: tuple[str, ...]) -> bool:
    return any(glob.glob(pattern) for pattern in patterns)


def _ask_torch(expression: str, environ: Mapping[str, str]) -> int:
    import subprocess  # not needed where nothing is to be counted

    python = workers_python(environ)
    # The answer stands on a line of its own: extensions like to print when they are imported.
    code = f"import torch; print('\\ndevices', {expression})"
    try:
        done = subprocess.run(
            [python, "-c", code],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COUNT_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise DeviceError(f"{python} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise DeviceError(f"torch did not say how many devices there are within {_COUNT_TIMEOUT_S} s") from None
    answers = [line.split() for line in done.stdout.splitlines() if line.startswith("devices ")]
    if done.returncode != 0 or not answers or not answers[-1][1].isdigit():
        last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise DeviceError(f"torch could not be asked: {last}")
    return int(answers[-1][1])
