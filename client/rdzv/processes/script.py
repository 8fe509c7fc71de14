"""Running a script in a forked process as `python -u script.py` would have run it in one of its own."""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
import types

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Command:
    """A command line: PYTHON [-u] SCRIPT ARGUMENT..., or with -m MODULE instead of the script."""

    def __init__(self, argv: list[str]) -> None:
        rest = argv[2:] if argv[1] == "-u" else argv[1:]
        self.argv = argv
        self.module = rest[1] if rest[0] == "-m" else None
        self.args = rest[1:] if self.module is None else rest[2:]
        self.script = rest[0]
        # As python makes it so, which is not to say that it is normalized.
        self.file = os.path.join(os.getcwd(), self.script)
        self.holds_main = self.module is None and _is_importable_from(self.file)

    @property
    def path0(self) -> str | None:
        """What is to be the first entry of sys.path; None: nothing."""
        if self.holds_main:
            return self.file
        if sys.flags.safe_path:
            return None
        return os.getcwd() if self.module is not None else os.path.dirname(os.path.realpath(self.script))

    def set_up(self, path: list[str]) -> None:
        """Set what is known before the script begins. `path`: sys.path without its first entry."""
        sys.orig_argv[:] = self.argv
        sys.argv[:] = [self.script, *self.args]  # -m, too, begins so
        sys.path[:] = path if self.path0 is None else [self.path0, *path]

    def run(self, pristine: Mapping[str, object]) -> None:
        """Run it. What it raises is raised, and shown by the interpreter as it would be without us."""
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        if "__mp_main__" in sys.modules:  # multiprocessing's name for the same
            sys.modules["__mp_main__"] = module
        namespace = module.__dict__
        namespace.clear()
        namespace.update(pristine, __doc__=None)
        if "__annotations__" in pristine:
            namespace["__annotations__"] = {}
        try:
            if self.module is None and not self.holds_main:
                self._run_file(namespace)
                return
            namespace["__loader__"] = importlib.machinery.BuiltinImporter
            for name in ("__file__", "__cached__"):
                namespace.pop(name, None)
            runpy._run_module_as_main(self.module or "__main__", self.module is not None)  # type: ignore[attr-defined]
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook = _without_us(sys.excepthook)
            raise

    def _run_file(self, namespace: dict[str, Any]) -> None:
        namespace["__file__"] = self.file
        namespace["__loader__"] = importlib.machinery.SourceFileLoader("__main__", self.file)
        try:
            with io.open_code(self.file) as file:
                source = file.read()
        except OSError as problem:
            sys.stderr.write(
                f"{self.argv[0]}: can't open file {self.file!r}: [Errno {problem.errno}] {problem.strerror}\n"
            )
            raise SystemExit(2) from None
        exec(compile(source, self.file, "exec", dont_inherit=True), namespace)


def _is_importable_from(path: str) -> bool:
    """Whether it is a directory or zip file, in which a __main__ is looked for."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _without_us(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's hook for what nobody catches, called with a traceback that begins in the script."""

    def shown(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            traceback = traceback.tb_next
        error.__traceback__ = sys.last_traceback = traceback
        sys.excepthook = hook
        hook(kind, error, traceback)

    return shown
