"""A worker that was forked from the zygote, or from its heir, against the same one run as `python -u script.py`: what
it sees, what it prints, how it ends. What may differ is listed here, and nothing else does; docs/zygote.md has the same
list for people.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
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
    code: int  # or -signal
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

    def __init__(self, here: Path, env: Mapping[str, str]) -> None:
        self._here = here
        self._env = env
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
                    code = await asyncio.wait_for(process.wait(), LIMIT_S)
                else:
                    command = WorkerCommand(
                        local_rank=0,
                        fork=True,
                        argv=tuple(argv),
                        env=self._env,
                        stdin=stdin.fileno(),
                        stdout=stdout.fileno(),
                        stderr=stderr.fileno(),
                    )
                    self._ends[name] = asyncio.get_running_loop().create_future()
                    await supervisor.spawn(name, [command])
                    code = await asyncio.wait_for(self._ends[name], LIMIT_S)
        return Outcome(code, *(_ADDRESS.sub("0x", path.read_text(errors="replace")) for path in (out, err)))

    def _told(self, fact: object) -> None:
        if isinstance(fact, WorkerEnded):
            self._ends[fact.round_uid].set_result(-fact.signal or fact.exit_code)
        else:
            assert not isinstance(fact, ZygoteEnded), fact

    async def all(self, commands: Mapping[str, tuple[str, ...]], way: str = "") -> dict[str, Outcome]:
        """Way: "zygote", "heir"; empty: by exec."""
        supervisor = None
        if way:
            argv, later = commands["relative"], (LATER,) if way == "heir" else ()
            plan = ZygotePlan(worker_argv=argv, env=self._env, modules=("torch",), later=later, later_s=0.0)
            supervisor = await Supervisor.start(self._told, zygote=plan)
        try:
            asks = (*commands["ends"][:2], "asks.py")
            while way == "heir" and (await self._case("asks", asks, supervisor)).code:  # noqa: ASYNC110
                await asyncio.sleep(0.5)  # the heir tells nobody that it has come
            found = await asyncio.gather(*(self._case(name, argv, supervisor) for name, argv in commands.items()))
        finally:
            if supervisor is not None:
                await supervisor.close()
        found.append(Outcome(0, (self._here / "unclosed").read_text(), ""))
        (self._here / "unclosed").unlink()
        return dict(zip([*commands, "unclosed file"], found, strict=True))


Outcomes: TypeAlias = dict[str, dict[str, Outcome]]  # by way, "" for exec, and case


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Everything is run once here: importing torch takes longer than all the rest."""
    here = tmp_path_factory.mktemp("fidelity")
    _lay_out(here)
    before = os.getcwd()
    os.chdir(here)
    try:
        env = {**os.environ, "OMP_NUM_THREADS": "2", "ODD": "\udcff=\udce9", "PYTHONPATH": ""}
        commands = _commands(here)
        yield {way: asyncio.run(Runs(here, env).all(commands, way)) for way in ("", *WAYS)}
    finally:
        os.chdir(before)


@pytest.mark.timeout(600)  # the first to come runs everything
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SCRIPTS, *NOWHERE, "unclosed file"])
def test_a_script_does_the_same(outcomes: Outcomes, name: str, way: str) -> None:
    plain, forked = outcomes[""][name], outcomes[way][name]
    if name in SHOWS_FRAMES:
        assert forked.stderr.startswith(plain.stderr.rstrip("\n").partition("\n\nExtension modules")[0])
    else:
        assert forked.stderr == plain.stderr
    assert (forked.stdout, forked.code) == (plain.stdout, plain.code)


@pytest.mark.timeout(600)
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


def test_what_may_differ_is_documented() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    assert [words for words in MAY_DIFFER.values() if words not in text] == []
