"""Cells of the tables that commands print."""

import inspect
from typing import Any
from unittest.mock import Mock

import pytest

from sluicemq.cli import cluster
from sluicemq.cli.output import print_records


def test_a_number_has_commas_unless_it_is_an_id(capsys: pytest.CaptureFixture[str]) -> None:
    print_records([{"pid": 12345, "bytes": 67890}], columns="pid:id bytes", empty="")
    printed = capsys.readouterr().out
    assert "12345" in printed
    assert "67,890" in printed


def test_the_process_ids_of_replicas_can_be_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica: dict[str, Any] = dict.fromkeys(
        ("broker", "id", "address", "epoch", "inSync", "lagBytes", "lagMs", "state")
    )
    replica |= {"role": "master", "said": {"pid": 12345, "processSpace": "here"}}
    monkeypatch.setattr(cluster, "process_space", lambda: "here")
    admin = Mock(replicas=lambda: [replica])
    callback = inspect.unwrap(cluster.status.callback)  # type: ignore[arg-type]
    callback(admin, as_json=False)
    assert "12345" in capsys.readouterr().out


def test_a_row_is_lines_where_the_headings_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [
        {"committed": 7, "in_flight": 1234, "deleted": ""},
        {"committed": 8, "in_flight": 0, "deleted": "now"},
    ]
    columns = "committed in_flight=in_flight deleted"
    monkeypatch.setenv("COLUMNS", "36")
    print_records(rows, columns=columns, title="Queues")
    assert "┃ committed ┃" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "30")
    print_records(rows, columns=columns, title="Queues")
    assert capsys.readouterr().out == (
        "Queues\n\ncommitted  7\nin flight  1,234\n\ncommitted  8\nin flight  0\ndeleted    now\n\n"
    )


def test_an_optional_column_is_left_out_without_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_records([{"lag": 0, "lost": 0}, {"lag": 0, "lost": None}], columns="lag ?lost")
    assert "lost" not in capsys.readouterr().out
    print_records([{"lag": 0, "lost": 0}, {"lag": 0, "lost": 1}], columns="lag ?lost")
    assert "┃ lag ┃ lost ┃" in capsys.readouterr().out
