"""The supervisor and its spawner, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rdzv.processes import supervisor
from rdzv.processes.facts import HelperEnded, LeftBehind, SpawnerEnded, SpawnFailed, WorkerEnded
from tests.e2e import difficult_worker
from tests.e2e.processes_kit import LIMIT_S, cmdline, fds, marked, node, script, state, until

HERE = Path(__file__).parent
DIFFICULT = HERE / "difficult_worker.py"
DRIVER = HERE / "node_driver.py"
PROBE = HERE / "process_probe.py"
HOUR_S = 3600.0
SLEEP = "import time; time.sleep(3600)"


# ---------------------------------------------------------------------------------------------------- starting


def test_ends_are_told_as_they_were() -> None:
    async def story() -> None:
        async with node() as n:
            loop = asyncio.get_running_loop()
            before = loop.time()
            codes = [
                "pass",
                "raise SystemExit(3)",
                "import os; os.abort()",
                "import os; os.kill(os.getpid(), 9)",
                "import os; os._exit(255)",
            ]
            await n.supervisor.spawn("r1", [n.python(rank, code) for rank, code in enumerate(codes)])
            ends = {}
            for _ in codes:
                end = await n.fact(WorkerEnded)
                assert end.round_uid == "r1"
                assert before <= end.at <= loop.time()
                ends[end.local_rank] = (end.exit_code, end.signal)
            assert ends == {0: (0, 0), 1: (3, 0), 2: (0, signal.SIGABRT), 3: (0, signal.SIGKILL), 4: (255, 0)}
            assert n.supervisor.alive() == 0

    asyncio.run(story())


def test_alive_and_pids_follow_the_workers() -> None:
    async def story() -> None:
        async with node() as n:
            await n.supervisor.spawn("r1", [n.python(rank, SLEEP) for rank in range(2)])
            pids = n.supervisor.pids()
            # Its exec is known to have succeeded an instant before its environment can be read.
            await until(lambda: sorted(pids.values()) == sorted(marked(n.mark)), "they are those that were started")
            os.kill(pids[1], signal.SIGKILL)
            end = await n.fact(WorkerEnded)
            assert (end.local_rank, n.supervisor.alive(), n.supervisor.pids()) == (1, 1, {0: pids[0]})

    asyncio.run(story())


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("missing", "No such file or directory"),
        ("forbidden", "Permission denied"),
        ("orphaned", "interpreter"),
        ("nonsense", "Exec format error"),
    ],
)
def test_a_program_that_cannot_run_is_named_and_nobody_is_left(tmp_path: Path, program: str, text: str) -> None:
    script(tmp_path / "forbidden", ["#!/bin/sh"])
    script(tmp_path / "orphaned", ["#!/no/such/interpreter"]).chmod(0o755)
    script(tmp_path / "nonsense", ["no first line"]).chmod(0o755)

    async def story() -> None:
        async with node() as n:
            with pytest.raises(SpawnFailed, match=text) as caught:
                await n.supervisor.spawn("r1", [n.python(0, SLEEP), n.worker(1, tmp_path / program)])
            assert caught.value.local_rank == 1
            assert str(tmp_path / program) in caught.value.text
            assert (n.supervisor.alive(), marked(n.mark)) == (0, [])
            # The failed round was never there: the first fact is of the next one.
            await n.supervisor.spawn("r2", [n.worker(0, "true")])
            assert (await n.fact(WorkerEnded)).round_uid == "r2"

    asyncio.run(story())


def test_a_descriptor_that_is_not_open_fails_its_worker() -> None:
    async def story() -> None:
        async with node() as n:
            reader, writer = os.pipe()
            os.close(reader)
            os.close(writer)
            command = n.worker(0, "true")
            closed = type(command)(local_rank=0, argv=command.argv, env=command.env, stdout=writer)
            with pytest.raises(SpawnFailed, match="Bad file descriptor"):
                await n.supervisor.spawn("r1", [closed])

    asyncio.run(story())


@pytest.mark.parametrize("shell", ["", "trap '' HUP INT; umask 027; ulimit -Sn 300; cd /; exec 7</dev/null;"])
def test_a_worker_starts_as_it_would_from_the_shell(tmp_path: Path, shell: str) -> None:
    """Also where the launcher is under nohup, in the background, or with a small limit of open files."""

    def run(name: str, *words: object) -> dict[str, object]:
        command = shlex.join(map(str, [sys.executable, *words, tmp_path / name]))
        env = {b"ODD": b"\xff\xfe=\xe9", **os.environb, b"PYTHONPATH": os.fsencode(os.pathsep.join(sys.path))}
        subprocess.run(["bash", "-c", shell + command], check=True, env=env, stdin=subprocess.DEVNULL)
        seen: dict[str, object] = json.loads((tmp_path / name).read_text())
        return seen

    worker = run("worker", DRIVER, "run", sys.executable, "-u", PROBE)
    plain = run("plain", "-u", PROBE)
    assert worker.pop("leads")
    plain.pop("leads")
    for words in (worker.pop("argv"), worker.pop("orig_argv"), plain.pop("argv"), plain.pop("orig_argv")):
        assert isinstance(words, list)
        assert words[-2] == str(PROBE)
    if "7<" in shell:  # a plain process inherits what the shell left open; a worker only its stdio
        inherited = plain["fds"]
        assert isinstance(inherited, list)
        inherited.remove(7)
    assert worker == plain


# ---------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("wishes", [[], ["deaf"], ["stopped"]])
def test_stop_leaves_nobody_but_helpers(wishes: list[str]) -> None:
    async def story() -> None:
        async with node() as n:
            helper = await n.supervisor.start_helper("h", [sys.executable, "-c", SLEEP], n.env())
            await n.supervisor.spawn("r1", [n.worker(rank, sys.executable, DIFFICULT, *wishes) for rank in range(2)])
            await until(lambda: len(marked(n.mark)) >= 2 * difficult_worker.PROCESSES + 1, "all have started")
            if "stopped" in wishes:
                pids = n.supervisor.pids().values()
                await until(lambda: {state(pid) for pid in pids} == {"T"}, "the workers are stopped")
            assert await n.supervisor.stop(signal=signal.SIGTERM, grace_s=0.2) == 0
            assert (n.supervisor.alive(), marked(n.mark)) == (0, [helper.pid])
            ends = [await n.fact(WorkerEnded) for _ in range(2)]
            assert {end.local_rank for end in ends} == {0, 1}
            if wishes:
                assert {end.signal for end in ends} == {signal.SIGKILL}
            else:
                assert {end.signal for end in ends} == {signal.SIGTERM}
            assert n.facts.empty()

    asyncio.run(story())


def test_a_worker_may_end_in_its_own_way_within_the_grace(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); print('up', flush=True)\n"

    async def story() -> None:
        async with node() as n:
            with (tmp_path / "out").open("w") as out:
                command = n.python(0, code + "while True: time.sleep(60)")
                command = type(command)(local_rank=0, argv=command.argv, env=command.env, stdout=out.fileno())
                await n.supervisor.spawn("r1", [command])
            await until(lambda: (tmp_path / "out").read_text(), "the worker has its handler")
            assert await n.supervisor.stop(signal=signal.SIGUSR1, grace_s=HOUR_S) == 0
            assert (await n.fact(WorkerEnded)).exit_code == 7

    asyncio.run(story())


def test_a_stopped_worker_still_gets_to_obey() -> None:
    async def story() -> None:
        async with node() as n:
            await n.supervisor.spawn("r1", [n.worker(0, "sleep", "3600")])
            pid = n.supervisor.pids()[0]
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: state(pid) == "T", "the worker is stopped")
            assert await n.supervisor.stop(grace_s=HOUR_S) == 0
            assert (await n.fact(WorkerEnded)).signal == signal.SIGTERM

    asyncio.run(story())


def test_hurry_ends_the_grace() -> None:
    async def story() -> None:
        async with node() as n:
            await n.supervisor.spawn("r1", [n.worker(0, sys.executable, DIFFICULT, "deaf")])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES, "all have started")
            n.supervisor.hurry()  # no stop is in progress: nothing happens
            stop = asyncio.create_task(n.supervisor.stop(signal=signal.SIGTERM, grace_s=HOUR_S))
            # An answer to something asked later shows that the stop has begun, and that it does not block the spawner.
            helper = await n.supervisor.start_helper("h", ["true"], n.env())
            assert not stop.done()
            with pytest.raises(RuntimeError, match="being stopped"):
                await n.supervisor.spawn("r2", [n.worker(0, "true")])
            n.supervisor.hurry()
            assert await stop == 0
            assert set(marked(n.mark)) <= {helper.pid}

    asyncio.run(story())


def test_a_second_stop_joins_the_first_and_the_shorter_grace_counts() -> None:
    async def story() -> None:
        async with node() as n:
            await n.supervisor.spawn("r1", [n.worker(0, sys.executable, DIFFICULT, "deaf")])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES, "all have started")
            first = asyncio.create_task(n.supervisor.stop(signal=signal.SIGTERM, grace_s=HOUR_S))
            await asyncio.sleep(0)
            assert await n.supervisor.stop(signal=signal.SIGTERM, grace_s=0.0) == 0
            assert await first == 0
            assert await n.supervisor.stop(grace_s=0.0) == 0, "nothing to stop is nothing special"

    asyncio.run(story())


def test_what_a_dead_worker_left_behind_has_a_short_time_when_the_next_round_waits() -> None:
    """DataLoader processes of a dead worker end without being asked; who is deaf to that is killed soon."""

    async def story() -> None:
        async with node() as n:
            await n.supervisor.spawn("r1", [n.worker(0, sys.executable, DIFFICULT)])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES, "all have started")
            dead = n.supervisor.pids()[0]
            os.kill(dead, signal.SIGKILL)
            assert (await n.fact(WorkerEnded)).signal == signal.SIGKILL
            await until(lambda: len(_group(n.mark, dead)) <= 1, "its group is told to end, and does but for a deaf one")
            assert await n.supervisor.stop(grace_s=HOUR_S, next_round=True) == 0
            assert marked(n.mark) == []

    asyncio.run(story())


# It starts a child that takes its time to end, in its group or in a session of its own, and ends when told to.
PARENT = """
import os, signal, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    if sys.argv[2] == "session":
        os.setsid()
    def finish(*_):
        open(sys.argv[1] + ".told", "w").close()
        while not os.path.exists(sys.argv[1] + ".finish"):
            time.sleep(0.01)
        open(sys.argv[1], "w").write("saved")
        os._exit(0)
    signal.signal(signal.SIGTERM, finish)
    os.write(writer, b"x")
    while True:
        time.sleep(60)
