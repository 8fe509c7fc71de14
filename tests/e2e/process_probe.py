"""Writes down, as JSON into the file named by its argument, what a process can tell of how it was started."""

import json
import os
import resource
import sys


def main() -> None:
    with open("/proc/self/status") as file:
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    umask = os.umask(0)
    seen = {
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")},
        "umask": umask,
        "cwd": os.getcwd(),
        "environ": {name.decode("latin-1"): value.decode("latin-1") for name, value in os.environb.items()},
        "fds": [fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{fd}")],
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": list(sys.flags),
        "stdio": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)],
    }
    leads_its_group = os.getpgid(0) == os.getpid()
    with open(sys.argv[1], "w") as file:
        json.dump({**seen, "leads": leads_its_group}, file)


if __name__ == "__main__":
    main()
