"""The daemon's configuration and its log."""

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvousd import logs
from rendezvousd.config import OPTIONS, Address, Config, ConfigError, EtcdOptions, load
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.options import WORKER_VARIABLES, Option

REFERENCE = Path(__file__).parents[2] / "deploy" / "rendezvousd.toml"


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def in_file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rendezvousd.toml"
    path.write_text(text)
    return ["--config", str(path)]


def test_nothing_given_means_the_defaults() -> None:
    assert load([], {}) == Config()
    assert Config().listen == (Address("::", 29400),)


def test_every_setting_has_exactly_one_option() -> None:
    settings = {("timing", name) for name in Timing.__struct_fields__}
    settings |= {("limits", name) for name in Limits.__struct_fields__}
    settings |= {("etcd", field.name) for field in fields(EtcdOptions)}
    own = {("", f.name) for f in fields(Config)} - {("", "timing"), ("", "limits"), ("", "etcd")}
    options = [(option.part, option.field) for option in OPTIONS]
    assert sorted(options) == sorted(settings | own)


def test_the_reference_file_is_the_defaults_and_complete() -> None:
    assert load(["--config", str(REFERENCE)], {}) == Config()
    lines = REFERENCE.read_text().splitlines()
    # one whose default is to be absent is there as an example: "#name = value"
    keys = [found[1] for line in lines if (found := re.match(r"#?([a-z-]+) = ", line))]
    assert keys == [option.name for option in OPTIONS if option.in_file]


def test_a_flag_outranks_a_variable_and_both_the_file(tmp_path: Path) -> None:
    file = in_file(tmp_path, "settle = 1\ngrace = 1.5\nheartbeat = 2\nlisten = ['a:1', 'b:2']\n")
    found = load([*file, "--settle=3", "--listen", "c:3"], {"RENDEZVOUSD_SETTLE": "2", "RENDEZVOUSD_GRACE": "2.5"})
    assert (found.timing.settle_s, found.timing.grace_s, found.timing.heartbeat_s) == (3.0, 2.5, 2.0)
    assert found.listen == (Address("c", 3),)
    assert load(file, {}).listen == (Address("a", 1), Address("b", 2))
    assert load([], {"RENDEZVOUSD_LISTEN": "a:1, [::1]:0"}).listen == (Address("a", 1), Address("::1", 0))


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = in_file(tmp_path, "max-jobs = 7")[1]
    assert load([], {"RENDEZVOUSD_CONFIG": path}).limits.jobs == 7
    other = tmp_path / "other.toml"
    other.write_text("max-jobs = 8")
    assert load(["--config", str(other)], {"RENDEZVOUSD_CONFIG": path}).limits.jobs == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[::]:29400", Address("::", 29400)),
        ("0.0.0.0:0", Address("0.0.0.0", 0)),
        ("head", Address("head", 29400)),
        ("[fe80::1]", Address("fe80::1", 29400)),
        ("head.example.org:65535", Address("head.example.org", 65535)),
    ],
)
def test_an_address_to_listen_at(text: str, expected: Address) -> None:
    assert load([f"--listen={text}"], {}).listen == (expected,)


@pytest.mark.parametrize(
    "text",
    ["head:", "head:65536", "head:abc", ":29400", "::1", "[::1", "[1:2]:3", "http://h:1", "1.2.3.400:5", "", "a b:1"],
)
def test_an_address_nobody_can_listen_at(text: str) -> None:
    assert f"--listen={text}: expected" in refusal([f"--listen={text}"])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--heartbeat", "abc"),
        ("--heartbeat", "0.01"),
        ("--heartbeat", "nan"),
        ("--settle", "-1"),
        ("--settle", "inf"),
        ("--lease-intervals", "1"),
        ("--lease-intervals", "2.5"),
        ("--max-jobs", "0"),
        ("--max-jobs", "1_000"),
        ("--max-message-bytes", "1"),
        ("--log-level", "loud"),
        ("--log-format", "xml"),
        ("--backend", "redis"),
        ("--ready-fd", "987654"),
        ("--ready-fd", "x"),
    ],
)
def test_a_bad_value_is_named(flag: str, value: str) -> None:
    assert f"{flag}={value}: expected" in refusal([flag, value])
    variable = "RENDEZVOUSD_" + flag[2:].upper().replace("-", "_")
    assert f"{variable}={value}: expected" in refusal([], {variable: value})


def test_what_belongs_to_etcd_is_whole_or_refused(tmp_path: Path) -> None:
    found = load(["--backend=etcd", "--etcd-endpoints=a:1,b:2", "--etcd-endpoints", "c:3"], {})
    assert found.etcd.endpoints == ("a:1", "b:2", "c:3")
    secret = tmp_path / "secret"
    secret.write_text("s")
    with_etcd = ["--backend=etcd", "--etcd-endpoints=a:1"]
    for argv, word in (
        (["--backend=etcd"], "--etcd-endpoints"),
        (["--etcd-prefix=/x"], "--backend=etcd"),
        ([*with_etcd, "--etcd-endpoints=http://a:1"], "http://a:1"),
        ([*with_etcd, f"--etcd-cert={secret}"], "--etcd-key"),
        ([*with_etcd, "--etcd-user=u"], "--etcd-password-file"),
        ([*with_etcd, "--etcd-ca=/no/such/file"], "/no/such/file"),
    ):
        assert word in refusal(argv)