os.read(reader, 1)
print("up", flush=True)
if sys.argv[3] == "succeeds":
    sys.exit(0)
def save(*_):
    if os.path.exists(sys.argv[1] + ".told"):
        os._exit(3)  # its child was told before it
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("where", ["group", "session"])
@pytest.mark.parametrize("how", ["succeeds", "is stopped"])
def test_what_a_worker_started_may_finish_after_it_within_the_grace(tmp_path: Path, where: str, how: str) -> None:
    """An uploader, a checkpoint writer, a data loader: they are told after the worker, and have the same deadline."""
    saved, told, finish = tmp_path / "saved", tmp_path / "saved.told", tmp_path / "saved.finish"

    async def story() -> None:
        async with node() as n:
            with (tmp_path / "out").open("w") as out:
                command = n.worker(0, sys.executable, "-c", PARENT, str(saved), where, how)
                command = type(command)(local_rank=0, argv=command.argv, env=command.env, stdout=out.fileno())
                await n.supervisor.spawn("r1", [command])
            await until(lambda: (tmp_path / "out").read_text(), "the worker is up")
            if how == "succeeds":
                assert (await n.fact(WorkerEnded)).exit_code == 0
            stop = asyncio.create_task(n.supervisor.stop(signal=signal.SIGTERM, grace_s=HOUR_S))
            await until(lambda: told.exists(), "the child is told to end")
            if how != "succeeds":
                assert (await n.fact(WorkerEnded)).exit_code == 0, "the worker was told first, and alone"
            left = await n.fact(LeftBehind)
            assert "pid" in left.names[0]
            assert HOUR_S - 60 < left.kill_s <= HOUR_S
            assert not stop.done()
            finish.touch()
            assert await stop == 0
            assert saved.read_text() == "saved"
            assert marked(n.mark) == []

    asyncio.run(story())


