"""`sluice up --store COPY --read-only` over stores of the real broker, whole and damaged.

Whatever it does, the tree below stays as it was: each name, byte, permission, time of change and
inode is compared. The golden stores have files of other sizes than a broker's defaults.
"""

import asyncio
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simulation.stepped import pull_fields, send_fields
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import StoreError
from sluicemq.net.channel import dial
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command
from waiting import limit

ROOT = Path(__file__).parents[2]
STORES = ROOT / "tests" / "golden" / "store"
ARCHIVES = {"golden1": "golden1", "golden2": "golden2", "golden3": "golden3_trans"}
TIMEOUT_S = 30
# The super-user has to obey permissions too when it gave up CAP_DAC_OVERRIDE (1) before an exec.
WITHOUT_PRIVILEGES = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def unpack(name: str, target: Path) -> Path:
    with tarfile.open(STORES / f"{ARCHIVES[name]}.tar.gz") as tar:
        wanted = [m for m in tar.getmembers() if not m.name.endswith("timerwheel")]
        tar.extractall(target, wanted, filter="data")
    return target / name / "store"


def state(root: Path) -> dict[str, object]:
    """Every name with its content and all of its metadata but the time of the last access."""
    found: dict[str, object] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (
            content, stat.st_mode, stat.st_uid, stat.st_gid, stat.st_size, stat.st_mtime_ns,
            stat.st_ctime_ns, stat.st_ino, stat.st_nlink, stat.st_blocks,
        )  # fmt: skip
    return found


# --- what may be wrong with a copy


def as_it_is(root: Path) -> None:
    """Nothing."""


def without_queues(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")


def without_index(root: Path) -> None:
    shutil.rmtree(root / "index")


def log_alone(root: Path) -> None:
    for path in root.iterdir():
        if path.name != "commitlog":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def crashed(root: Path) -> None:
    (root / "abort").write_text("4711")


def torn_tail(root: Path) -> None:
    """Garbage where the next record would begin, after a crash."""
    crashed(root)
    path = max((root / "commitlog").iterdir())
    data = bytearray(path.read_bytes())
    end = len(data.rstrip(b"\0")) + 64
    if end + 100 < len(data):
        data[end : end + 100] = b"\xda\xa3\x20\xa7" * 25
        path.write_bytes(data)


def empty_last_file(root: Path) -> None:
    """The trace of a crash while a file was made."""
    crashed(root)
    (root / "commitlog" / f"{32768:020d}").touch()


TROUBLES = [
    as_it_is, without_queues, without_index, log_alone, crashed, torn_tail, empty_last_file,
]  # fmt: skip


async def ask(address: str, code: int, fields: dict[str, object], body: bytes = b"") -> Command:
    channel = await dial(address)
    try:
        texts = {name: str(value) for name, value in fields.items()}
        return await channel.call(Command(code, texts, body), 10.0)
    finally:
        await channel.close()


def settings(root: Path, **changes: Any) -> tuple[BrokerConfig, StoreConfig]:
    broker = BrokerConfig(bind_address="127.0.0.1", listen_port=0, metrics_enable=False)
    return broker, StoreConfig(root=str(root), flush_interval_ms=10, **changes)


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
@pytest.mark.parametrize("name", ARCHIVES)
async def test_a_java_store_is_served_and_not_one_byte_of_it_changes(
    name: str, trouble: Callable[[Path], None], tmp_path: Path
) -> None:
    root = unpack(name, tmp_path)
    trouble(root)
    before = state(root)
    broker = Broker(*settings(root), read_only=True)
    await broker.start()
    try:
        found = []
        for queue_id in range(4):
            fields = pull_fields("TopicA", queueId=queue_id)
            answer = await ask(broker.address, 11, fields)
            found += decode_records(answer.body) if answer.code == 0 else []
        wanted = {"golden1": 11, "golden2": 12, "golden3": 1}[name]
        assert len(found) == wanted
        if name != "golden3":
            by_key = {"topic": "TopicA", "key": "k1", "maxNum": 10, "beginTimestamp": 0,
                      "endTimestamp": 2**62}  # fmt: skip
            answer = await ask(broker.address, 12, by_key)
            keys = {m.properties["KEYS"] for m in decode_records(answer.body)}
            assert keys == {"k1 k2"}, answer.remark
        refused = await ask(broker.address, 310, send_fields("TopicA"), b"no")
        assert (refused.code, "read-only" in (refused.remark or "")) == (16, True)
        fields = {"consumerGroup": "GroupA", "topic": "TopicA", "queueId": 2}
        if "GroupA" in broker.core.groups:
            assert (await ask(broker.address, 15, fields | {"commitOffset": 2})).code == 0
        broker.core.topics.document.changed = True
        await asyncio.sleep(0.1)
    finally:
        await broker.close()
    assert state(root) == before


async def test_a_directory_that_is_no_store_is_refused_and_stays_empty(tmp_path: Path) -> None:
    before = state(tmp_path)
    with pytest.raises(StoreError, match="is not a message store"):
        await Broker(*settings(tmp_path), read_only=True).start()
    assert state(tmp_path) == before


# --- as a process


@pytest.fixture
def running() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_PRIVILEGES, "-m", "sluicemq", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NAMESRV_ADDR": "127.0.0.1:1"},
        )
        started.append(process)
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], limit(TIMEOUT_S))[0]:
            process.kill()
            raise AssertionError(f"not ready: {process.communicate()[1]}")
        return process, process.stdout.readline()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def is_kept_from_writing(directory: Path) -> bool:
    attempt = f"open({str(directory / 'attempt')!r}, 'w')"
    command = [sys.executable, "-c", WITHOUT_PRIVILEGES, "-c", attempt]
    done = subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return done.returncode != 0


