"""Invalid progress files do not break the page: each has a row with the reason."""

from pathlib import Path

import orjson
import pytest

from sluicemq.pipelines.record import FILE_BYTES_MAX, read_runs

GOOD = {
    "pipeline": "p", "kind": "k", "file": "f", "state": "running", "error": "", "begun_ms": 1,
    "stepped_ms": 1, "seen_ms": 1, "sinks": {"s": {"rows": 5}},
    "steps": [{"time_ms": 1, "text": "began"}],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"state": "asleep"}, {"steps": "x"}, {"steps": [1]}, {"steps": [{}]},
        {"sinks": {"s": {"rows": 5, "eta_s": "a"}}}, {"sinks": {"s": {"rows": 5, "left": [1]}}},
        {"begun_ms": 1e999}, {"sinks": []},
    ],
)  # fmt: skip
def test_invalid_values_make_a_progress_file_invalid(
    tmp_path: Path, change: dict[str, object]
) -> None:
    (tmp_path / "good.json").write_bytes(orjson.dumps(GOOD))
    text = orjson.dumps(GOOD | change | {"pipeline": "odd"}).replace(
        b'"begun_ms":null', b'"begun_ms":1e999'
    )
    (tmp_path / "odd.json").write_bytes(text)
    runs = read_runs([str(tmp_path)])
    assert (runs["p"].rows, runs["p"].sinks["s"]["left"], runs["p"].last_step) == (5, None, "began")
    assert "is not a valid progress file" in runs["odd"].reason


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    assert "the limit is" in read_runs([str(tmp_path)])["large"].reason
