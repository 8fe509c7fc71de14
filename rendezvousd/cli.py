"""The command `rendezvousd`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from rendezvousd import logs
from rendezvousd.app import serve
from rendezvousd.config import ConfigError, load

USAGE = 2


def main() -> None:
    """Run the daemon; exit 0 when asked to stop, 2 when it cannot be started as told."""
    try:
        config = load(sys.argv[1:], os.environ)
        logs.setup(config.log_level, config.log_format)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(config))
    except* ConfigError as errors:
        print(f"rendezvousd: error: {_first(errors)}", file=sys.stderr)
        sys.exit(USAGE)


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform: slower, no less right
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
