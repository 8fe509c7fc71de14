"""rdzvrun's command line: torchrun's options, ours, and one clear line for everything that cannot be."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from rdzv.arguments import ARGUMENTS, read
from rdzv.devices import DeviceError, count_devices
from rdzv.endpoints import Endpoint
from rdzv.options import Options, UsageError, entry_digest, parse

SCRIPT = __file__
TORCHRUN = [action for action in get_args_parser()._actions if action.dest != "help"]
TORCHRUN_OPTIONS = [action for action in TORCHRUN if action.option_strings]


# Where there is a scheduler, a daemon's job needs no other name.
SCHEDULED = {"FLUX_JOB_ID": "f1"}


def options(*argv: str, **environ: str) -> Options:
    return parse([*argv, SCRIPT], {**SCHEDULED, **environ})


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv if SCRIPT in argv else [*argv, SCRIPT], {**SCHEDULED, **environ})
    text = str(caught.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------------------------------ torchrun's options

# A value for each of torchrun's options, and the field that shows it.
SAMPLES: dict[str, tuple[str | None, Callable[[Options], object], object]] = {
    "nnodes": ("1:3", lambda o: (o.min_nodes, o.max_nodes), (1, 3)),
    "nproc_per_node": ("3", lambda o: o.nproc_per_node, 3),
    "rdzv_backend": ("c10d", lambda o: any("rdzv-backend" in n or "RDZV_BACKEND" in n for n in o.notes), True),
    "rdzv_endpoint": ("[::1]:7", lambda o: o.endpoints, (Endpoint("::1", 7),)),
    "rdzv_id": ("a/b c", lambda o: o.run_id, "a/b c"),
    "rdzv_conf": ("join_timeout=7", lambda o: o.rdzv_conf.join_s, 7.0),
    "standalone": (None, lambda o: o.standalone, True),
    "max_restarts": ("4", lambda o: o.max_restarts, 4),
    "monitor_interval": ("0.5", lambda o: o.monitor_interval_s, 0.5),
    "start_method": ("spawn", lambda o: o.start_method, "exec"),
    "event_log_handler": ("console", lambda o: o.event_log_handler, "console"),
    "role": ("trainer", lambda o: o.role, "trainer"),
    "module": (None, lambda o: o.module, True),
    "no_python": (None, lambda o: o.no_python, True),
    "run_path": (None, lambda o: o.run_path, True),
    "log_dir": ("/logs", lambda o: o.log_dir, "/logs"),
    "redirects": ("0:3,1:0", lambda o: o.redirects, "0:3,1:0"),
    "tee": ("3", lambda o: o.tee, "3"),
    "local_ranks_filter": ("0,2", lambda o: o.local_ranks_filter, (0, 2)),
    "duplicate_stdout_filters": ("a,b,,c", lambda o: o.duplicate_stdout_filters, ("a", "b,c")),
    "duplicate_stderr_filters": ("a", lambda o: o.duplicate_stderr_filters, ("a",)),
    "node_rank": ("2", lambda o: o.node_rank, 2),
    "master_addr": ("head", lambda o: o.endpoints, (Endpoint("head", 29400),)),
    "master_port": ("1234", lambda o: o.endpoints, (Endpoint("head", 1234),)),
    "local_addr": ("10.0.0.5", lambda o: o.local_addr, "10.0.0.5"),
    "logs_specs": ("mine", lambda o: o.logs_specs, "mine"),
    "numa_binding": ("core-complex", lambda o: o.numa_binding, "core-complex"),
    "signals_to_handle": ("SIGTERM,SIGUSR1", lambda o: o.signals_to_handle, ("SIGTERM", "SIGUSR1")),
    "shutdown_timeout": ("5", lambda o: o.shutdown_timeout_s, 5.0),
    "virtual_local_rank": (None, lambda o: o.virtual_local_rank, True),
}
# What makes a sample complete: the others say where the daemon is.
COMPANIONS = {"master_port": ["--master-addr=head", "--nnodes=2"], "master_addr": ["--nnodes=2"]}
WITHOUT_ENDPOINT = ("master_addr", "master_port", "rdzv_endpoint", "standalone")
WITHOUT_EFFECT = [  # at least not alone
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "logs_specs",
    "numa_binding",
    "rdzv_backend",
]


def companions(dest: str) -> list[str]:
    return COMPANIONS.get(dest, []) if dest in WITHOUT_ENDPOINT else ["--rdzv-endpoint=head"]


def test_every_option_of_torchrun_is_known_in_every_spelling() -> None:
    ours = {dest: {*argument.spellings, argument.short} for dest, argument in ARGUMENTS.items()}
    for action in TORCHRUN_OPTIONS:
        assert set(action.option_strings) <= ours[action.dest], action.dest
        assert (action.nargs == 0) == (ARGUMENTS[action.dest].value is None), action.dest
        assert isinstance(action, env | check_env) == ARGUMENTS[action.dest].variable, action.dest
    assert {action.dest for action in TORCHRUN} - set(ARGUMENTS) == {"training_script", "training_script_args"}
    assert set(SAMPLES) == {action.dest for action in TORCHRUN_OPTIONS}


@pytest.mark.parametrize(
    ("dest", "spelling"), [(action.dest, spelling) for action in TORCHRUN_OPTIONS for spelling in action.option_strings]
)
def test_each_spelling_means_the_same(dest: str, spelling: str) -> None:
    text, field, expected = SAMPLES[dest]
    given_apart = [spelling] if text is None else [spelling, text]
    assert field(options(*companions(dest), *given_apart)) == expected
    if text is not None and spelling.startswith("--"):
        assert field(options(*companions(dest), f"{spelling}={text}")) == expected


@pytest.mark.parametrize("dest", [action.dest for action in TORCHRUN_OPTIONS if isinstance(action, env | check_env)])
def test_each_option_has_its_variable_and_the_command_line_outranks_it(dest: str) -> None:
    text, field, expected = SAMPLES[dest]
    variable = f"PET_{dest.upper()}"
    assert field(options(*companions(dest), **{variable: "1" if text is None else text})) == expected
    empty = options("--rdzv-endpoint=head", **{variable: ""})
    assert empty == options("--rdzv-endpoint=head")
    if text is None:
        assert not field(options("--rdzv-endpoint=head", **{variable: "0"}))
        assert f"{variable}=maybe: expected 1 or 0" in refusal("--rdzv-endpoint=head", **{variable: "maybe"})
    else:
        given_on_line = options(*companions(dest), f"--{dest}={text}", **{variable: "bad value"})
        assert field(given_on_line) == expected


@pytest.mark.parametrize("dest", WITHOUT_EFFECT)
def test_what_is_not_acted_on_is_said_once(dest: str) -> None:
    notes = options("--rdzv-endpoint=head", f"--{dest}={SAMPLES[dest][0]}").notes
    assert len(notes) == 1
    assert notes[0].startswith(f"--{dest.replace('_', '-')}")
    assert "\n" not in notes[0]


def test_what_says_nothing_new_needs_no_note() -> None:
    quiet = ["--redirects=3", "--tee=0:1,1:0", "--event-log-handler=null", "--start-method=exec", "--log-dir=/logs"]
    quiet += ["--duplicate-stdout-filters=a", "--local-ranks-filter=0", "--signals-to-handle=SIGTERM,SIGUSR1"]
    assert options("--rdzv-endpoint=head", *quiet).notes == ()
    assert options("--rdzv-backend=rendezvousd").notes == ()


@pytest.mark.parametrize(
    ("given", "method", "note"),
    [
        ([], "zygote", ""),
        (["--start-method=forkserver"], "zygote", "--start-method=forkserver: taken as zygote"),
        (["--start-method=spawn"], "exec", "--start-method=spawn: taken as exec"),
        (["--no-python"], "exec", ""),
        (["--no-python", "--start-method=zygote"], "exec", "--start-method=zygote has no effect"),
        (["--start-method=exec", "--preload=numpy"], "exec", "--preload has no effect"),
        (["--start-method=exec", "--preload-later=numpy"], "exec", "--preload-later has no effect"),
    ],
)
def test_workers_are_forked_where_python_runs_source(given: list[str], method: str, note: str) -> None:
    found = options("--rdzv-endpoint=head", *given)
    assert found.start_method == method
    assert len(found.notes) == bool(note)
    assert all(each.startswith(note) for each in found.notes)


def test_preloads_are_modules() -> None:
    assert options("--preload=numpy, a.b_c,").preload == ("numpy", "a.b_c")
    assert "--preload=a/b: 'a/b' is no module" in refusal("--preload=a/b")
    assert options().preload_later == ("torch._dynamo",)
    assert options("--preload-later=").preload_later == ()
    assert options("--preload_later", "numpy,a.b_c").preload_later == ("numpy", "a.b_c")


def test_variables_of_torchrun_are_honoured_or_explained() -> None:
    assert options(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout_s == 7
    assert options("--shutdown-timeout=8", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout_s == 8
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x: expected" in refusal(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x")
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_HEALTH_CHECK_PORT"):
        assert [note for note in options(**{name: "1"}).notes if note.startswith(name)]


def test_the_defaults_are_torchruns() -> None:
    found = options()
    theirs = {action.dest: action.default for action in TORCHRUN_OPTIONS}
    assert (found.min_nodes, found.max_nodes) == (1, 1)
    assert found.nproc_per_node == int(theirs["nproc_per_node"])
    assert found.max_restarts == theirs["max_restarts"]
    assert found.role == theirs["role"]
    assert ",".join(found.signals_to_handle) == theirs["signals_to_handle"]
    assert found.shutdown_timeout_s == 30
    assert (found.tee, found.redirects, found.log_dir) == (theirs["tee"], theirs["redirects"], theirs["log_dir"])
    assert found.event_log_handler == theirs["event_log_handler"]
    assert found.monitor_interval_s == theirs["monitor_interval"]
    assert found.notes == ()


# ------------------------------------------------------------------------------------------------ script

SPLITS = [
    ["a.py"],
    ["a.py", "--nnodes", "7", "-m", "--", "x"],
    ["--nnodes", "2", "a.py", "--x=1", "-t"],
    ["--nnodes=2", "-m", "a.b", "-m", "--nproc-per-node"],
    ["-r", "3", "-t1", "a.py", "b.py"],
    ["--max_restarts", "-1", "a.py"],
    ["--role", "- a", "a.py"],
    ["-m", "--no-python", "a.py", ""],
    ["--", "a.py", "--x"],
    ["-", "--x"],
]


@pytest.mark.parametrize("argv", SPLITS)
def test_the_script_begins_where_torchrun_sees_it(argv: list[str]) -> None:
    theirs = get_args_parser().parse_args(argv)
    ours = read(argv, {})
    assert (ours.script, list(ours.script_args)) == (theirs.training_script, theirs.training_script_args)


@given(st.lists(st.sampled_from(["--nnodes", "-m", "-x", "", "a", "--", "--standalone", "--rdzv-conf=a", "-1"])))
def test_what_stands_behind_the_script_belongs_to_it(args: list[str]) -> None:
    found = parse(["--nproc-per-node=2", SCRIPT, *args], {})
    assert found.training_script_args == tuple(args)
    assert (found.nproc_per_node, found.module) == (2, False)


def test_the_script_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no training script"):
        parse(["--nnodes=1"], {})
    for missing in ("no_such.py", "/no/such.py"):
        with pytest.raises(UsageError, match=f"{missing}: no such file"):
            parse([missing], {})
    with pytest.raises(UsageError, match=r"without __main__\.py"):
        parse([str(tmp_path)], {})
    (tmp_path / "__main__.py").touch()
    assert parse([str(tmp_path)], {}).training_script == str(tmp_path)
    assert parse(["-m", "no.such"], {}).module
    assert parse(["--no-python", "no-such"], {}).no_python
    with pytest.raises(UsageError, match="exclude each other"):
        parse(["-m", "--no-python", "x"], {})


def test_the_digest_tells_programs_apart() -> None:
    def digest(*argv: str) -> bytes:
        return entry_digest(parse(argv, {}))

    assert digest(SCRIPT, "a") == digest("--nproc-per-node=2", os.path.relpath(SCRIPT), "a")
    different = [digest(SCRIPT, "ab"), digest(SCRIPT, "a", "b"), digest("-m", "ab"), digest("--no-python", "ab")]
    assert len(set(different)) == 4
    assert {len(found) for found in different} == {32}


def test_exit_codes_are_numbers_and_ranges() -> None:
    assert options("--no-retry-exit-codes=2, 64-66").no_retry_exit_codes == {2, 64, 65, 66}
    assert options("--no_retry_exit_codes", "255").no_retry_exit_codes == {255}
    assert options(PET_NO_RETRY_EXIT_CODES="3").no_retry_exit_codes == {3}
    assert options().no_retry_exit_codes == frozenset()


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("text", ["0", "2:1", "1:2:3", "a", "1:", ":1", "-1", "", "1.5", "0:1", "1_0", "9" * 5000])
def test_bad_numbers_of_nodes(text: str) -> None:
    assert f"--nnodes={text}: " in refusal(f"--nnodes={text}")
    assert "expected" in refusal("--nnodes", text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "two", "gpus", "cuda", "\u0663", "9" * 5000])
def test_bad_numbers_of_workers(text: str) -> None:
    assert f"--nproc-per-node={text}: expected" in refusal(f"--nproc-per-node={text}")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-restarts", "-1"),
        ("--max-restarts", "x"),
        ("--node-rank", "-1"),
        ("--master-port", "65536"),
        ("--shutdown-timeout", "-1"),
        ("--shutdown-timeout", "nan"),
        ("--start-method", "thread"),
        ("--numa-binding", "all"),
        ("--rdzv-backend", "mpi"),
        ("--redirects", "4"),
        ("--tee", "0:3,"),
        ("--local-ranks-filter", "0,a"),
        ("--signals-to-handle", "SIGFOO"),
        ("--monitor-interval", "x"),
        ("--on-daemon-loss", "die"),
        ("--local-addr", "10.0.0.1:5"),
        ("--console", "rank1"),
        *[("--no-retry-exit-codes", text) for text in ("0", "256", "3-2", "1,", "a", "-1", "1-2-3")],
    ],
)
def test_a_bad_value_is_named(flag: str, value: str) -> None:
    text = refusal(f"{flag}={value}")
    assert f"{flag}={value}: " in text
    assert "expected" in text


@pytest.mark.parametrize("text", ["host:", "host:65536", "host:abc", "http://h:1", "head:0", "a,", "[::1"])
@pytest.mark.parametrize("flag", ["--rdzv-endpoint", "--master-addr"])
def test_a_bad_endpoint_is_named(flag: str, text: str) -> None:
    found = refusal(flag, text, "--nnodes=2")
    assert flag in found
    assert text in found


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nproc-per-nodes=2"], "unknown option --nproc-per-nodes: did you mean --nproc-per-node?"),
        (["--nproc_per_nodes", "2"], "did you mean --nproc-per-node?"),
        (["--rdzv", "2"], "--rdzv may be --rdzv-endpoint or --rdzv-id or --rdzv-conf or --rdzv-backend: write it out"),
        (["--preloa=x"], "unknown option --preloa: did you mean --preload?"),
        (["-nnodes=2"], "unknown option -nnodes: did you mean --nnodes?"),
        (["--learning-rate=1"], "options of the training script go behind"),
        (["--standalone=1"], "--standalone takes no value"),
        (["--nnodes", "--standalone"], "--nnodes expects a value"),
        (["--on-daemon-loss=stop", "--rdzv-conf=retry_max=2", "train.py"], "retry_max=2 and --on-daemon-loss=stop"),
        (["--rdzv-id", "x" * 257], "257 bytes"),
        (["--rdzv-id", "a\nb"], "--rdzv-id=a\\nb: expected printable"),
        (["--role", "\udcff"], "UTF-8"),
        (["--nnodes=2"], "--nnodes=2 needs a daemon"),
        (["--nnodes=1:4", "--master-port=5"], "--rdzv-endpoint=HOST[:PORT]"),
        (["--nnodes=2", "--standalone"], "--nnodes=2: --standalone is for one node"),
    ],
)
def test_a_mistake_is_explained(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


@pytest.mark.parametrize(
    ("argv", "dest", "text"),
    [
        (["--nnode=1", "train.py"], "nnodes", "1"),
        (["--nproc_per", "3", "train.py"], "nproc_per_node", "3"),
        (["--nproc", "3", "train.py"], "nproc_per_node", "3"),
        (["--max-r=4", "train.py"], "max_restarts", "4"),
        (["--master_p", "29500", "train.py"], "master_port", "29500"),
        (["--no_p", "train.py"], "no_python", "1"),
        (["--no-p", "train.py"], "no_python", "1"),
    ],
)
def test_a_beginning_that_is_one_of_torchruns_options_alone_means_it(argv: list[str], dest: str, text: str) -> None:
    line = read(argv, {})
    assert (line.given[dest].text, line.script) == (text, "train.py")


def test_a_beginning_that_an_option_of_ours_shares_is_still_torchruns() -> None:
    """--no-retry-exit-codes begins with --no-, too."""
    assert read(["--no-", "train.py"], {}).given["no_python"].text == "1"


def test_the_options_that_are_ours_alone_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import get_args_parser

    theirs = {option.strip("-").replace("-", "_") for a in get_args_parser()._actions for option in a.option_strings}
    newer = {"numa_binding", "shutdown_timeout", "signals_to_handle", "virtual_local_rank", "event_log_handler"}
    for dest, argument in ARGUMENTS.items():
        assert argument.ours == (dest not in theirs) or dest in newer, dest


def test_help_and_version_end_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help", "--version"):
        with pytest.raises(SystemExit) as caught:
            parse([flag], {})
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert "rdzvrun" in out
        assert flag == "--version" or all(f"--{argument.name}" in out for argument in ARGUMENTS.values())


# ------------------------------------------------------------------------------------------------ where


def test_one_node_without_endpoint_is_standalone() -> None:
    for argv in ([], ["--nnodes=1:1"], ["--standalone"], ["--rdzv-endpoint=localhost:0"], ["--rdzv-endpoint="]):
        found = options(*argv)
        assert (found.standalone, found.endpoints, found.run_id_given) == (True, (), False), argv
        assert len(found.run_id) == 36
        assert found.notes == ()
    found = options("--on-daemon-loss=stop")
    assert (found.on_daemon_loss, len(found.notes)) == ("continue", 1), "its daemon dies with it"
    assert options().run_id != options().run_id
    named = options("--rdzv-id=mine")
    assert (named.run_id, named.run_id_given) == ("mine", True)


def test_at_a_daemon_the_job_is_named_or_has_the_name_that_a_scheduler_gave_it() -> None:
    """One name for all that give none would make one world of strangers' nodes."""
    found = options("--rdzv-endpoint=a,b:1", "--nnodes=1:4")
    assert found.endpoints == (Endpoint("a", 29400), Endpoint("b", 1))
    assert (found.standalone, found.run_id, found.run_id_given) == (False, "f1", False)
    assert (found.min_nodes, found.max_nodes) == (1, 4)
    requeued = parse(["--rdzv-endpoint=a", SCRIPT], {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"})
    assert (requeued.run_id, requeued.submission) == ("12", "12+1"), "the name is the same in all attempts"
    with pytest.raises(UsageError, match="--rdzv-id is missing"):
        parse(["--rdzv-endpoint=a", SCRIPT], {})


def test_standalone_outranks_what_else_is_said_of_nodes_and_endpoints() -> None:
    found = options("--standalone", "--nnodes=1:4", "--rdzv-endpoint=head")
    assert (found.min_nodes, found.max_nodes, found.endpoints) == (1, 1, ())
    assert len(found.notes) == 2


def test_the_master_is_the_endpoint_when_there_is_no_other() -> None:
    assert options("--master-addr=[::1]", "--master-port=5", "--nnodes=2").endpoints == (Endpoint("::1", 5),)
    assert options("--master-addr=head").endpoints == (Endpoint("head", 29400),)
    both = options("--master-addr=head", "--rdzv-endpoint=other")
    assert both.endpoints == (Endpoint("other", 29400),)
    assert both.notes == ("--master-addr has no effect: --rdzv-endpoint is given",)
    for here in ("127.0.0.1", "localhost", os.uname().nodename):
        alone = options("--nnodes=1", f"--master-addr={here}", "--master-port=6001")
        assert alone.standalone, here
        assert len(alone.notes) == 2
    assert options("--master-addr=localhost", "--nnodes=2").endpoints == (Endpoint("localhost", 29400),)


# ------------------------------------------------------------------------------------------------ counting


def test_cpus_are_counted_as_torchrun_counts_them() -> None:
    assert options("--nproc-per-node=cpu").nproc_per_node == len(os.sched_getaffinity(0))


def test_accelerators_are_counted_or_their_absence_is_said() -> None:
    import torch

    environ = dict(os.environ)
    auto = parse(["--nproc-per-node=auto", SCRIPT], environ).nproc_per_node
    assert auto == (torch.accelerator.device_count() or len(os.sched_getaffinity(0)))
    if torch.cuda.device_count():
        assert parse(["--nproc-per-node=gpu", SCRIPT], environ).nproc_per_node == torch.cuda.device_count()
    hidden = environ | {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(UsageError, match=r"--nproc-per-node=gpu: this host has no GPU that torch can use"):
        parse(["--nproc-per-node=gpu", SCRIPT], hidden)


def test_each_worker_with_a_gpu_of_its_own_needs_as_many_as_are_visible() -> None:
    assert options("--virtual-local-rank", "--nproc-per-node=2", CUDA_VISIBLE_DEVICES="3,4").virtual_local_rank
    assert "CUDA_VISIBLE_DEVICES=3,4 has fewer" in refusal(
        "--virtual-local-rank", "--nproc-per-node=3", CUDA_VISIBLE_DEVICES="3,4"
    )


def test_parsing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rdzv.options import parse; parse(['--standalone', sys.argv[1]], {});"
        "heavy = {'torch', 'grpc', 'google.protobuf', 'numpy', 'asyncio', 'subprocess', 'importlib.metadata'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, SCRIPT], env=environ, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    environ = dict(os.environ)
    assert count_devices("npu", environ) == 0  # no such plug-in, but torch itself has to say so
    with pytest.raises(DeviceError, match="/no/such/python cannot be started"):
        count_devices("npu", environ | {"PYTHON_EXEC": "/no/such/python"})
    with pytest.raises(DeviceError, match="torch could not be asked: no message"):
        count_devices("npu", environ | {"PYTHON_EXEC": "/bin/false"})
