"""`sluice produce`: how lines are read, and what Ctrl-C does between two reads."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluicemq.cli.traffic import _next_chunk, _read_lines


def test_ctrl_c_that_asyncio_has_taken_is_not_forgotten_by_the_next_read() -> None:
    """The handler of asyncio only cancels the task at its next await: a read may block first."""
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


def test_lines_that_are_not_read_to_their_end_close_their_file(tmp_path: Path) -> None:
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
