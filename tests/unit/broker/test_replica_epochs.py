"""`epochFileCheckpoint`: RocketMQ's text, and what a crash leaves of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.broker.replication.epochs import NONE, Epochs, parse_epochs, render_epochs
from sluicemq.errors import StoreDamagedError
from sluicemq.files import SYSTEM_FILES
from sluicemq.wire.ha import LogTerm

TEXT = "2\n773307083\n7-7000\n8-8000\n"
"""RocketMQ's own example, with its checksum."""


def test_the_text_is_that_of_rocketmq() -> None:
    assert render_epochs((LogTerm(7, 7000), LogTerm(8, 8000))) == TEXT
    assert parse_epochs(TEXT) == ((7, 7000), (8, 8000))
    assert parse_epochs("1\n0\n7-7000\n") == ((7, 7000),), "0 is not checked"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2\n", "entries"), ("x\n0\n", "invalid literal"), ("1\n0\n7\n", "unpack"),
        ("3\n773307083\n7-7000\n8-8000\n", "there are 2"),
        ("2\n773307084\n7-7000\n8-8000\n", "773307083"),
        ("2\n0\n8-7000\n7-8000\n", "grow"), ("2\n0\n7-7000\n8-7000\n", "grow"),
    ],
)  # fmt: skip
def test_damage_is_found(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_epochs(text)


@given(st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, 2**40)))
def test_what_is_written_is_read(found: dict[int, int]) -> None:
    starts = sorted(set(found.values()))
    epochs = tuple(LogTerm(*pair) for pair in zip(sorted(found), starts, strict=False))
    assert parse_epochs(render_epochs(epochs)) == epochs


def opened(directory: Path, log_end: int) -> Epochs:
    return Epochs(SYSTEM_FILES, str(directory / "epochFileCheckpoint"), log_end)


def test_reigns_begin_and_end(tmp_path: Path) -> None:
    epochs = opened(tmp_path, 500)
    assert epochs.last == NONE
    epochs.reign(3, 100, 500)
    assert epochs.entries == ((3, 100),), "what is there already is the first one's"
    epochs.reign(4, 100, 800)
    epochs.reign(5, 100, 800)
    assert epochs.entries == ((3, 100), (5, 800)), "nothing was written in epoch 4"
    epochs.begin(LogTerm(5, 900))
    epochs.begin(LogTerm(2, 900))
    assert epochs.last == (5, 800)
    assert epochs.at(50) == ((3, 100), 800)
    assert epochs.at(799) == ((3, 100), 800)
    assert epochs.at(800) == ((5, 800), None)
    epochs.forget(799)
    assert len(epochs.entries) == 2
    epochs.forget(800)
    assert opened(tmp_path, 900).entries == ((5, 800),)
    epochs.truncate(800)
    assert opened(tmp_path, 800).entries == ()


def test_lines_behind_the_logs_end_are_forgotten(tmp_path: Path) -> None:
    epochs = opened(tmp_path, 0)
    for number in (1, 2, 3):
        epochs.begin(LogTerm(number, number * 100))
    assert opened(tmp_path, 200).entries == ((1, 100), (2, 200))
    assert opened(tmp_path, 900).entries == ((1, 100), (2, 200)), "for good"


def test_a_damaged_file_stops_the_start_and_a_missing_one_has_an_older_edition(
    tmp_path: Path,
) -> None:
    epochs = opened(tmp_path, 0)
    epochs.begin(LogTerm(1, 0))
    epochs.begin(LogTerm(2, 100))
    path = tmp_path / "epochFileCheckpoint"
    path.write_text(path.read_text().replace("2-100", "2-101"))
    with pytest.raises(StoreDamagedError, match="checksum"):
        opened(tmp_path, 500)  # the older one would count bytes of epoch 2 to epoch 1
    path.unlink()
    assert opened(tmp_path, 500).entries == ((1, 0),)