def test_at_the_deadline_what_is_left_behind_is_killed() -> None:
    async def story() -> None:
        async with node() as n:
            await n.supervisor.spawn("r1", [n.worker(0, sys.executable, DIFFICULT)])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES, "all have started")
            assert await n.supervisor.stop(signal=signal.SIGTERM, grace_s=0.5) == 0
            assert marked(n.mark) == []

    asyncio.run(story())


def _group(mark: str, leader: int) -> list[int]:
    members = []
    for pid in marked(mark):
        try:
            if os.getpgid(pid) == leader:
                members.append(pid)
        except ProcessLookupError:
            continue
    return members


# ---------------------------------------------------------------------------------------------------- helpers


def test_a_helper_gets_its_descriptors_and_nothing_else() -> None:
    code = "import os, json; os.write(3, json.dumps([os.readlink(f'/proc/self/fd/{n}') for n in range(5)]).encode())"

    async def story() -> None:
        async with node() as n:
            reader, writer = os.pipe()
            try:
                await n.supervisor.start_helper("h", [sys.executable, "-c", code], n.env(), [writer, reader])
                links = json.loads(await asyncio.to_thread(os.read, reader, 4096))
            finally:
                os.close(reader)
                os.close(writer)
            assert links[:3] == [os.devnull] * 3
            assert links[3] == links[4], "both ends of one pipe"
            end = await n.fact(HelperEnded)
            assert end == HelperEnded(name="h", exit_code=0, signal=0)

    asyncio.run(story())


