"""The file of terms, `epochFileCheckpoint`: its format, damage and crashes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.broker.replication.terms import NO_TERM, LogTerms, decode_terms, encode_terms
from sluicemq.errors import StoreDamagedError
from sluicemq.files import SYSTEM_FILES
from sluicemq.wire.ha import LogTerm

TEXT = "2\n773307083\n7-7000\n8-8000\n"
"""RocketMQ's own example, with its checksum."""


def test_the_text_is_that_of_rocketmq() -> None:
    assert encode_terms((LogTerm(7, 7000), LogTerm(8, 8000))) == TEXT
    assert decode_terms(TEXT) == ((7, 7000), (8, 8000))
    assert decode_terms("1\n0\n7-7000\n") == ((7, 7000),), "0 is not checked"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2\n", "says 2 terms"), ("x\n0\n", "invalid literal"), ("1\n0\n7\n", "unpack"),
        ("3\n773307083\n7-7000\n8-8000\n", "the file has 2"),
        ("2\n773307084\n7-7000\n8-8000\n", "773307083"),
        ("2\n0\n8-7000\n7-8000\n", "increase"), ("2\n0\n7-7000\n8-7000\n", "increase"),
    ],
)  # fmt: skip
def test_damage_is_found(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode_terms(text)


@given(st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, 2**40)))
def test_what_is_written_is_read(found: dict[int, int]) -> None:
    starts = sorted(set(found.values()))
    log_terms = tuple(LogTerm(*pair) for pair in zip(sorted(found), starts, strict=False))
    assert decode_terms(encode_terms(log_terms)) == log_terms


def opened(directory: Path, log_end: int) -> LogTerms:
    return LogTerms(SYSTEM_FILES, str(directory / "epochFileCheckpoint"), log_end)


def test_reigns_begin_and_end(tmp_path: Path) -> None:
    log_terms = opened(tmp_path, 500)
    assert log_terms.last == NO_TERM
    log_terms.start_term(3, 100, 500)
    assert log_terms.entries == ((3, 100),), "what is there already is the first one's"
    log_terms.start_term(4, 100, 800)
    log_terms.start_term(5, 100, 800)
    assert log_terms.entries == ((3, 100), (5, 800)), "nothing was written in term 4"
    log_terms.append(LogTerm(5, 900))
    log_terms.append(LogTerm(2, 900))
    assert log_terms.last == (5, 800)
    assert log_terms.find(50) == ((3, 100), 800)
    assert log_terms.find(799) == ((3, 100), 800)
    assert log_terms.find(800) == ((5, 800), None)
    log_terms.drop_before(799)
    assert len(log_terms.entries) == 2
    log_terms.drop_before(800)
    assert opened(tmp_path, 900).entries == ((5, 800),)
    log_terms.truncate(800)
    assert opened(tmp_path, 800).entries == ()


def test_lines_behind_the_logs_end_are_forgotten(tmp_path: Path) -> None:
    log_terms = opened(tmp_path, 0)
    for number in (1, 2, 3):
        log_terms.append(LogTerm(number, number * 100))
    assert opened(tmp_path, 200).entries == ((1, 100), (2, 200))
    assert opened(tmp_path, 900).entries == ((1, 100), (2, 200)), "for good"


def test_a_damaged_file_stops_the_start_and_a_missing_one_has_an_older_edition(
    tmp_path: Path,
) -> None:
    log_terms = opened(tmp_path, 0)
    log_terms.append(LogTerm(1, 0))
    log_terms.append(LogTerm(2, 100))
    path = tmp_path / "epochFileCheckpoint"
    path.write_text(path.read_text().replace("2-100", "2-101"))
    with pytest.raises(StoreDamagedError, match="checksum"):
        opened(tmp_path, 500)  # the older one would count bytes of term 2 to term 1
    path.unlink()
    assert opened(tmp_path, 500).entries == ((1, 0),)
