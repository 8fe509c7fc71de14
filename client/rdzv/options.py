"""What rdzvrun was asked to do: torchrun's options with torchrun's meaning, checked, as one value."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rdzv.arguments import CommandLine, Given, UsageError, read
from rdzv.chaos import Chaos, parse_chaos
from rdzv.devices import DeviceError, count_devices, cpu_count, has_plugin_backends
from rdzv.endpoints import DEFAULT_PORT, Endpoint, is_loopback, parse_endpoint, parse_endpoints
from rdzv.rdzv_conf import NO_RUN_ID, RdzvConf, parse_rdzv_conf, scheduler_job, scheduler_submission
from rdzv.values import (
    COUNT_MAX,
    Values,
    as_address,
    as_choice,
    as_console,
    as_exit_codes,
    as_filters,
    as_modules,
    as_name,
    as_nnodes,
    as_on_daemon_loss,
    as_ranks,
    as_seconds,
    as_signals,
    as_streams,
    as_text,
    as_whole,
    is_whole,
    reading,
)

__all__ = ["Options", "UsageError", "entry_digest", "parse"]

_SHUTDOWN_TIMEOUT_S = 30.0  # torchrun's
_RETRY_MAX_S = 1.0  # what the daemon reckons with where workers end with their lease
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torchrun's
# What DistributedDataParallel and torch.optim import when they are first used: about as long as torch itself takes.
_PRELOAD_LATER = ("torch._dynamo",)
_BACKENDS_OF_TORCH = ("c10d", "static", "etcd", "etcd-v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line and its defaults. Durations in seconds."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    max_restarts: int
    role: str
    node_rank: int | None  # the group rank it would like in a first round
    standalone: bool  # the daemon runs inside this launcher
    endpoints: tuple[Endpoint, ...]  # where the daemon is; empty when standalone
    run_id: str
    run_id_given: bool  # else it is a random one when standalone, and the scheduler's job id when not
    rdzv_conf: RdzvConf
    submission: str  # shared by the nodes of one submission; "": none
    node_name: str
    local_addr: str | None
    on_daemon_loss: Literal["continue", "stop"]
    module: bool
    no_python: bool
    run_path: bool
    training_script: str
    training_script_args: tuple[str, ...]
    shutdown_timeout_s: float
    virtual_local_rank: bool
    signals_to_handle: tuple[str, ...]
    no_retry_exit_codes: frozenset[int]
    console: Literal["all", "rank0"]
    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: tuple[int, ...]  # empty: all
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    start_method: Literal["zygote", "exec"]
    preload: tuple[str, ...]  # modules that the zygote imports besides torch ...
    preload_later: tuple[str, ...]  # ... and those that it has imported from the second round on
    isolate: Literal["", "pid"]
    chaos: Chaos | None  # faults on purpose
    # Read and checked, and not acted on; `notes` says so where they were given.
    monitor_interval_s: float
    event_log_handler: str
    logs_specs: str | None
    numa_binding: str | None
    notes: tuple[str, ...]  # what was given and has no effect, or another one than expected: one line each


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Reads the command line (without the program's name). UsageError; SystemExit for --help and --version.

    Asks torch, in a child process, when accelerators are to be counted and there may be some.
    """
    line = read(argv, environ)
    values = Values(line.given)
    notes: list[str] = []
    nodes = values.take("nnodes", (1, 1), as_nnodes)
    place = _place(values, nodes, notes)
    conf = values.take("rdzv_conf", RdzvConf(), reading(parse_rdzv_conf))
    notes += [f"--rdzv-conf: {note}" for note in conf.notes]
    run_id = values.take("rdzv_id", "", as_name)
    on_daemon_loss = _on_daemon_loss(values, conf)
    if on_daemon_loss == "stop" and not place.endpoints:
        on_daemon_loss = "continue"
        notes.append("--on-daemon-loss=stop has no effect: the daemon runs inside this launcher")
    how = _how(values, line, notes)
    notes += _notes(values, environ)
    return Options(
        min_nodes=place.nodes[0],
        max_nodes=place.nodes[1],
        max_restarts=values.take("max_restarts", 0, as_whole(0)),
        role=values.take("role", "", as_name) or "default",
        node_rank=values.take("node_rank", None, as_whole(0)),
        standalone=not place.endpoints,
        endpoints=place.endpoints,
        run_id=run_id or (_scheduler_id(environ) if place.endpoints else _random_id()),
        run_id_given=bool(run_id),
        rdzv_conf=conf,
        submission=conf.submission or scheduler_submission(environ),
        node_name=conf.node_name or os.uname().nodename,
        local_addr=values.take("local_addr", None, as_address),
        on_daemon_loss=on_daemon_loss,
        module=how.module,
        no_python=how.no_python,
        run_path=how.run_path,
        training_script=line.script,
        training_script_args=line.script_args,
        shutdown_timeout_s=_shutdown_timeout(values, environ),
        virtual_local_rank=values.flag("virtual_local_rank"),
        no_retry_exit_codes=values.take("no_retry_exit_codes", frozenset(), as_exit_codes),
        console=values.take("console", "all", as_console),
        signals_to_handle=values.take("signals_to_handle", tuple(_SIGNALS.split(",")), as_signals),
        start_method=how.start_method,
        preload=values.take("preload", (), as_modules),
        preload_later=values.take("preload_later", _PRELOAD_LATER, as_modules),
        isolate="pid" if values.take("isolate", "", as_choice("pid")) else "",
        chaos=values.take("chaos", None, reading(parse_chaos)),
        monitor_interval_s=values.take("monitor_interval", 0.1, as_seconds),
        log_dir=values.take("log_dir", None, as_text),
        redirects=values.take("redirects", "0", as_streams),
        tee=values.take("tee", "0", as_streams),
        local_ranks_filter=values.take("local_ranks_filter", (), as_ranks),
        duplicate_stdout_filters=values.take("duplicate_stdout_filters", (), as_filters),
        duplicate_stderr_filters=values.take("duplicate_stderr_filters", (), as_filters),
        event_log_handler=values.take("event_log_handler", "null", as_text),
        logs_specs=values.take("logs_specs", None, as_text),
        numa_binding=values.take("numa_binding", None, as_choice("node", "socket", "exclusive", "core-complex")),
        notes=tuple(notes),
        # Last, because it may take seconds: a typo elsewhere is told at once.
        nproc_per_node=_nproc(values, environ, virtual=values.flag("virtual_local_rank")),
    )


