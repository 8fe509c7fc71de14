"""The daemon's log: one event a line, as text for people or as JSON for machines.

Facts go beside the message, not into it: `log.info("round formed", extra={"run_id": run_id, "round": 3})`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

# What every record has; all else was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Sends the log to `stream` (default: stderr). `level`: debug, info, warning or error; `log_format`: text or json.

    Libraries (asyncio, grpc) speak from warning on, whatever the level. A second call replaces the first.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, JsonFormatter | TextFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    ours = getattr(logging, level.upper())
    root.setLevel(max(ours, logging.WARNING))
    logging.getLogger("rendezvousd").setLevel(ours)


class TextFormatter(logging.Formatter):
    """`2026-11-30T12:00:00.123Z info engine: round formed run_id=a round=3`; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_word(value)}" for name, value in _facts(record).items())
        name = record.name.removeprefix("rendezvousd.")
        line = f"{_timestamp(record)} {record.levelname.lower()} {name}: {_one_line(record.getMessage())}{facts}"
        trace = _traceback(self, record)
        return line + "".join(f"\n    {row}" for row in trace.splitlines())


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, event, the facts, and `traceback` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        # A fact cannot hide what the line is about.
        found = {**_facts(record), **event}
        line = {name: found[name] for name in (*event, *(name for name in found if name not in event))}
        trace = _traceback(self, record)
        if trace:
            line["traceback"] = trace
        return json.dumps(line, default=str)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _timestamp(record: logging.LogRecord) -> str:
    """UTC, in milliseconds: logs of many hosts are read together."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _one_line(text: str) -> str:
    """Texts come from the network: none may break a line, or pretend to be one."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _word(value: object) -> str:
    """A value of a fact as one word: in quotes where it has spaces, quotes or nothing in it."""
    text = str(value)
    if text and text.isprintable() and not any(c in " \"'=" for c in text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
