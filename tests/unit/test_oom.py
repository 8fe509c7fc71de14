"""Counting the kernel's kills for lack of memory, in trees of files as Linux has them."""

from __future__ import annotations

from pathlib import Path

from rdzv.oom import moved, oom_kills


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_the_hosts_count_and_that_of_the_own_cgroup(tmp_path: Path) -> None:
    files = {
        "proc/vmstat": "pgfault 7\noom_kill 3\noom_kill_x 9\n",
        "proc/self/cgroup": "0::/job/step 1\n",
        "sys/fs/cgroup/memory.events": "oom 8\noom_kill 8\n",
        "sys/fs/cgroup/job/step 1/memory.events": "low 0\noom 2\noom_kill 2\noom_group_kill 0\n",
    }
    root = tree(tmp_path, files)
    before = oom_kills(root)
    assert before == (3, 2)
    tree(tmp_path, {"sys/fs/cgroup/job/step 1/memory.events": "oom_kill 3\n"})
    assert moved(before, oom_kills(root))


def test_in_a_container_the_cgroup_is_the_top_of_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.events": "oom_kill 5\n"}
    assert oom_kills(tree(tmp_path, files)) == (0, 5)


def test_version_1_has_it_elsewhere(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
        "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    }
    assert oom_kills(tree(tmp_path, files)) == (0, 4, 0)


def test_a_kernel_that_tells_nothing_has_killed_nobody(tmp_path: Path) -> None:
    assert oom_kills(tree(tmp_path, {"proc/self/cgroup": "\nnonsense\n"})) == (0,)
    assert not moved((0,), (0,))
    now = oom_kills()
    assert not moved(now, now)