def entry_digest(options: Options) -> bytes:
    """SHA-256 of what a node runs: how, the script's base name, its arguments. For people, when nodes differ."""
    how = "module" if options.module else "program" if options.no_python else "script"
    name = options.training_script if options.module else os.path.basename(options.training_script)
    digest = hashlib.sha256()
    for part in (how, name, *options.training_script_args):
        data = os.fsencode(part)
        digest.update(b"%d:" % len(data) + data)  # lengths, so that no two lists look alike
    return digest.digest()


def _scheduler_id(environ: Mapping[str, str]) -> str:
    """A daemon serves many jobs: one name for all that have none would make one world of strangers' nodes."""
    if run_id := scheduler_job(environ):
        return run_id
    raise UsageError(NO_RUN_ID)


def _random_id() -> str:
    from uuid import uuid4  # only needed here, and slow to import

    return str(uuid4())


def _on_daemon_loss(values: Values, conf: RdzvConf) -> Literal["continue", "stop"]:
    wanted = values.take("on_daemon_loss", "continue", as_on_daemon_loss)
    if wanted == "stop" and conf.retry_max_s is not None and conf.retry_max_s > _RETRY_MAX_S:
        raise UsageError(
            f"--rdzv-conf: retry_max={conf.retry_max_s:g} and --on-daemon-loss=stop: the workers' lease could end in "
            f"such a pause; expected at most {_RETRY_MAX_S:g}"
        )
    return "stop" if wanted == "stop" else "continue"


def _shutdown_timeout(values: Values, environ: Mapping[str, str]) -> float:
    torchs = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    if "shutdown_timeout" not in values.given and environ.get(torchs):
        return as_seconds(Given(environ[torchs], torchs))
    return values.take("shutdown_timeout", _SHUTDOWN_TIMEOUT_S, as_seconds)


# ------------------------------------------------------------------------------------------------ workers


@dataclass(frozen=True, slots=True)
class _How:
    module: bool
    no_python: bool
    run_path: bool
    start_method: Literal["zygote", "exec"]


