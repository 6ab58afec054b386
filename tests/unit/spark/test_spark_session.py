"""What is said while Spark starts."""

import io
import sys

import pytest

from sluicemq.spark import session
from waiting import wait_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_start_that_takes_long_is_said_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MESSAGE_DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with session._start_message():
        wait_for(lambda: "starting Spark…" in screen.getvalue())
    assert screen.getvalue().endswith("\r\x1b[K"), "the line is gone"


def test_a_quick_start_is_not_said_nor_any_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with session._start_message():
        pass
    assert "Spark" not in screen.getvalue()
    monkeypatch.setattr(session, "MESSAGE_DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with session._start_message():
        pass
    assert file.getvalue() == ""
