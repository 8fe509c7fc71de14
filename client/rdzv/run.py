"""The command `rdzvrun`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rdzv.options import Options

STOPPED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    """Return the exit code: 0, the root cause's, 128 + n after a signal, 2 for a command line that makes no sense."""
    began_at = time.monotonic()
    _exit_on_signals()  # before anything that takes time: imports, too
    _fill_stdio()
    from rdzv.options import UsageError, parse

    try:
        options = parse(sys.argv[1:], os.environ)
    except UsageError as error:
        print(f"rdzvrun: error: {error}", file=sys.stderr)
        return 2
    from rdzv.interpreter import problem

    if text := problem(options, os.environ):
        print(f"rdzvrun: error: {text}", file=sys.stderr)
        return 2
    import asyncio

    asyncio.run(_run(options, began_at))


def _exit_on_signals() -> None:
    """Exit with 128 + n on a signal for as long as there is nothing to stop. One that is ignored stays so."""

    def exit_now(number: int, _: Any) -> None:
        os._exit(128 + number)

    for number in STOPPED_BY:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_now)


def _fill_stdio() -> None:
    """A descriptor that was closed at the start would be given to the next file that is opened, and workers would
    write into that."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


async def _run(options: Options, began_at: float) -> NoReturn:
    from rdzv.console import Console
    from rdzv.launcher import Launcher
    from rdzv.model import Say, Topic
    from rdzv.outlet import Outlet
    from rdzv.processes.spawner_process import SpawnError
    from rdzv.standalone import NotServing

    name = "rdzvrun" if options.standalone else options.node_name
    console = Console(name, Outlet(2, name))
    try:
        # First of all: nodes of one job that were given different ids are found by comparing these lines.
        why = "" if options.standalone or options.run_id_given else " (the scheduler's job id; no --rdzv-id given)"
        console.say(Say(Topic.NEWS, f"run id {options.run_id}{why}"), began_at)
        for note in options.notes:
            console.say(Say(Topic.WARN, note), began_at)
        code = await Launcher(options, os.environ, console, began_at).run()
    except (NotServing, SpawnError) as error:
        console.say(Say(Topic.WARN, str(error)), began_at)
        code = 1
    finally:
        console.close()
    # Here, where signals still have handlers that do nothing any more: the end of an event loop gives them back to the
    # system, and a late SIGTERM would take the place of the code.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
