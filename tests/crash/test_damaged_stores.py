"""Damaged store directories: each is told with path and cure, or opens with all that is there.

Every case is a copy of one small store (two queues of 15 messages over three files of the log) that
a broker has written, damaged as the case says, and started by a real broker on the real file
system. A refused start changes nothing.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import SluiceError
from sluicemq.record.codec import decode_records
from sluicemq.store.store import Store
from waiting import limit

SOURCE = Path(__file__).parents[2] / "src"
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
LOG_BYTES, QUEUE_BYTES = 65_536, 400
LOG = [f"commitlog/{number * LOG_BYTES:020d}" for number in range(4)]
QUEUE = f"consumequeue/T/0/{0:020d}"
NOBODY = 65534
END = 1 << 40


def store_config(root: Path) -> StoreConfig:
    return StoreConfig(
        root=str(root), commit_log_file_bytes=LOG_BYTES, consume_queue_file_bytes=QUEUE_BYTES
    )


async def serve_once(root: Path) -> list[int]:
    """A broker starts there and stops; the numbers of the messages that it showed."""
    config = BrokerConfig(listen_port=0, metrics_enable=False, bind_address="127.0.0.1")
    broker = Broker(config, store_config(root))
    await broker.start()
    try:
        return sorted(number for queue in (0, 1) for number in read(broker.store, queue))
    finally:
        await broker.close()


def read(store: Store, queue: int) -> Iterator[int]:
    offset, end = store.queue_offsets("T", queue)
    while offset < end:
        result = store.reader.read("T", queue, offset, 32)
        for message in decode_records(b"".join(result.data)):
            yield struct.unpack_from(">i", message.body)[0]
        assert result.next_offset > offset
        offset = result.next_offset


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-damaged-"))  # also nobody may look into it
    directory.chmod(0o755)
    root = directory / "store"
    asyncio.run(serve_once(root))
    store = Store.open(store_config(root))
    for number in range(30):
        body = struct.pack(">i", number) * 1500
        properties = f"UNIQ_KEY\x01U{number}\x02".encode()
        store.writer.append("T", number % 2, body, properties, 0, 0, 0, 1, HOST, HOST)
        store.commit()
    store.close()
    asyncio.run(serve_once(root))
    yield root
    shutil.rmtree(directory)


@pytest.fixture
def root(template: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-damaged-"))
    directory.chmod(0o755)
    shutil.copytree(template, directory / "store")
    yield directory / "store"
    for path in [directory, *directory.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(directory)


# --- how to damage


def remove(*names: str) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        for name in names:
            path = root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    return do


def resize(name: str, size: int) -> Callable[[Path], None]:
    return lambda root: os.truncate(root / name, size)


def content(data: bytes, *names: str) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)

    return do


def clear(root: Path, name: str) -> Path:
    path = root / name
    with contextlib.suppress(FileNotFoundError):
        remove(name)(root)
    return path


def directory_instead(name: str) -> Callable[[Path], None]:
    return lambda root: clear(root, name).mkdir(parents=True)


def file_instead(name: str) -> Callable[[Path], None]:
    return lambda root: clear(root, name).write_bytes(b"a file") and None


def loop_instead(name: str) -> Callable[[Path], None]:
    return lambda root: clear(root, name).symlink_to(Path(name).name)


def link_to_nothing(name: str) -> Callable[[Path], None]:
    return lambda root: clear(root, name).symlink_to("nothing")


def overwrite(name: str, at: int, data: bytes) -> Callable[[Path], None]:
    """At a place from the beginning of a file, or from the end of what is written in it."""

    def do(root: Path) -> None:
        file = bytearray((root / name).read_bytes())
        end = len(file.rstrip(b"\0"))
        place = end if at == END else end + at if at < 0 else at
        file[place : place + len(data)] = data
        (root / name).write_bytes(file)

    return do


def killed(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """The broker had been killed before."""

    def do(root: Path) -> None:
        damage(root)
        (root / "abort").write_bytes(b"1")

    return do


def locked(root: Path) -> None:
    """By a process that lives; it ends with the test's directory."""
    script = (
        "import sys; from sluicemq.files import SYSTEM_FILES\n"
        "SYSTEM_FILES.lock(sys.argv[1]); print('locked', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(root / "lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    HOLDERS.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"


HOLDERS: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _end_of_holders() -> Iterator[None]:
    yield
    while HOLDERS:
        HOLDERS.pop().communicate(timeout=limit(10))


def units(offset: int, *entries: tuple[int, int, int]) -> Callable[[Path], None]:
    data = b"".join(struct.pack(">qiq", *entry) for entry in entries)
    return overwrite(QUEUE, offset * 20, data)


# --- the table

ALL = list(range(30))


class Case(NamedTuple):
    """Damage, and what is told: a pattern, or the messages that are there."""

    name: str
    damage: Callable[[Path], None]
    told: str | list[int]


BROKEN = b'{"topicConfigTable":'
CASES = [
    # the log
    Case("log file missing in the middle", remove(LOG[1]), rf"lacks the file {LOG_BYTES:020d}"),
    Case("first log file missing", remove(LOG[0]),
         rf"begins at {LOG_BYTES:020d}, but .*retention has not .*copy.*store repair"),
    Case("last log file missing", remove(LOG[2]), r"damaged at 131072.*sluice store repair"),
    Case("all log files missing", remove("commitlog"), r"no file in .*commitlog.*mounted\?"),
    Case("log file too short", resize(LOG[1], 100), r"has 100 bytes, but mappedFileSizeCommitLog"),
    Case("log file too long", resize(LOG[1], 90_000), r"has 90000 bytes.*mappedFileSizeCommitLog"),
    Case("log file empty in the middle", resize(LOG[1], 0), r"has 0 bytes.*Restore"),
    Case("log file empty at the end", content(b"", LOG[3]), ALL),
    Case("first log file full of zeros", killed(content(bytes(LOG_BYTES), *LOG[:1])), ALL[10:]),
    Case("foreign file in the log", content(b"mine", "commitlog/notes.txt"), ALL),
    Case("log file with a name of its own", content(bytes(LOG_BYTES), f"commitlog/{100:020d}"),
         r"is not a multiple of 65536.*Move"),
    Case("directory as log file", directory_instead(LOG[1]), r"Is a directory.*Move the directory"),
    Case("directory as next log file", directory_instead(LOG[3]), r"Is a directory.*Move"),
    Case("log file a link to itself", loop_instead(LOG[1]), r"symbolic links.*points to itself"),
    Case("log file a link to nothing", link_to_nothing(LOG[1]), r"No such file.*points nowhere"),
    Case("log a file", file_instead("commitlog"), r"commitlog must be a directory, but is a file"),
    Case("log a link to itself", loop_instead("commitlog"), r"symbolic links.*points to itself"),
    Case("torn tail behind the mark", killed(overwrite(LOG[2], END, b"\xda\xa3" * 30)), ALL),
    Case("last record damaged before the mark", killed(overwrite(LOG[2], -150, b"\xff" * 20)),
         r"damaged at \d+ \(byte \d+ of .*CRC.*sluice store repair"),
    Case("record of a later format before the mark",
         killed(overwrite(LOG[0], 4, bytes.fromhex("daa320af"))), [n for n in ALL if n]),
    # queues: derived, built again
    Case("queue file missing", remove(QUEUE), ALL),
    Case("all queues missing", remove("consumequeue"), ALL),
    Case("queue file too short", resize(QUEUE, 100), ALL),
    Case("queue file empty", resize(QUEUE, 0), ALL),
    Case("queue beyond the log", units(15, (9000, 300, 0), (9300, 300, 0)), ALL),
    Case("queue beyond the log, killed", killed(units(15, (9000, 300, 0))), ALL),
    Case("queue full of nonsense in the middle", units(5, (-7, -7, -7)), ALL),
    Case("queue files of another setting",
         lambda root: [os.truncate(p, 800) for p in root.rglob("consumequeue/*/*/0*")] and None,
         r"has 800 bytes, but mappedFileSizeConsumeQueue is 400.*=800"),
    Case("queues a file", file_instead("consumequeue"),
         r"consumequeue must be a directory.*Move the file away"),
    Case("topic's queues a file", file_instead("consumequeue/T"), r"Not a directory.*Move"),
    Case("directory as queue file", directory_instead(QUEUE), r"Is a directory.*Move"),
    Case("queue a link to itself", loop_instead("consumequeue/T/0"), r"symbolic.*points to itself"),
    # the small files
    Case("abort of a process that is gone", content(b"99999", "abort"), ALL),
    Case("abort a directory", directory_instead("abort"), r"Is a directory.*abort.*Move"),
    Case("lock of a process that is gone", content(b"lock", "lock"), ALL),
    Case("lock of a living process", locked, r"lock is locked by process \d+.*storePathRootDir"),
    Case("lock a directory", directory_instead("lock"), r"Is a directory.*lock.*Move"),
    Case("checkpoint full of nonsense", killed(content(b"\xa5" * 4096, "checkpoint")), ALL),
    Case("checkpoint too short", killed(content(b"12345", "checkpoint")), ALL),
    Case("checkpoint missing", remove("checkpoint"), ALL),
    Case("checkpoint a directory", directory_instead("checkpoint"), r"Is a directory.*checkpoint"),
    # tables
    Case("topics broken, .bak good", content(BROKEN, "config/topics.json"), ALL),
    Case("topics empty, .bak good", content(b"", "config/topics.json"), ALL),
    Case("topics and .bak broken", content(BROKEN, "config/topics.json", "config/topics.json.bak"),
         r"topics.json cannot be read .*character.*Restore a good copy"),
    Case("topics no text", content(b"\xff\xfe", "config/topics.json", "config/topics.json.bak"),
         r"topics.json cannot be read .*utf-8.*Restore"),
    Case("groups a number", content(b"5", "config/subscriptionGroup.json",
         "config/subscriptionGroup.json.bak"),
         r"subscriptionGroup.json.*not a JSON object.*Restore"),
    Case("offsets of a wrong shape", content(b'{"offsetTable":{"T@G":7}}',
         "config/consumerOffset.json"), r"consumerOffset.json cannot be read.*Restore"),
    Case("topics a directory", directory_instead("config/topics.json"), r"Is a directory.*Move"),
    Case("config a file", file_instead("config"), r"config must be a directory, but is a file"),
    # the index: derived, but its size has to be known
    Case("index file of an unknown size", content(b"abc", f"index/{20231114221320000}"),
         r"has 3 bytes.*maxHashSlotNum.*remove the directory index"),
    Case("index a file", file_instead("index"), r"index must be a directory, but is a file"),
    # formats that are not read here
    Case("DLedger", content(b"x", "dledger-n0/data/" + "0" * 20), r"log of DLedger.*Copy"),
    Case("queues in RocksDB", content(b"", "consumequeue_r/CURRENT"), r"RocksDB.*Move that dir"),
    Case("tables in RocksDB", content(b"", "config/topics/CURRENT"), r"is a RocksDB table"),
    Case("compaction, kept as found", content(b"{}", "compaction/position-checkpoint"), ALL),
    # the root itself
    Case("root a file", file_instead("."), r"Not a directory"),
    Case("root a link to itself", lambda root: clear(root, ".").symlink_to("store"),
         r"cannot be opened: .*/store.*link"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_damaged_store_is_told_with_path_and_cure_or_opens_with_all_there_is(
    root: Path, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.damage(root)
    before = names_and_sizes(root)
    fix = ""
    try:
        found: list[int] | str = asyncio.run(serve_once(root))
    except SluiceError as error:
        found = str(error)
        fix = error.fix
    if isinstance(found, str):
        assert str(root) in found, "it names the path"
        assert fix, "and a cure"
        assert names_and_sizes(root) == before, "a refused start changes nothing"
    if isinstance(case.told, str):
        assert isinstance(found, str), f"it opens, with {found}"
        assert re.search(case.told, found, re.DOTALL), found
    else:
        assert found == case.told
    errors = [r for r in caplog.records if r.exc_info and r.levelno >= logging.ERROR]
    assert not errors, "no traceback in the log"


def names_and_sizes(root: Path) -> dict[str, int]:
    """Without `lock` and `abort`, which say that a start was tried."""
    with contextlib.suppress(OSError):
        return {
            str(path.relative_to(root)): path.lstat().st_size
            for path in sorted(root.rglob("*"))
            if path.name not in ("lock", "abort") and not path.is_dir()
        }
    return {}


def test_the_table_has_more_than_thirty_kinds() -> None:
    assert len({case.name for case in CASES}) >= 30


# --- rights: only where the test may become somebody else


@pytest.fixture
def as_nobody() -> Iterator[Callable[[], None]]:
    if os.geteuid() != 0:
        pytest.skip("rights are tested as root, which can become somebody without any")
    yield lambda: os.seteuid(NOBODY)
    os.seteuid(0)


def own(root: Path) -> None:
    for path in [root, *root.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (LOG[1], 0o000), ("commitlog", 0o000), ("consumequeue/T/0", 0o000), (QUEUE, 0o000),
        ("config/topics.json", 0o000), ("config", 0o000), (".", 0o555), ("checkpoint", 0o000),
    ],
)  # fmt: skip
def test_what_may_not_be_read_or_written_is_named(
    root: Path, as_nobody: Callable[[], None], name: str, mode: int
) -> None:
    own(root)
    (root / name).chmod(mode)
    as_nobody()
    with pytest.raises(SluiceError) as raised:
        asyncio.run(serve_once(root))
    os.seteuid(0)
    assert str(root) in str(raised.value)
    assert "Permission denied" in str(raised.value)
    assert "permission to write" in raised.value.fix


# --- the command


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("gap", remove(LOG[1]), "lacks the file"),
        ("broken table", content(BROKEN, "config/topics.json", "config/topics.json.bak"),
         "Restore a good copy"),
        ("loop", loop_instead("commitlog"), "points to itself"),
        ("locked", locked, "is locked by process"),
    ],
)  # fmt: skip
def test_sluice_up_says_it_in_a_sentence_and_exits_with_1(
    root: Path, name: str, damage: Callable[[Path], None], told: str
) -> None:
    damage(root)
    settings = root.parent / "broker.conf"
    settings.write_text(
        f"mappedFileSizeCommitLog={LOG_BYTES}\nmappedFileSizeConsumeQueue={QUEUE_BYTES}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "sluicemq", "up", "--store", str(root), "-c", str(settings),
         "--nameserver-port", "0", "--broker-port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "NAMESRV_ADDR": ""},
    )  # fmt: skip
    try:
        _, complaint = process.communicate(timeout=limit(30))
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.returncode == 1
    assert told in complaint
    assert str(root) in complaint
    assert "Traceback" not in complaint
