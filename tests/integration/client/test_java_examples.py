"""docs/java-examples.md: every program runs, in the page's order, and prints what stands below it.

The page's blocks are the source. All share one cluster, but the one of access control; the address
that they name, and the default one, are that cluster's.
"""

import asyncio
import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import pytest

from sluicemq.testing.embedded import embedded

PAGE = Path(__file__).parents[3] / "docs" / "java-examples.md"
CONCURRENT = {"By SQL92"}
"""Sections whose programs read several queues: which message comes first is open."""
ADDRESS = "127.0.0.1:9876"
PART = re.compile(
    r"^#+ (?P<heading>[^\n]*)$|^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SOON = {
    "messageDelayLevel": " ".join(["1s"] * 18),
    "transactionTimeOut": "200",
    "transactionCheckInterval": "200",
    "traceTopicEnable": "true",
}
ACCOUNTS = """\
accounts:
- accessKey: parcel-desk
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
    address: Future[str] = Future()
    end = asyncio.Event()

    async def serve() -> None:
        async with embedded(tcp=True, store=directory, settings=settings) as mq:
            loops.append(asyncio.get_running_loop())
            address.set_result(mq.servers.name_server_address)
            await end.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(asyncio.run, serve())
        wait([address, served], 20, FIRST_COMPLETED)
        if served.done():
            served.result()
        try:
            yield address.result(0)
        finally:
            loops[0].call_soon_threadsafe(end.set)


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


SECTIONS: dict[str, list[Program]] = {}
for one in programs(PAGE.read_text()):
    SECTIONS.setdefault(one.heading, []).append(one)


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_programs_of_a_section_print_what_the_page_says(
    heading, request, tmp_path, monkeypatch
):
    address = request.getfixturevalue("guarded" if heading == "Access control" else "cluster")
    monkeypatch.setenv("NAMESRV_ADDR", address)
    monkeypatch.setenv("HOME", str(tmp_path))  # where broadcasting consumers keep offsets
    monkeypatch.chdir(tmp_path)
    for program in SECTIONS[heading]:
        printed = io.StringIO()
        code = compile(program.text.replace(ADDRESS, address), heading, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
        if heading in CONCURRENT:
            assert sorted(printed.getvalue().splitlines()) == sorted(program.prints.splitlines())
        else:
            assert printed.getvalue() == program.prints


def test_the_page_has_all_subjects():
    assert len(SECTIONS) >= 20
    assert sum(map(len, SECTIONS.values())) >= 30
