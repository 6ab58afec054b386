"""The key-value file: what is written, and what happens when it is broken."""

from pathlib import Path

import pytest

from sluicemq.errors import StoreDamagedError
from sluicemq.files import SYSTEM_FILES
from sluicemq.nameserver.requests import KeyValues


def open_at(path: Path) -> KeyValues:
    return KeyValues(SYSTEM_FILES, str(path))


def test_a_file_of_the_real_name_server_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_text('{"configTable":{"ORDER_TOPIC_CONFIG":{"T":"broker-a:4"}}}')
    assert open_at(path).get_namespace("ORDER_TOPIC_CONFIG") == {"T": "broker-a:4"}


def test_a_change_is_in_the_file_when_it_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kvConfig.json"
    values = open_at(path)
    values.put("n", "k", "v")
    values.put("n", "k2", "v2")
    values.delete("n", "k")
    again = open_at(path)
    assert again.get("n", "k") is None
    assert again.get_namespace("n") == {"k2": "v2"}
    assert again.get_namespace("other") is None


def test_a_copy_of_a_namespace_changes_nothing(tmp_path: Path) -> None:
    values = open_at(tmp_path / "kvConfig.json")
    values.put("n", "k", "v")
    table = values.get_namespace("n")
    assert table is not None
    table["k"] = "other"
    assert values.get("n", "k") == "v"


def test_a_broken_file_falls_back_to_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    values = open_at(path)
    values.put("n", "k", "1")
    values.put("n", "k", "2")
    path.write_text('{"configTable":{"n"')
    assert open_at(path).get("n", "k") == "1"


def test_two_broken_files_stop_the_start_with_a_cure(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_text("[1]")
    path.with_suffix(".json.bak").write_text("{")
    with pytest.raises(StoreDamagedError, match=r"kvConfig\.json.*remove the file"):
        open_at(path)
