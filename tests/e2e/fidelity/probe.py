"""Prints, as JSON, what a script can tell of the process that it runs in, item by item; with `libraries` as its last
argument also what it can tell of torch and others, which takes longer than all the rest."""

import atexit
import builtins
import ctypes
import gc
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys

MODULES_AT_START = set(sys.modules)
FILTERS_AT_START = len(sys.modules["warnings"].filters) if "warnings" in sys.modules else 0


class Marker:
    """For `inspect.getsource`."""


def process() -> dict[str, object]:
    with open("/proc/self/status") as file:
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    umask = os.umask(0)
    os.umask(umask)
    prctl = ctypes.CDLL(None).prctl
    death, reaper = ctypes.c_int(), ctypes.c_int()
    prctl(2, ctypes.byref(death), 0, 0, 0)
    prctl(37, ctypes.byref(reaper), 0, 0, 0)
    with open("/proc/self/environ", "rb") as environ, open("/proc/self/cmdline", "rb") as cmdline:
        seen = {"/proc/PID/environ": environ.read().decode("latin-1"), "/proc/PID/cmdline": cmdline.read().decode()}
    return {
        **seen,
        "parent-death signal": death.value,
        "is a subreaper": reaper.value,
        "is dumpable": prctl(3, 0, 0, 0, 0),
        "name": status["Name"],
        "threads": status["Threads"],
        # Less 32 and 33, which the C library catches for itself once there has been a thread.
        "signal masks": {name: int(status[name], 16) & ~(3 << 31) for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")},
        "handlers": {number: repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
        "timers": [signal.getitimer(which) for which in (0, 1, 2)],
        "wakeup descriptor": signal.set_wakeup_fd(-1),
        "umask": umask,
        "cwd": os.getcwd(),
        "executable": os.readlink("/proc/self/exe"),
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
        "inheritable": [os.get_inheritable(fd) for fd in range(3)],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name},
        "niceness": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    }


def interpreter() -> dict[str, object]:
    streams = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        parts = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through")
        streams[name] = [
            *(str(getattr(stream, part)) for part in parts),
            type(stream).__name__,
            type(stream.buffer).__name__,
            stream is getattr(sys, f"__{name}__"),
        ]
    return {
        "environ": dict(os.environ),
        "streams": streams,
        "sys.argv": sys.argv,
        "sys.orig_argv": sys.orig_argv,
        "sys.path": sys.path,
        "sys.flags": list(sys.flags),
        "sys.meta_path": [str(getattr(finder, "__name__", finder)) for finder in sys.meta_path],
        "sys.path_hooks": len(sys.path_hooks),
        "sys, other": {
            name: repr(getattr(sys, name))
            for name in ("executable", "prefix", "exec_prefix", "warnoptions", "_xoptions", "dont_write_bytecode")
        },
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            repr(sys.gettrace()),
            repr(sys.getprofile()),
        ],
        "settings": [
            sys.getrecursionlimit(),
            sys.getswitchinterval(),
            sys.getdlopenflags(),
            sys.getfilesystemencoding(),
            sys.getfilesystemencodeerrors(),
            sys.get_int_max_str_digits(),
        ],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.callbacks, gc.get_debug()],
        "gc.get_freeze_count()": gc.get_freeze_count() > 0,
        "atexit._ncallbacks()": atexit._ncallbacks(),
        "builtins": sorted(vars(builtins)),
        "frames below": len(inspect.stack()) - 3,
        "warnings.filters before imports": FILTERS_AT_START,
    }


def main_module() -> dict[str, object]:
    main = sys.modules["__main__"]
    loader = vars(main)["__loader__"]
    standard = {*sys.stdlib_module_names, "__mp_main__"}
    return {
        "__main__": sorted(name for name in vars(main) if name.startswith("__")),
        "__name__": __name__,
        "__file__": __file__,
        "__doc__": __doc__,
        "__package__": __package__,
        "__spec__": getattr(__spec__, "name", repr(__spec__)),
        "__cached__": repr(vars(main).get("__cached__")),
        "__builtins__": vars(main)["__builtins__"] is builtins,
        "__annotations__": repr(vars(main).get("__annotations__")),
        "__loader__": [type(loader).__name__, getattr(loader, "name", ""), getattr(loader, "path", "")],
        "main is main": vars(main) is globals(),
        "source": inspect.getsource(Marker),
        "code": [main_module.__code__.co_filename, main_module.__code__.co_flags],
        "sys.modules at the start, standard": sorted(m for m in MODULES_AT_START if m.partition(".")[0] in standard),
        "sys.modules at the start, others": sorted(m for m in MODULES_AT_START if m.partition(".")[0] not in standard),
    }


def libraries() -> dict[str, object]:
    import multiprocessing
    import threading

    before = importlib.util.find_spec("torch")
    assert before is not None
    assert "torch" not in sys.modules
    first = {"find_spec": [before.name, before.origin, before.submodule_search_locations, before.has_location]}

    import torch

    main = threading.main_thread()
    others = {name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names}
    return {
        **first,
        "torch": [torch.__file__, torch.__spec__.name, type(torch.__loader__).__name__, torch.get_num_threads()],
        "torch settings": [str(torch.get_default_dtype()), torch.get_num_interop_threads(), torch.is_grad_enabled()],
        "torch seed was not set": torch.initial_seed() == torch.default_generator.initial_seed(),
        "sys.modules after import torch, others": sorted(others),
        "main thread": [
            main is threading.current_thread(),
            main.name,
            main.ident == threading.get_ident(),
            main.native_id == os.getpid(),
            threading.active_count(),
        ],
        "multiprocessing": [
            multiprocessing.current_process().name,
            repr(multiprocessing.parent_process()),
            len(multiprocessing.current_process().authkey),
            multiprocessing.active_children(),
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.get_all_start_methods(),
        ],
    }


if __name__ == "__main__":
    seen = {**process(), **interpreter(), **main_module()}
    print(json.dumps({**seen, **(libraries() if sys.argv[-1] == "libraries" else {})}))
