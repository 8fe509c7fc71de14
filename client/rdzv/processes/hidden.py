"""Modules that are imported already, and of which a script is to notice nothing before it imports them itself.

Only then do they appear in sys.modules, with all that came with them when they were imported. So a script still decides
by what it imports, and may still set variables like OMP_NUM_THREADS before that. The standard library is not hidden:
the interpreter itself looks for parts of it in sys.modules.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType


class Recorder:
    """Watches imports from when it is made until `hide`, and from `resume` until the next one."""

    def __init__(self) -> None:
        self._before = frozenset(sys.modules)
        self._roots: set[str] = set()
        self._begun: dict[str, frozenset[str]] = {}  # module → what was in sys.modules when its import began
        sys.meta_path.insert(0, self)

    def watch(self, name: str) -> None:
        """Will be asked for by this name. Top-level names need not be told."""
        self._roots.add(name)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if ("." not in name or name in self._roots) and name not in self._begun:
            self._begun[name] = frozenset(sys.modules)

    def resume(self, shelf: Shelf) -> None:
        """Puts what was hidden back into sys.modules, to import more; `shelf` is of no use any more."""
        sys.modules.update(shelf.clear())
        sys.meta_path.insert(0, self)

    def hide(self) -> Shelf:
        """Takes everything that is new since this was made out of sys.modules, less the standard library."""
        sys.meta_path.remove(self)
        # A module moves to the end of sys.modules when its import is done: whatever it needed stands before it.
        names = [name for name in sys.modules if name not in self._before and not _is_standard(name)]
        place = {name: number for number, name in enumerate(names)}
        company = {
            name: [other for other in names[: place[name] + 1] if other not in begun]
            for name, begun in self._begun.items()
            if name in place
        }
        return Shelf({name: sys.modules.pop(name) for name in names}, company)


class Shelf:
    """The hidden modules; a finder that gives them back."""

    def __init__(self, modules: dict[str, ModuleType], company: Mapping[str, Sequence[str]]) -> None:
        self._modules = modules
        self._company = company  # module → itself and what its import brought with it
        self._on_return: dict[str, Callable[[ModuleType], None]] = {}

    def get(self, name: str) -> ModuleType | None:
        """A module, wherever it is."""
        return self._modules.get(name) or sys.modules.get(name)

    def clear(self) -> dict[str, ModuleType]:
        """Return all modules, which it has no longer, in the order in which they were imported."""
        modules, self._modules = self._modules, {}
        return modules

    def on_return(self, name: str, act: Callable[[ModuleType], None]) -> None:
        """Call `act` with the module once a script has it."""
        self._on_return[name] = act

    def open(self) -> None:
        """From here on who imports a hidden module gets it."""
        if self._modules:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Looking for a module is not importing it: nothing is given back here.
        module = self._modules.get(name)
        if module is None:
            return None
        known = getattr(module, "__spec__", None)
        spec = importlib.machinery.ModuleSpec(name, self, origin=getattr(known, "origin", None))  # type: ignore[arg-type]
        spec.submodule_search_locations = getattr(known, "submodule_search_locations", None)
        spec.has_location = getattr(known, "has_location", False)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """The import system takes from sys.modules what is there after this."""
        self._give_back(self._company.get(module.__name__, ()))
        if module.__name__ in self._modules:  # it came as a part of something else: then the whole is wanted
            self._give_back(list(self._modules))

    def _give_back(self, names: Iterable[str]) -> None:
        returned = [name for name in names if name in self._modules]
        sys.modules.update({name: self._modules.pop(name) for name in returned})
        if not self._modules and self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in returned:
            if name in self._on_return:
                self._on_return.pop(name)(sys.modules[name])


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names or name == "__mp_main__"


# Read when torch is imported. The first two can be made good for later.
_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
_AT_IMPORT = ("GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_JIT", "PYTORCH_NO_CUDA_MEMORY_CACHING",
              "TORCH_CPP_LOG_LEVEL", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES",
              "TORCH_TRACE")  # fmt: skip


class TorchVariables:
    """Makes good for what a script changes in its environment before it imports a torch that was imported long ago."""

    def __init__(self) -> None:
        self._seen = dict(os.environ)

    def catch_up(self, torch: ModuleType) -> None:
        """The script has just imported torch."""
        changed = {
            name
            for name in {*self._seen, *os.environ}
            if name.startswith(_AT_IMPORT) and os.environ.get(name) != self._seen.get(name)
        }
        if changed.intersection(_THREADS):
            torch.set_num_threads(_threads(with_mkl=torch.backends.mkl.is_available()))
        if late := sorted(changed.difference(_THREADS)):
            sys.stderr.write(
                f"rdzvrun: {', '.join(late)} set by the script before it imports torch: too late, because torch is "
                "imported in advance; set it in rdzvrun's environment, or use --start-method=exec\n"
            )


def _threads(*, with_mkl: bool) -> int:
    """As many as torch would have by the environment as it is now. MKL has a variable of its own, and takes no more
    than there are cores."""
    cpus = os.sched_getaffinity(0)
    given = (os.environ.get(name, "").partition(",")[0].strip() for name in (_THREADS if with_mkl else _THREADS[1:]))
    count = next((int(text) for text in given if text.isdecimal() and int(text)), len(cpus))
    return min(count, _cores(cpus)) if with_mkl else count


def _cores(cpus: Iterable[int]) -> int:
    siblings = set()
    for cpu in cpus:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                siblings.add(file.read())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)
