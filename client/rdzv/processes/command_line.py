"""What `ps` shows of a process, and /proc/PID/environ: a forked process has its parent's until it says otherwise."""

from __future__ import annotations

import ctypes

PR_SET_MM = 35
PR_SET_MM_MAP = 14
PROT_READ, PROT_WRITE = 1, 2
MAP_PRIVATE, MAP_ANONYMOUS = 2, 32


class _Map(ctypes.Structure):
    """struct prctl_mm_map"""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack", "arg_start",
            "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]  # fmt: skip


def show(argv: list[bytes], env: dict[bytes, bytes]) -> bool:
    """Show these instead of what this process was started with. Returns whether the kernel can do that (it needs
    CONFIG_CHECKPOINT_RESTORE, which distributions have switched on)."""
    args = b"".join(word + b"\0" for word in argv)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in env.items())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat", "rb") as file:
        stat = file.read()
    fields = [b"", b"", b"", *stat[stat.rindex(b")") + 1 :].split()]  # numbered as in proc(5)
    number = [int(field) if field.lstrip(b"-").isdigit() else 0 for field in fields]
    # Never unmapped: the kernel reads it until the process ends.
    size = len(args) + len(variables)
    start = libc.mmap(None, ctypes.c_size_t(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        return False
    ctypes.memmove(start, args + variables, size)
    new = _Map(
        start_code=number[26], end_code=number[27], start_data=number[45], end_data=number[46], start_brk=number[47],
        brk=libc.sbrk(0), start_stack=number[28], arg_start=start, arg_end=start + len(args),
        env_start=start + len(args), env_end=start + size, exe_fd=0xFFFFFFFF,
    )  # fmt: skip
    return bool(libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(new), ctypes.c_ulong(ctypes.sizeof(new)), 0) == 0)