def test_only_the_unasked_end_of_a_helper_is_a_fact() -> None:
    async def story() -> None:
        async with node() as n:
            argv = [sys.executable, "-c", SLEEP]
            helper = await n.supervisor.start_helper("h", argv, n.env())
            with pytest.raises(ValueError, match="'h'"):
                await n.supervisor.start_helper("h", argv, n.env())
            os.kill(helper.pid, signal.SIGKILL)
            assert await n.fact(HelperEnded) == HelperEnded(name="h", exit_code=0, signal=signal.SIGKILL)
            await n.supervisor.start_helper("h", argv, n.env())
            await n.supervisor.stop_helper("h")
            await n.supervisor.stop_helper("h")
            assert marked(n.mark) == []
            await n.supervisor.spawn("r1", [n.worker(0, "true")])
            await n.fact(WorkerEnded)
            assert n.facts.empty()

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- deaths above


def test_a_killed_spawner_takes_everything_along_and_the_next_one_serves() -> None:
    async def story() -> None:
        async with node() as n:
            await n.supervisor.start_helper("h", [sys.executable, "-c", SLEEP], n.env())
            await n.supervisor.spawn("r1", [n.worker(rank, sys.executable, DIFFICULT, "deaf") for rank in range(2)])
            await until(lambda: len(marked(n.mark)) >= 2 * difficult_worker.PROCESSES + 1, "all have started")
            dead = n.supervisor.spawner_pid
            os.kill(dead, signal.SIGKILL)
            assert "SIGKILL" in (await n.fact(SpawnerEnded)).text
            ends = [await n.facts.get() for _ in range(3)]
            assert marked(n.mark) == [], "told of their ends when they are gone, and all that descends from them"
            assert HelperEnded(name="h", exit_code=0, signal=signal.SIGKILL) in ends
            assert {(e.local_rank, e.signal) for e in ends if isinstance(e, WorkerEnded)} == {(0, 9), (1, 9)}
            await n.supervisor.spawn("r2", [n.worker(0, "true")])
            assert (await n.fact(WorkerEnded)).round_uid == "r2"
            assert n.supervisor.spawner_pid not in (0, dead)

    asyncio.run(story())