def sluice(names: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluicemq", *arguments, "-n", names],
        capture_output=True,
        text=True,
        timeout=limit(TIMEOUT_S),
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


@pytest.mark.parametrize("name", ["golden1", "golden3"])
def test_a_user_walks_through_his_copy_without_the_right_to_write(
    name: str, tmp_path: Path, running: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    root = unpack(name, tmp_path)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if not is_kept_from_writing(root):
        pytest.skip("this process may write everywhere and cannot give that up")
    before = state(root)
    process, line = running(
        "up", "--nameserver-port", "0", "--broker-port", "0", "--store", str(root), "--read-only",
    )  # fmt: skip
    assert re.fullmatch(
        rf"ready nameserver=\S+ broker=\S+ store={root} read-only metrics=\S+\n", line
    )
    names = line.split()[1].removeprefix("nameserver=")
    topics = sluice(names, "topic", "list", "--json")
    assert '"TopicA"' in topics.stdout
    look = sluice(names, "consume", "TopicA", "--max", "1", "--timeout", "5", "--json")
    assert '"topic":"TopicA"' in look.stdout.replace(" ", ""), look.stderr
    if name == "golden1":
        groups = sluice(names, "group", "list", "--json")
        assert '"GroupA"' in groups.stdout
        consumed = sluice(
            names, "consume", "TopicA", "--group", "visitor", "--tags", "TagA", "--max", "1",
            "--timeout", "20", "--json",
        )  # fmt: skip
        assert "TagA" in consumed.stdout, consumed.stderr
    for change in (["produce", "TopicA", "x"], ["topic", "create", "N"], ["group", "create", "N"]):
        done = sluice(names, *change)
        assert done.returncode == 1
        assert "This broker is read-only" in done.stderr
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert process.returncode == 0
    assert "opened the store in" in errors
    assert "Traceback" not in errors
    assert state(root) == before


def test_a_read_only_broker_does_not_register_where_the_copied_configuration_says(
    tmp_path: Path, running: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    root = unpack("golden1", tmp_path)
    conf = tmp_path / "broker.conf"
    conf.write_text("namesrvAddr = 127.0.0.1:1\nbrokerIP1 = 10.1.2.3\n")
    process, line = running(
        "broker", "-c", str(conf), "--host", "127.0.0.1", "--port", "0", "--store", str(root),
        "--read-only",
    )  # fmt: skip
    assert re.fullmatch(rf"ready broker=127.0.0.1:\d+ store={root} read-only metrics=\S+\n", line)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert "127.0.0.1:1 " not in errors
    assert "ignoring brokerIP1 and brokerIP2" in errors