def test_an_open_descriptor_is_taken() -> None:
    read_end, write_end = os.pipe()
    try:
        assert load([f"--ready-fd={write_end}"], {}).ready_fd == write_end
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--settel=3"], "unknown option --settel: did you mean --settle?"),
        (["--settl", "3"], "unknown option --settl: did you mean --settle?"),
        (["serve"], "unexpected argument serve"),
        (["--settle"], "--settle"),
        (["--settle=40"], "--settle=40 is more than settle-max=30 (the default)"),
        (["--grow-max=1"], "grow-after=5 (the default) is more than --grow-max=1"),
        (["--cooldown=61"], "cooldown-max=60"),
        (["--recovery=61"], "--recovery=61 is more than recovery-max=60 (the default)"),
        (["--heartbeat=604800"], "--heartbeat=604800 and lease-intervals=5 (the default): a node that is silent would"),
        (["--lease-intervals=604801"], "heartbeat=1 (the default) and --lease-intervals=604801"),
        (["--calm-soon=601"], "calm-reset=600"),
        (["--max-message-bytes=65536"], "max-store-value-bytes=524288"),
        (["--max-failures-per-node=1024"], "--max-failures-per-node=1024"),
        (["--config", "/no/such/file"], "/no/such/file: No such file"),
    ],
)
def test_what_does_not_go_together_is_said(argv: list[str], said: str) -> None:
    assert said in refusal(argv)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("settel = 3", "unknown key settel: did you mean settle?"),
        ("settle_max = 3", "unknown key settle_max: did you mean settle-max?"),
        ("ready-fd = 1", "unknown key ready-fd"),
        ("config = 'a'", "unknown key config"),
        ("[timing]\nsettle = 3", "unknown key timing"),
        ("settle = '3'", "settle = '3': expected a number"),
        ("max-jobs = true", "max-jobs = True: expected a number"),
        ("max-jobs = 1.5", "max-jobs=1.5: expected a whole number"),
        ("log-level = 3", "log-level = 3: expected a text"),
        ("listen = []", "listen = []: expected at least one"),
        ("listen = [1]", "listen = 1: expected texts"),
        ("settle = nan", "settle=nan: expected seconds"),
        ("settle =", "is not TOML"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    found = refusal(in_file(tmp_path, text))
    assert "rendezvousd.toml" in found
    assert said in found


def test_unknown_variables_are_errors_except_those_of_others() -> None:
    assert "unknown variable RENDEZVOUSD_SETTEL: did you mean RENDEZVOUSD_SETTLE?" in refusal(
        [], {"RENDEZVOUSD_SETTEL": "3"}
    )
    workers = dict.fromkeys(WORKER_VARIABLES, "x")
    kubernetes = {
        "RENDEZVOUSD_SERVICE_HOST": "10.0.0.1",
        "RENDEZVOUSD_SERVICE_PORT_GRPC": "29400",
        "RENDEZVOUSD_PORT": "tcp://10.0.0.1:29400",
        "RENDEZVOUSD_PORT_29400_TCP_ADDR": "10.0.0.1",
        "RENDEZVOUSD_HEAD_SERVICE_HOST": "10.0.0.1",
    }
    assert load([], {**workers, **kubernetes, "RENDEZVOUSD_SETTLE": "", "PATH": "/bin"}) == Config()


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_end_the_program(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load([flag], {})
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "rendezvousd" in out
    assert flag == "--version" or all(option.flag in out for option in OPTIONS)


@given(st.sampled_from([option for option in OPTIONS if option.name != "ready-fd"]), st.text(max_size=12))
def test_any_text_is_taken_or_refused_in_one_line(option: Option, text: str) -> None:
    refused = None
    try:
        load([f"{option.flag}={text}"], {})
    except ConfigError as error:
        refused = str(error)
    assert refused is None or (option.name in refused and len(refused.splitlines()) == 1)


# ------------------------------------------------------------------------------------------------ the log


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("rendezvousd")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


@pytest.mark.usefixtures("restored_logging")
def test_the_log_is_one_event_a_line_with_facts_beside_it() -> None:
    stream = io.StringIO()
    logs.setup("info", "text", io.StringIO())
    logs.setup("info", "text", stream)
    log = logging.getLogger("rendezvousd.engine")
    log.info("round formed", extra={"run_id": "my job", "round": 3, "note": ""})
    log.debug("not shown")
    logging.getLogger("asyncio").info("not shown either")
    line = stream.getvalue()
    assert line.endswith('Z info engine: round formed run_id="my job" round=3 note=""\n')
    assert line[:4].isdigit()
    assert line.count("\n") == 1


@pytest.mark.usefixtures("restored_logging")
def test_json_lines_hold_the_same_facts() -> None:
    stream = io.StringIO()
    logs.setup("debug", "json", stream)
    logging.getLogger("rendezvousd").debug("told %d", 5, extra={"run_id": "a\nb", "level": "mine"})
    line = stream.getvalue()
    assert line.count("\n") == 1
    event = json.loads(line)
    assert (event["level"], event["event"], event["run_id"]) == ("debug", "told 5", "a\nb")
    assert list(event)[:4] == ["time", "level", "logger", "event"]


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_from_outside_breaks_a_line(message: str, run_id: str) -> None:
    record = logging.makeLogRecord({"name": "x", "msg": message, "levelname": "INFO", "run_id": run_id})
    for formatter in (logs.TextFormatter(), logs.JsonFormatter()):
        assert len(formatter.format(record).splitlines()) == 1


def test_a_traceback_follows_its_line() -> None:
    try:
        int("boom")
    except ValueError:
        record = logging.LogRecord("rendezvousd", logging.ERROR, __file__, 1, "a bug", None, sys.exc_info())
    text = logs.TextFormatter().format(record).splitlines()
    assert text[0].endswith("error rendezvousd: a bug")
    assert text[-1].startswith("    ValueError: ")
    assert "ValueError: " in json.loads(logs.JsonFormatter().format(record))["traceback"]