def test_a_spawner_that_dies_in_the_middle_fails_who_waits_for_it() -> None:
    async def story() -> None:
        async with node() as n:
            os.kill(n.supervisor.spawner_pid, signal.SIGSTOP)
            spawn = asyncio.create_task(n.supervisor.spawn("r1", [n.worker(0, "true")]))
            await until(lambda: n.supervisor.alive() == 1, "the worker is ordered")
            os.kill(n.supervisor.spawner_pid, signal.SIGKILL)
            with pytest.raises(SpawnFailed, match="spawner"):
                await spawn
            await n.fact(SpawnerEnded)
            assert n.supervisor.alive() == 0

            await n.supervisor.spawn("r2", [n.worker(0, sys.executable, DIFFICULT, "deaf")])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES, "all have started")
            stop = asyncio.create_task(n.supervisor.stop(grace_s=HOUR_S))
            await asyncio.sleep(0)
            os.kill(n.supervisor.spawner_pid, signal.SIGKILL)
            assert await stop == 0
            assert marked(n.mark) == []

    asyncio.run(story())


def test_signals_meant_for_a_launcher_do_not_end_the_spawner() -> None:
    async def story() -> None:
        async with node() as n:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                os.kill(n.supervisor.spawner_pid, number)
            await n.supervisor.spawn("r1", [n.worker(0, "true")])
            assert (await n.fact(WorkerEnded)).exit_code == 0

    asyncio.run(story())


@pytest.mark.parametrize("wishes", [[], ["deaf", "stopped"]])
def test_a_killed_launcher_leaves_nobody(wishes: list[str]) -> None:
    async def story() -> None:
        mark = f"launcher-{os.getpid()}-{'-'.join(wishes)}"
        env = {**os.environ, "RDZV_TEST_MARK": mark, "PYTHONPATH": os.pathsep.join(sys.path)}
        argv = [sys.executable, str(DRIVER), "wait", sys.executable, str(DIFFICULT), *wishes]
        driver = await asyncio.create_subprocess_exec(*argv, env=env, stdout=subprocess.PIPE)
        assert driver.stdout is not None
        spawner = int(await driver.stdout.readline())
        await until(lambda: len(marked(mark)) >= difficult_worker.PROCESSES + 2, "all have started")
        assert spawner in marked(mark)
        driver.kill()
        await driver.wait()
        await until(lambda: not marked(mark), "everything is gone, the spawner last")

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- in the long run


def test_rounds_leave_no_descriptors_behind() -> None:
    async def story() -> None:
        async with node() as n:

            async def round_trip(uid: str) -> tuple[int, int]:
                await n.supervisor.spawn(uid, [n.worker(rank, "sleep", "3600") for rank in range(2)])
                assert await n.supervisor.stop(grace_s=HOUR_S) == 0
                for _ in range(2):
                    assert (await n.fact(WorkerEnded)).signal == signal.SIGTERM
                with pytest.raises(SpawnFailed):
                    await n.supervisor.spawn(uid, [n.worker(0, "/no/such/program")])
                return fds(os.getpid()), fds(n.supervisor.spawner_pid)

            first = await round_trip("first")
            for number in range(40):
                last = await round_trip(f"r{number}")
            assert last == first

    asyncio.run(story())


