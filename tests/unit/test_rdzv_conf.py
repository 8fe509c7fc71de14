"""The knobs of one job, and the names that a node and its submission go by."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.options import Options, UsageError, parse
from rdzv.rdzv_conf import known_keys, parse_rdzv_conf
from rendezvousd.v1.rendezvous_pb2 import Timeouts


def options(*argv: str, **environ: str) -> Options:
    return parse([*argv, __file__], environ)


def conf_refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        options("--rdzv-conf", text)
    said = str(caught.value)
    assert said.startswith("--rdzv-conf: ")
    return said


def timeouts(text: str) -> dict[str, int]:
    found = options("--rdzv-conf", text).rdzv_conf.timeouts()
    Timeouts(**found)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("join_timeout=60", {"join_ms": 60_000}),
        ("timeout=900", {"join_ms": 900_000}),
        ("timeout=900,join_timeout=60", {"join_ms": 60_000}),
        ("last_call_timeout=1.5", {"settle_ms": 1500, "settle_max_ms": 30_000}),
        ("last_call_timeout=60", {"settle_ms": 60_000, "settle_max_ms": 60_000}),
        ("settle=1,settle_max=4", {"settle_ms": 1000, "settle_max_ms": 4000}),
        ("grow_timeout=2,grow_max=9", {"grow_ms": 2000, "grow_max_ms": 9000}),
        ("keep_alive_interval=2,keep_alive_max_attempt=4", {"heartbeat_ms": 2000, "lease_ms": 8000}),
        ("keep_alive_interval=2", {"heartbeat_ms": 2000, "lease_ms": 6000}),
        ("keep_alive_max_attempt=10", {"lease_ms": 50_000}),
        ("keep_alive_max_attempt=1", {"lease_ms": 10_000}),
        ("heartbeat=0.5,lease=3", {"heartbeat_ms": 500, "lease_ms": 3000}),
        ("lease=2", {"heartbeat_ms": 400, "lease_ms": 2000}),
        ("short_round=1,short_rounds_max=3", {"short_round_ms": 1000, "short_rounds_max": 3}),
        ("settle=0.0001", {"settle_ms": 1, "settle_max_ms": 30_000}),
    ],
)
def test_what_a_job_wants_is_told_in_milliseconds(text: str, expected: dict[str, int]) -> None:
    assert timeouts(text) == expected


def test_the_other_knobs() -> None:
    conf = options(
        "--rdzv-conf",
        " grow = never ,topology=rack=7,node_name=n1,submission=s,master_port_range=20000-20100,retry_max=2.5,"
        "daemon_loss_timeout=90",
    ).rdzv_conf
    assert (conf.grow, conf.topology, conf.node_name, conf.submission) == ("never", "rack=7", "n1", "s")
    assert (conf.master_port_range, conf.retry_max_s) == ((20000, 20100), 2.5)
    assert conf.daemon_loss_timeout_s == 90.0


@pytest.mark.parametrize(
    "text", ["is_host=true", "read_timeout=60", "close_timeout=30", "heartbeat_timeout=5", "store_type=file", "rank=1"]
)
def test_keys_of_torchrun_that_do_nothing_here_are_explained(text: str) -> None:
    notes = options("--rdzv-conf", text).notes
    assert len(notes) == 1
    assert notes[0].startswith(f"--rdzv-conf: {text.partition('=')[0]} has no effect: ")


def test_unknown_keys_are_refused_with_the_one_that_was_meant_or_those_there_are() -> None:
    text = conf_refusal("join_timout=3")
    assert text.endswith("unknown key join_timout: did you mean join_timeout?")
    text = conf_refusal("wibble=3")
    assert "unknown key wibble: expected one of join_timeout, " in text
    assert "ca_cert" not in text, "nor what does nothing here"


@pytest.mark.parametrize(
    "text",
    [
        "join_timeout=x",
        "join_timeout=0",
        "join_timeout=-1",
        "join_timeout=inf",
        "join_timeout=nan",
        "keep_alive_max_attempt=1.5",
        "keep_alive_max_attempt=0",
        "short_rounds_max=a",
        "grow=sometimes",
        "master_port_range=5",
        "master_port_range=9-5",
        "master_port_range=0-5",
        "master_port_range=1-65536",
        "node_name=" + "x" * 257,
    ],
)
def test_a_bad_value_names_key_and_value(text: str) -> None:
    key, _, value = text.partition("=")
    found = conf_refusal(text)
    assert key in found
    assert value in found
    assert "expected" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("join_timeout", "'join_timeout'"),
        ("=3", "'=3'"),
        ("settle=1,", "''"),
        ("settle=1,settle=2", "settle is given twice, as 1 and as 2"),
        ("settle=1,last_call_timeout=2", "the same thing twice"),
        ("heartbeat=1,keep_alive_interval=2", "the same thing twice"),
        ("lease=9,keep_alive_max_attempt=2", "the same thing twice"),
        ("settle=9,settle_max=3", "settle_max=3 is below"),
        ("grow_timeout=9,grow_max=3", "grow_max=3 is below"),
        ("heartbeat=5,lease=9", "lease=9 is below two heartbeats"),
    ],
)
def test_what_makes_no_sense_is_said(text: str, said: str) -> None:
    assert said in conf_refusal(text)


def test_a_duration_that_is_longer_than_a_week_is_cut_with_a_word() -> None:
    conf = parse_rdzv_conf("join_timeout=36000000")
    assert conf.join_s == 7 * 24 * 3600
    assert conf.notes == ("join_timeout=36000000 is taken as 604800, a week: the daemon takes nothing longer",)


@pytest.mark.parametrize("key", ["overlap_timeout", "rdzv_backend", "rdzv_endpoint"])
def test_what_torch_ignores_in_silence_is_one_note(key: str) -> None:
    (note,) = parse_rdzv_conf(f"{key}=x").notes
    assert note.startswith(f"{key} has no effect: ")


@given(st.sampled_from(known_keys()), st.text(max_size=12))
def test_any_value_is_taken_or_refused_in_one_line(key: str, value: str) -> None:
    refused = ""
    try:
        options("--rdzv-conf", f"{key}={value}")
    except UsageError as error:
        refused = str(error)
    assert not refused or ("--rdzv-conf" in refused and len(refused.splitlines()) == 1)


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_PROCID": "4"}, "12"),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "0"}, "12"),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}, "12+2"),
        ({"SLURM_JOB_ID": "13", "SLURM_JOB_ID_HET_GROUP_0": "12"}, "12"),
        ({"SLURM_RESTART_COUNT": "2"}, ""),
        ({"LSB_JOBID": "12", "LSB_JOBINDEX": "0"}, "12"),
        ({"LSB_JOBID": "12", "LSB_JOBINDEX": "4"}, "12[4]"),
        ({"LSB_JOBID": "12", "LSB_RESTART": "Y"}, "12+Y"),
        ({"PBS_JOBID": "12.head", "PBS_NODENUM": "3", "PBS_TASKNUM": "7"}, "12.head"),
        ({"FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "3"}, "f1"),
        ({"COBALT_JOBID": "9"}, "9"),
        ({"OAR_JOB_ID": "9"}, "9"),
        ({"TORCHX_JOB_ID": "kubernetes://torchx/train-x1", "TORCHX_REPLICA_ID": "3"}, "kubernetes://torchx/train-x1"),
        ({"JOBSET_NAME": "llm", "POD_NAMESPACE": "ml", "JOB_COMPLETION_INDEX": "3"}, "ml/llm"),
        ({"JOBSET_NAME": "llm", "JOBSET_RESTART_ATTEMPT": "1", "JOB_COMPLETION_INDEX": "3"}, "llm+1"),
        ({"POD_NAMESPACE": "ml"}, ""),
    ],
)
def test_nodes_of_one_submission_share_the_schedulers_id(environ: dict[str, str], expected: str) -> None:
    assert options(**environ).submission == expected
    assert options("--rdzv-conf=submission=mine", **environ).submission == "mine"


def test_a_node_is_called_as_its_host_unless_it_is_named() -> None:
    assert options().node_name == os.uname().nodename
    assert options("--rdzv-conf=node_name=n1").node_name == "n1"
