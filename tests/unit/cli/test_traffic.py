"""Test how `sluice produce` reads lines, and Ctrl-C between two reads."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluicemq.cli.traffic import _next_chunk, _read_lines


def test_ctrl_c_before_a_blocking_read_is_not_lost() -> None:
    """The handler of asyncio cancels the task only at its next await, after a blocking read."""
    reads = 0

    def chunks() -> Iterator[list[bytes]]:
        nonlocal reads
        while True:
            reads += 1
            yield [b"a line"]

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        _next_chunk(chunks())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert reads == 0


def test_closing_the_lines_early_closes_their_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" * 100_000)
    opened = []

    def open_stream() -> object:
        opened.append(path.open("rb"))
        return opened[0]

    lines = _read_lines(open_stream)
    assert not opened
    assert next(lines)[0] == b"one"
    lines.close()
    assert opened[0].closed
