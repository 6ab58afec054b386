"""Test the log options of servers, and the formats of log records."""

import json
import logging
import subprocess
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.cli import main
from sluicemq.cli.servers.logs import LogConfig, child_log_options, parse_logback
from sluicemq.errors import ConfigurationError
from sluicemq.log_lines import JsonLines, TextLines
from waiting import limit

LOGBACK = """<?xml version="1.0" encoding="UTF-8"?>
<configuration scan="true">
  <property name="base" value="${user.home}${file.separator}logs"/>
  <appender name="Remoting" class="RollingFileAppender"><file>${base}/remoting.log</file></appender>
  <appender name="Broker" class="RollingFileAppender">
    <file>${base}/${brokerLogDir:-rocketmqlogs}/broker.log</file>
    <rollingPolicy class="FixedWindowRollingPolicy"><maxIndex>20</maxIndex></rollingPolicy>
    <triggeringPolicy class="Size"><maxFileSize>500MB</maxFileSize></triggeringPolicy>
  </appender>
  <logger name="RocketmqBroker" level="WARN"><appender-ref ref="Broker"/></logger>
  <root level="DEBUG"/>
</configuration>"""
HOME = {"user.home": "/home/mq"}


def test_level_and_file_of_a_logback_are_used() -> None:
    told = parse_logback(LOGBACK, "broker", HOME)
    path = "/home/mq/logs/rocketmqlogs/broker.log"
    assert told == LogConfig("warning", "text", path, 500 * 1024 * 1024, 20)


def test_without_an_appender_the_log_goes_to_stderr_at_the_root_level() -> None:
    assert parse_logback(LOGBACK, "proxy", HOME) == LogConfig("debug")


@pytest.mark.parametrize(
    ("text", "said"),
    [("<configuration>", "not XML"), (LOGBACK.replace("${base}", "${BASE}", 1), "BASE")],
)
def test_an_invalid_logback_is_an_error(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_logback(text, "broker", HOME)


def test_a_json_record_is_always_one_object() -> None:
    try:
        int("a\nb")
    except ValueError:
        record = logging.LogRecord("x", 30, "f", 1, "%s\n%d", ("<é>", 3), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["message"]) == ("warning", "<é>\n3")
    assert "ValueError: invalid literal" in told["error"]


EVIL = "a\n2026-11-28 00:00:00,000 INFO forged\r\x1b[2J\x9b\u2028\u202e\ud800b"


def record_of(text: str) -> logging.LogRecord:
    """Return a log record whose message and error contain the text."""
    error = (ValueError, ValueError(text), None)
    return logging.LogRecord("x", 30, "f", 1, "client %s", (text,), error)


def test_text_of_clients_cannot_start_a_line_or_control_a_terminal() -> None:
    lines = TextLines().format(record_of(EVIL)).split("\n")
    assert "client a\\n2026-11-28" in lines[0]
    assert "\\x1b[2J\\x9b\\u2028\\u202e\\ud800b" in lines[0]
    assert all(line.startswith("  ") for line in lines[1:])
    assert all(ord(one) >= 32 and one.isprintable() for line in lines for one in line)


@given(st.text(st.characters()))
def test_any_text_of_a_client_is_logged_as_one_writable_line(text: str) -> None:
    for formatter in (TextLines(), JsonLines()):
        record = record_of(text)
        record.exc_info = None
        line = formatter.format(record)
        line.encode()
        assert len(line.splitlines()) == 1
    written = text.encode("utf-8", "backslashreplace").decode()
    assert json.loads(line)["message"] == f"client {written}"


def test_child_processes_log_like_the_parent_to_their_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = RotatingFileHandler(tmp_path / "up.log", maxBytes=2000, backupCount=3)
    handler.setFormatter(JsonLines())
    root = logging.RootLogger(logging.WARNING)
    root.addHandler(handler)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging.Logger, "root", root)
    assert child_log_options("broker-a") == [
        "--log-level",
        "warning",
        "--log-format",
        "json",
        "--log-file",
        f"{tmp_path}/up.log.broker-a",
        "--log-size",
        "2000",
        "--log-kept",
        "3",
    ]
    handler.close()


def test_a_full_log_file_is_rotated_and_the_oldest_deleted(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "broker.log"
    program = (
        "import logging; from sluicemq.cli.servers.logs import LogConfig, start_log;"
        f"start_log(LogConfig(form='json', path={str(path)!r}, bytes_max=2000, rotated_files=2));"
        "[logging.getLogger(f'x{n}').info('line %d', n) for n in range(200)]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=limit(60))
    assert sorted(it.name for it in path.parent.iterdir()) == [
        "broker.log",
        "broker.log.1",
        "broker.log.2",
    ]
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "line 199"
    assert all(it.stat().st_size <= 2000 for it in path.parent.iterdir())


def test_the_log_file_contains_why_a_server_did_not_start(tmp_path: Path) -> None:
    path = tmp_path / "broker.log"
    options = ["--log-file", str(path), "--log-format", "json", "--log-size", "1MB"]
    told = subprocess.run(
        [sys.executable, "-m", "sluicemq", "broker", "-c", "/nonexistent/b.conf", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(60),
    )
    assert told.returncode == 1
    said = json.loads(path.read_text())
    assert (said["level"], told.stderr.splitlines()[0]) == ("error", f"sluice: {said['message']}")


@pytest.mark.parametrize("size", ["", "0", "12 parsecs"])
def test_an_invalid_log_size_is_wrong_usage(size: str) -> None:
    told = CliRunner().invoke(main, ["broker", "--log-size", size])
    assert told.exit_code == 2
    assert "write 64MB, 1GB or a number of bytes." in told.output