def _how(values: Values, line: CommandLine, notes: list[str]) -> _How:
    """How workers run the script. --run-path outranks the other two, as torchrun's does."""
    run_path = values.flag("run_path")
    module = values.flag("module") and not run_path
    no_python = values.flag("no_python") and not run_path
    if module and no_python:
        raise UsageError("--module and --no-python exclude each other: a module is run by python; leave out one")
    if not module and not no_python:
        _check_script(line.script)
    forkable = not no_python and (module or _is_source(line.script))
    return _How(module, no_python, run_path, _start_method(values, forkable, notes))


def _start_method(values: Values, forkable: bool, notes: list[str]) -> Literal["zygote", "exec"]:
    """torchrun's values have no effect on scripts there; here they choose what comes nearest."""
    given = values.given.get("start_method")
    asked = values.take("start_method", "zygote", as_choice("zygote", "exec", "spawn", "fork", "forkserver"))
    method: Literal["zygote", "exec"] = "exec" if asked in ("exec", "spawn") or not forkable else "zygote"
    if given is not None and asked in ("spawn", "fork", "forkserver"):
        notes.append(f"{given.source}={asked}: taken as {method}")
    elif given is not None and asked != method:
        notes.append(f"{given.source}={asked} has no effect: only Python source can be run by a forked process")
    if method == "exec":
        given_in_vain = [values.given[name].source for name in ("preload", "preload_later") if values.text(name)]
        notes += [f"{source} has no effect: it is for --start-method=zygote" for source in given_in_vain]
    return method


def _is_source(script: str) -> bool:
    """Whether it is a directory or zip file with a __main__.py, or a file of Python text."""
    return os.path.isdir(script) or (os.path.isfile(script) and not script.endswith(".pyc"))


def _check_script(script: str) -> None:
    if os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise UsageError(f"training script {script}: a directory without __main__.py; expected a Python file")
    elif not os.path.exists(script):
        raise UsageError(
            f"training script {script}: no such file in {os.getcwd()}; give its path, or -m for a module, "
            "or --no-python for a program"
            if not os.path.isabs(script)
            else f"training script {script}: no such file; give the path of a Python file"
        )


