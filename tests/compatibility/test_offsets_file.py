"""The offsets file of a broadcasting consumer: Java reads ours, we read Java's (client 5.3.3)."""

import subprocess
from pathlib import Path

import pytest
from peer import toolchain

from conftest import missing_tool_is_a_reason
from sluicemq.client.aio.offsets import decode_local_offsets, encode_local_offsets
from sluicemq.model.topic import MessageQueue
from waiting import limit

OFFSETS = {
    MessageQueue("t", "broker-a", 0): 5,
    MessageQueue("t", "broker-a", 11): 70_000_000_000,
    MessageQueue("%RETRY%g", "b-2", 3): 0,
}


@pytest.fixture
def shares(tmp_path: Path):
    """Asks tests/compatibility/java/Shares.java; its offsets lie in the test's directory."""
    source = Path(__file__).parent / "java" / "Shares.java"
    with missing_tool_is_a_reason():
        path = toolchain.java_classes("client-5.3.3", [source])

    def ask(*fields: str) -> str:
        home = f"-Drocketmq.client.localOffsetStoreDir={tmp_path}"
        command = [toolchain.tool("java"), home, "-cp", path, "Shares"]
        line = "\t".join(fields) + "\n"
        done = subprocess.run(
            command, input=line, capture_output=True, text=True, timeout=limit(60), check=True
        )
        return done.stdout.strip()

    return ask


def text_of(queue: MessageQueue) -> str:
    return f"{queue.topic}:{queue.broker}:{queue.queue_id}"


def test_java_reads_our_file(shares, tmp_path):
    directory = tmp_path / "10.0.0.5@DEFAULT" / "g"
    directory.mkdir(parents=True)
    (directory / "offsets.json").write_text(encode_local_offsets(OFFSETS))
    assert shares("read", "g", ",".join(map(text_of, OFFSETS))) == "5,70000000000,0"


def test_we_read_javas_file_and_write_the_same_bytes(shares, tmp_path):
    pairs = ",".join(f"{text_of(queue)}={offset}" for queue, offset in OFFSETS.items())
    assert shares("write", "g", pairs) == "written 10.0.0.5@DEFAULT"
    text = (tmp_path / "10.0.0.5@DEFAULT" / "g" / "offsets.json").read_text()
    assert decode_local_offsets(text) == OFFSETS
    assert len(text) == len(encode_local_offsets(OFFSETS)), "the same but for the order"