def test_closing_takes_everything_along_and_gives_everything_back() -> None:
    async def story() -> None:
        before = fds(os.getpid())
        async with node() as n:
            await n.supervisor.start_helper("h", [sys.executable, "-c", SLEEP], n.env())
            await n.supervisor.spawn("r1", [n.worker(0, sys.executable, DIFFICULT, "deaf")])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES + 1, "all have started")
            await n.supervisor.close()
            await n.supervisor.close()
            assert (marked(n.mark), n.supervisor.spawner_pid, n.supervisor.alive()) == ([], 0, 0)
            assert n.facts.empty()
            with pytest.raises(SpawnFailed, match="closed"):
                await n.supervisor.spawn("r2", [n.worker(0, "true")])
        assert fds(os.getpid()) == before

    asyncio.run(story())


def test_a_spawner_that_is_stuck_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STUCK_S", 0.5)

    async def story() -> None:
        async with node() as n:
            await n.supervisor.spawn("r1", [n.worker(0, sys.executable, DIFFICULT, "deaf")])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES, "all have started")
            os.kill(n.supervisor.spawner_pid, signal.SIGSTOP)
            assert await asyncio.wait_for(n.supervisor.stop(grace_s=0.1), LIMIT_S) == 0
            assert marked(n.mark) == []
            await n.fact(SpawnerEnded)

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- leases


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_at_the_end_of_the_lease_everything_is_killed_though_launcher_and_spawner_are_stopped() -> None:
    async def story() -> None:
        async with node(fenced=True) as n:
            warden = n.supervisor
            warden.fence(boottime() + HOUR_S)
            await warden.spawn("r1", [n.worker(0, sys.executable, DIFFICULT, "deaf", "stopped")])
            await until(lambda: len(marked(n.mark)) >= difficult_worker.PROCESSES, "all have started")
            os.kill(warden.spawner_pid, signal.SIGSTOP)
            ends_at = boottime() + 1.0
            warden.fence(ends_at)
            # This loop is the launcher: while it does not run, it is stopped.
            while marked(n.mark):
                assert boottime() < ends_at + 60
                time.sleep(0.01)  # noqa: ASYNC251
            assert boottime() >= ends_at
            await n.fact(SpawnerEnded)
            end = await n.fact(WorkerEnded)
            assert end.signal == signal.SIGKILL
            assert await warden.stop(grace_s=HOUR_S) == 0
            warden.fence(None)
            await warden.spawn("r2", [n.python(0, "pass")])  # a new spawner
            assert (await n.fact(WorkerEnded)).exit_code == 0

    asyncio.run(story())


def test_a_lease_that_is_renewed_or_lifted_kills_nobody() -> None:
    async def story() -> None:
        async with node(fenced=True) as n:
            n.supervisor.fence(boottime() + 0.5)
            await n.supervisor.spawn("r1", [n.python(0, SLEEP)])
            n.supervisor.fence(boottime() + 1.0)
            n.supervisor.fence(None)
            helper = await n.supervisor.start_helper("h", [sys.executable, "-c", SLEEP], n.env())
            await asyncio.sleep(1.5)  # past all those instants
            assert state(helper.pid) not in ("", "Z")
            assert n.supervisor.alive() == 1

    asyncio.run(story())


def test_without_a_lease_the_keeper_has_no_pipe_and_no_clock_to_look_at() -> None:
    async def story() -> None:
        async with node() as n:
            argv = cmdline(n.supervisor.keeper_pid).split(b"\0")
            assert len([word for word in argv if word.isdigit()]) == 2  # the socket, and the limit of open files
            n.supervisor.fence(boottime() - 1.0)  # and nobody listens
            await n.supervisor.spawn("r1", [n.python(0, "pass")])
            assert (await n.fact(WorkerEnded)).exit_code == 0

    asyncio.run(story())