def _nproc(values: Values, environ: Mapping[str, str], *, virtual: bool) -> int:
    given = values.given.get("nproc_per_node", Given("1", "--nproc-per-node"))
    text = given.text.strip()
    count = int(text) if is_whole(text) and 1 <= int(text) <= COUNT_MAX else _count(given, text, environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if virtual and visible is not None and count > len(visible.split(",")):
        given.refuse(f"--virtual-local-rank gives each worker a GPU, and CUDA_VISIBLE_DEVICES={visible} has fewer")
    return count


def _count(given: Given, text: str, environ: Mapping[str, str]) -> int:
    """As many workers as there are devices of the kind `text`."""
    if text == "cpu":
        return cpu_count()
    known = text in ("auto", "gpu", "xpu")
    if not known and not (re.fullmatch(r"[a-z][a-z0-9_]*", text) and has_plugin_backends()):
        given.refuse("expected a whole number of at least 1, or auto, cpu, gpu or xpu")
    try:
        count = count_devices(text, environ)
    except DeviceError as error:
        given.refuse(f"the devices of this host cannot be counted: {error}; give a number")
    if count == 0 and text != "auto":
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None or text != "gpu" else f" (CUDA_VISIBLE_DEVICES={hidden})"
        name = {"gpu": "GPU", "xpu": "XPU"}.get(text, f"device of the kind {text}")
        given.refuse(f"this host has no {name} that torch can use{why}; give a number, cpu or auto")
    return count or cpu_count()


# ------------------------------------------------------------------------------------------------ where


@dataclass(frozen=True, slots=True)
class _Place:
    nodes: tuple[int, int]
    endpoints: tuple[Endpoint, ...]  # empty: standalone


def _place(values: Values, nodes: tuple[int, int], notes: list[str]) -> _Place:
    """Where the daemon is, and how many nodes meet there."""
    endpoints = values.text("rdzv_endpoint")
    if values.flag("standalone"):
        if nodes[0] > 1:
            values.given["nnodes"].refuse("--standalone is for one node; leave it out, and give --rdzv-endpoint")
        if nodes[1] > 1:
            notes.append(f"--standalone is for one node: the maximum of --nnodes={nodes[0]}:{nodes[1]} has no effect")
        if endpoints:
            notes.append(
                f"{values.given['rdzv_endpoint'].source} has no effect: --standalone uses no daemon but its own"
            )
        return _Place((1, 1), ())
    if endpoints:
        notes += [
            f"{values.given[dest].source} has no effect: --rdzv-endpoint is given"
            for dest in ("master_addr", "master_port")
            if dest in values.given
        ]
        return _at_endpoints(values.given["rdzv_endpoint"], nodes)
    return _at_master(values, nodes, notes)


def _at_endpoints(given: Given, nodes: tuple[int, int]) -> _Place:
    found = reading(lambda text: parse_endpoints(text, port_min=0))(given)
    if all(endpoint.port for endpoint in found):
        return _Place(nodes, found)
    # localhost:0 is how torchrun's users ask for a rendezvous of one node on a free port.
    if nodes[1] == 1 and all(is_loopback(endpoint.host) for endpoint in found):
        return _Place(nodes, ())
    given.refuse("the daemon cannot be found at port 0; expected the port at which it serves")


def _at_master(values: Values, nodes: tuple[int, int], notes: list[str]) -> _Place:
    port = values.take("master_port", 0, as_whole(0, 65535)) or DEFAULT_PORT
    address = values.given.get("master_addr")
    if address is not None and values.text("master_addr"):
        endpoint = reading(lambda text: parse_endpoint(text, port))(address)
        # Scripts for one node name this host as the master, where nobody but the job itself has ever listened.
        if nodes[1] > 1 or not _is_this_host(endpoint.host):
            return _Place(nodes, (endpoint,))
    if nodes[1] > 1:
        count = f"{nodes[0]}" if nodes[0] == nodes[1] else f"{nodes[0]}:{nodes[1]}"
        raise UsageError(
            f"--nnodes={count} needs a daemon where the nodes meet: start rendezvousd on a host that all of them "
            "reach, and give --rdzv-endpoint=HOST[:PORT]"
        )
    notes += [
        f"{values.given[dest].source} has no effect: one node needs no daemon, and its workers meet on a free port"
        for dest in ("master_addr", "master_port")
        if dest in values.given
    ]
    return _Place(nodes, ())


def _is_this_host(host: str) -> bool:
    name = os.uname().nodename
    return is_loopback(host) or host in (name, name.partition(".")[0])


# ------------------------------------------------------------------------------------------------ notes

_NOT_DONE = {
    "logs_specs": "log files are written as without it",
    "numa_binding": "workers may run on all CPUs; numactl, with --no-python, can bind them",
}

_VARIABLES_NOT_DONE = {
    "TORCHELASTIC_HEALTH_CHECK_PORT": "no health check is served by the launcher",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "no timer watches the workers",
}


def _notes(values: Values, environ: Mapping[str, str]) -> list[str]:
    """One line for everything given that does not do what it says."""
    given = values.given
    found = [f"{given[dest].source} has no effect: {what}" for dest, what in _NOT_DONE.items() if dest in given]
    found += [f"{name} has no effect: {what}" for name, what in _VARIABLES_NOT_DONE.items() if environ.get(name)]
    found += [
        f"{given[dest].source} has no effect: only what --tee shows and writes to a file is copied"
        for dest in ("duplicate_stdout_filters", "duplicate_stderr_filters")
        if dest in given and not _some(values.text("tee"))
    ]
    handler = values.text("event_log_handler")
    if handler not in ("", "null"):
        found.append(f"{given['event_log_handler'].source}={handler} has no effect: no events are recorded")
    if "monitor_interval" in given:
        found.append(f"{given['monitor_interval'].source} has no effect: the end of a worker is noticed at once")
    if environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        found.append("TORCH_DISABLE_SHARE_RDZV_TCP_STORE has no effect: every round has a store of its own")
    backend = values.take("rdzv_backend", "rendezvousd", as_choice("rendezvousd", *_BACKENDS_OF_TORCH))
    if backend != "rendezvousd":
        found.append(f"{given['rdzv_backend'].source}={backend}: the rendezvousd daemon is used instead")
    return found


def _some(streams: str) -> bool:
    """Whether --redirects or --tee names any stream."""
    return any(part.rpartition(":")[2] != "0" for part in streams.split(",") if part)
