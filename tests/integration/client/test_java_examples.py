"""docs/java-examples.md: every program runs, in the page's order, and prints what stands below it.

The page's blocks are the source. All share one cluster, but the one of access control; the address
that they name, and the default one, are that cluster's.
"""

import asyncio
import contextlib
import io
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from sluicemq.testing.embedded import embedded

PAGE = Path(__file__).parents[3] / "docs" / "java-examples.md"
ADDRESS = "127.0.0.1:9876"
PART = re.compile(r"^#+ (?P<heading>[^\n]*)$|^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
SOON = {
    "messageDelayLevel": " ".join(["1s"] * 18),
    "transactionTimeOut": "200",
    "transactionCheckInterval": "200",
    "traceTopicEnable": "true",
}
ACCOUNTS = """\
accounts:
- accessKey: desk
  secretKey: desk-secret
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: SUB
"""


class Program(NamedTuple):
    heading: str
    text: str
    prints: str


def programs(page: str) -> list[Program]:
    """The Python blocks with the block of text that follows, "" where none does."""
    found: list[Program] = []
    heading = ""
    for part in PART.finditer(page):
        heading = part["heading"] or heading
        if part["kind"] == "python":
            found.append(Program(heading, part["text"], ""))
        elif part["kind"] == "text":
            found[-1] = found[-1]._replace(prints=part["text"])
    return found


@contextlib.contextmanager
def serving(directory: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """The address of the name server of a cluster on a thread of its own."""
    is_up, address = threading.Event(), ""
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        nonlocal address
        async with embedded(tcp=True, store=directory, settings=settings) as mq:
            address = mq.servers.name_server_address
            is_up.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_up.wait(20)
        yield address
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("examples"), SOON) as address:
        yield address


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("guarded")
    rules = directory / "plain_acl.yml"
    rules.write_text(ACCOUNTS)
    with serving(directory, {"aclEnable": "true", "plainAclFile": str(rules)}) as address:
        yield address


PROGRAMS = programs(PAGE.read_text())


@pytest.mark.parametrize(
    "program", PROGRAMS, ids=[f"{n}-{one.heading}" for n, one in enumerate(PROGRAMS)]
)
def test_a_program_prints_what_the_page_says(program, request, tmp_path, monkeypatch):
    fixture = "guarded" if program.heading == "Access control" else "cluster"
    address = request.getfixturevalue(fixture)
    monkeypatch.setenv("NAMESRV_ADDR", address)
    monkeypatch.setenv("HOME", str(tmp_path))  # where broadcasting consumers keep offsets
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    code = compile(program.text.replace(ADDRESS, address), program.heading, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    assert printed.getvalue() == program.prints
