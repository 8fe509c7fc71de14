"""What can be known of the workers' interpreter before it runs anything."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdzv.options import Options

ASK_S = 20.0  # an interpreter is up in some hundredths of a second, from a slow shared file system in some seconds
_CODE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def workers_python(environ: Mapping[str, str]) -> str:
    """Return the interpreter that workers run in, unless they are programs of their own."""
    return environ.get("PYTHON_EXEC") or sys.executable


def problem(options: Options, environ: Mapping[str, str]) -> str:
    """Return why workers cannot run, for people; empty: nothing is known to be wrong. torch is not imported for it."""
    if options.no_python:
        return ""  # what the program needs is its own business
    python = workers_python(environ)
    if python == sys.executable:
        found = importlib.util.find_spec("torch") is not None or _beside(options)
    else:
        found = _asked(python, environ)
    return "" if found else f"no torch in {python}: {python} -m pip install torch"


def _beside(options: Options) -> bool:
    """Return whether torch lies where the script's own modules are looked for first."""
    first = os.getcwd() if options.module else os.path.dirname(os.path.realpath(options.training_script))
    return importlib.machinery.PathFinder.find_spec("torch", [first]) is not None


def _asked(python: str, environ: Mapping[str, str]) -> bool:
    """Return what another interpreter says; True if it cannot be asked, for that is said where workers are started."""
    import subprocess  # here because few need it, and all who parse a command line import this file

    try:
        done = subprocess.run(
            [python, "-c", _CODE],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 1
