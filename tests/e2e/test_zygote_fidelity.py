"""A worker that was forked from the zygote, or from its heir, against the same one run as `python -u script.py`: what
it sees, what it prints, how it ends. What may differ is listed here, and nothing else does; docs/zygote.md has the same
list for people.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

from rdzv.processes.facts import WorkerCommand, WorkerEnded, ZygoteEnded, ZygotePlan
from rdzv.processes.supervisor import Supervisor
from tests.e2e.fidelity.cases import SCRIPTS
from tests.e2e.processes_kit import LIMIT_S

pytestmark = pytest.mark.xdist_group("fidelity")  # who runs these runs all of them: the fixture is the work

FOLDER = Path(__file__).parent / "fidelity"
DOCUMENT = Path(__file__).parents[2] / "docs" / "zygote.md"
WAYS = ("zygote", "heir")
LATER = "torch._dynamo"  # what rdzvrun has an heir import
# Exits with 0 in a worker of the heir.
ASKS = f"""import sys
sys.exit(not any(hasattr(finder, "get") and finder.get("{LATER}") for finder in sys.meta_path))"""
AT_ONCE = 3  # of these processes; some of them start others

# What the probe may see otherwise in a forked worker: the item, and the words of docs/zygote.md.
MAY_DIFFER = {
    "parent-death signal": "a parent-death signal is set",
    "gc.get_freeze_count()": "`gc.get_freeze_count()`",
    "atexit._ncallbacks()": "callbacks that `atexit` counts",
    "frames below": "frames below the script's own",
    "sys.meta_path": "a finder of ours in `sys.meta_path`",
    "warnings.filters before imports": "warning filters that torch adds",
    "sys.modules at the start, standard": "modules of the standard library that torch needs",
}
_ADDRESS = re.compile("0x[0-9a-f]+")
# Scripts that show those frames.
SHOWS_FRAMES = ("faults", "dumps")

PLACES: dict[str, tuple[str, ...]] = {
    "relative": ("tree/probe.py", "--lr", "0.1", "", "libraries"),
    "dotted": ("./tree/../tree/./probe.py",),
    "absolute": ("{here}/tree/probe.py",),
    "link": ("tree/link.py",),
    "far link": ("links/far.py",),
    "linked directory": ("linked/probe.py",),
    "spaces": ("with spaces/my probe.py", "a b"),
    "zip": ("archive.zip", "libraries"),
    "directory": ("folder", "x"),
    "module": ("-m", "package.probe", "-m", "x", "libraries"),
    "package": ("-m", "package"),
}
NOWHERE: dict[str, tuple[str, ...]] = {
    "no such script": ("nowhere.py",),
    "no such module": ("-m", "package.nowhere"),
    "no such package": ("-m", "nowhere"),
    "package without main": ("-m", "bare"),
}


@dataclass(frozen=True)
class Outcome:
    code: int | None  # or -signal; None: it hung, and was killed
    stdout: str
    stderr: str


def _lay_out(here: Path) -> None:
    probe = (FOLDER / "probe.py").read_text()
    relative = probe.replace("if __name__ ==", "from . import neighbour\n\nif __name__ ==")
    files = {
        "tree/probe.py": probe,
        "with spaces/my probe.py": probe,
        "folder/__main__.py": probe,
        "package/__init__.py": "",
        "package/neighbour.py": "",
        "package/probe.py": relative,
        "package/__main__.py": relative,
        "bare/__init__.py": "",
        "links/nothing": "",
        "scripts/neighbour.py": "VALUE = 42",
        "asks.py": ASKS,
        "scripts/broken_module.py": "def f(:",
        "input": "a line\nand the rest",
        **{f"scripts/{name}.py": text for name, text in SCRIPTS.items()},
    }
    for name, text in files.items():
        (here / name).parent.mkdir(exist_ok=True, parents=True)
        (here / name).write_text(text)
    (here / "tree/link.py").symlink_to("probe.py")
    (here / "links/far.py").symlink_to("../tree/probe.py")
    (here / "linked").symlink_to("tree")
    with zipfile.ZipFile(here / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", probe)


def _commands(here: Path) -> dict[str, tuple[str, ...]]:
    """name → command line of each case."""
    found = {name: tuple(word.format(here=here) for word in words) for name, words in {**PLACES, **NOWHERE}.items()}
    found |= {name: (f"scripts/{name}.py",) for name in SCRIPTS}
    return {name: (sys.executable, "-u", *words) for name, words in found.items()}


class Runs:
    """All cases, run in one way."""

    def __init__(self, here: Path, env: Mapping[str, str], limits: Mapping[str, float] | None = None) -> None:
        """A case that takes longer than LIMIT_S, or than its own limit, is killed. It fails, and no other case does."""
        self._here = here
        self._env = env
        self._limits = limits or {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._ends: dict[str, asyncio.Future[int]] = {}

    async def _case(self, name: str, argv: Sequence[str], supervisor: Supervisor | None) -> Outcome:
        out, err = self._here / f"{name}.out", self._here / f"{name}.err"
        async with self._slots:
            with (self._here / "input").open() as stdin, out.open("wb") as stdout, err.open("wb") as stderr:
                if supervisor is None:
                    process = await asyncio.create_subprocess_exec(
                        *argv, stdin=stdin, stdout=stdout, stderr=stderr, env=self._env, start_new_session=True
                    )
                    code = await self._end(name, process.wait(), lambda: os.killpg(process.pid, signal.SIGKILL))
                else:
                    number = len(self._ends)  # each case has its own local rank, by which it can be killed
                    command = WorkerCommand(
                        local_rank=number,
                        fork=True,
                        argv=tuple(argv),
                        env=self._env,
                        stdin=stdin.fileno(),
                        stdout=stdout.fileno(),
                        stderr=stderr.fileno(),
                    )
                    self._ends[name] = asyncio.get_running_loop().create_future()
                    await supervisor.spawn(name, [command])
                    code = await self._end(name, self._ends[name], lambda: supervisor.signal(signal.SIGKILL, number))
        return Outcome(code, *(_ADDRESS.sub("0x", path.read_text(errors="replace")) for path in (out, err)))

    async def _end(self, name: str, end: Awaitable[int], kill: Callable[[], object]) -> int | None:
        """Return how a process ended; None if it had to be killed."""
        waiting = asyncio.ensure_future(end)
        done, _ = await asyncio.wait([waiting], timeout=self._limits.get(name, LIMIT_S))
        if not done:
            kill()
            await asyncio.wait_for(waiting, LIMIT_S)
        return waiting.result() if done else None

    def _told(self, fact: object) -> None:
        if isinstance(fact, WorkerEnded):
            self._ends[fact.round_uid].set_result(-fact.signal or fact.exit_code)
        else:
            assert not isinstance(fact, ZygoteEnded), fact

    async def all(
        self, commands: Mapping[str, tuple[str, ...]], way: str = "", names: Iterable[str] | None = None
    ) -> dict[str, Outcome]:
        """Run the cases of these names, or all. Way: "zygote", "heir"; empty: by exec."""
        chosen = [name for name in commands if names is None or name in names]
        supervisor = None
        if way:
            argv, later = commands["relative"], (LATER,) if way == "heir" else ()
            plan = ZygotePlan(worker_argv=argv, env=self._env, modules=("torch",), later=later, later_s=0.0)
            supervisor = await Supervisor.start(self._told, zygote=plan)
        try:
            asks = (*commands["ends"][:2], "asks.py")
            while way == "heir" and (await self._case("asks", asks, supervisor)).code != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.5)  # the heir tells nobody that it has come
            found = await asyncio.gather(*(self._case(name, commands[name], supervisor) for name in chosen))
        finally:
            if supervisor is not None:
                await supervisor.close()
        unclosed = self._here / "unclosed"
        found.append(Outcome(0, unclosed.read_text() if unclosed.exists() else "", ""))
        unclosed.unlink(missing_ok=True)
        return dict(zip([*chosen, "unclosed file"], found, strict=True))


Outcomes: TypeAlias = dict[str, dict[str, Outcome]]  # by way, "" for exec, and case


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """All selected cases run here, once: importing torch takes longer than all the rest."""
    here = tmp_path_factory.mktemp("fidelity")
    _lay_out(here)
    before = os.getcwd()
    os.chdir(here)
    try:
        env = {**os.environ, "OMP_NUM_THREADS": "2", "ODD": "\udcff=\udce9", "PYTHONPATH": ""}
        commands, names = _commands(here), _selected(request.session.items)
        yield {way: asyncio.run(Runs(here, env).all(commands, way, names)) for way in ("", *WAYS)}
    finally:
        os.chdir(before)


def _selected(items: Iterable[pytest.Item]) -> set[str]:
    """Return the cases that the selected tests look at. "unclosed file" is written by another one."""
    tests = [item for item in items if isinstance(item, pytest.Function) and "outcomes" in item.fixturenames]
    names = {str(test.callspec.params["name"]) for test in tests}
    return names | {"cleans_up"} if "unclosed file" in names else names


@pytest.mark.timeout(1200)  # the first to come runs everything
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SCRIPTS, *NOWHERE, "unclosed file"])
def test_a_script_does_the_same(outcomes: Outcomes, name: str, way: str) -> None:
    plain, forked = outcomes[""][name], outcomes[way][name]
    assert None not in (plain.code, forked.code), f"it did not end within {LIMIT_S:g} s"
    if name in SHOWS_FRAMES:
        assert forked.stderr.startswith(plain.stderr.rstrip("\n").partition("\n\nExtension modules")[0])
    else:
        assert forked.stderr == plain.stderr
    assert (forked.stdout, forked.code) == (plain.stdout, plain.code)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PLACES)
def test_a_script_sees_the_same(outcomes: Outcomes, name: str, way: str) -> None:
    plain, forked = outcomes[""][name], outcomes[way][name]
    assert (forked.stderr, forked.code) == (plain.stderr, plain.code) == ("", 0)
    seen, expected = json.loads(forked.stdout), json.loads(plain.stdout)
    assert {k: v for k, v in seen.items() if k not in MAY_DIFFER} == {
        k: v for k, v in expected.items() if k not in MAY_DIFFER
    }
    assert set(expected) >= set(MAY_DIFFER)
    assert set(expected["sys.modules at the start, standard"]) <= set(seen["sys.modules at the start, standard"])


@pytest.mark.parametrize("way", ["", "zygote"])
def test_a_script_that_hangs_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    scripts = {"hangs": "import signal\nsignal.pause()", "ends": "print('done')", "relative": ""}
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "input").touch()
    monkeypatch.chdir(tmp_path)
    commands = {name: (sys.executable, "-u", f"{name}.py") for name in scripts}
    found = asyncio.run(Runs(tmp_path, dict(os.environ), limits={"hangs": 0.5}).all(commands, way))
    assert found["hangs"].code is None
    assert found["ends"] == Outcome(0, "done\n", "")


def test_what_may_differ_is_documented() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    assert [words for words in MAY_DIFFER.values() if words not in text] == []
