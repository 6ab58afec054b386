"""Records with the checksum property: what is written, and what recovery makes of it."""

import struct
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import ConfigurationError, MessageIllegalError
from sluicemq.model.message import PREPARED
from sluicemq.record.codec import CHECKSUM_NAME, has_valid_checksum
from sluicemq.record.layout import PROPERTIES_BYTES_MAX

LOG = "/store/commitlog/" + "0" * 20
IPV6 = bytes(15) + b"\x01" + struct.pack(">i", 9)
HOSTS = (IPV6, bytes([127, 0, 0, 1]) + struct.pack(">i", 10911))
LONG_TOPIC = "%RETRY%" + "g" * 190
CHECKED = {"checksum_property": True, "checksum_property_required": True}


def fill(bench: Any) -> list[int]:
    """Plain, IPv6, V2, prepared, batched, with a client's own checksum; over several files."""
    bench.open(**CHECKED)
    places = []
    for number in range(8):
        body = b"%d" % number * 150
        places += [
            bench.append(body, tag="t")[0],
            bench.append(body, host=IPV6)[0],
            bench.append(body, topic=LONG_TOPIC)[0],
            bench.append(body, sys_flag=PREPARED)[0],
            bench.append(body, properties={CHECKSUM_NAME: "1234567890", "a": "b"})[0],
        ]
        parts = [(0, b"part", b"a\x01b", 0), (0, b"", b"", 0), (0, b"x", b"__CRC32#\x017\x02", 0)]
        places += bench.store.writer.append_batch("T", 0, parts, 0, 1, HOSTS[number % 2], IPV6)[0]
        bench.store.commit()
    return places


def test_every_kind_of_record_is_sealed(bench: Any) -> None:
    places = fill(bench)
    for place in places:
        record = bench.store.reader.record_at(place)
        assert record is not None
        assert has_valid_checksum(record)
        assert record.count(CHECKSUM_NAME.encode()) == 1
    assert bench.store.written_offset > 2 * bench.config.commit_log_file_bytes


@pytest.mark.parametrize("kill", [False, True])
def test_a_restart_that_demands_checksums_finds_everything(bench: Any, kill: bool) -> None:
    fill(bench)
    before, end = bench.messages(), bench.store.written_offset
    bench.reopen(kill=kill)
    assert (bench.messages(), bench.store.written_offset) == (before, end)


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, ["green", "Green"]), (CHECKED, ["green"])], ids=["no", "yes"]
)
def test_a_flipped_bit_in_the_properties_shows_where_checksums_are_demanded(
    bench: Any, settings: dict[str, bool], expected: list[str]
) -> None:
    bench.open(checksum_property=True)
    bench.send(b"first", properties={"color": "green"})
    ((place, _),) = bench.send(b"second", properties={"color": "green"})
    bench.files = bench.files.kill()
    log = bench.files.open(LOG)
    log.pwrite(b"G", log.pread(4096, 0).index(b"green", place))
    bench.open(**settings)
    assert [message.properties["color"] for message in bench.messages()] == expected


def test_a_record_without_a_checksum_counts_only_where_none_is_demanded(bench: Any) -> None:
    bench.open()
    bench.send(b"plain")
    bench.reopen(kill=True, checksum_property=True)
    bench.send(b"sealed")
    bench.reopen(kill=True)
    assert bench.bodies() == [b"plain", b"sealed"]


def test_the_checksum_counts_as_properties(bench: Any) -> None:
    bench.open(checksum_property=True, commit_log_file_bytes=1 << 17)
    room = PROPERTIES_BYTES_MAX - 20 - len("n\x01\x02")
    bench.send(b"body", properties={"n": "v" * room})
    with pytest.raises(MessageIllegalError, match="properties have"):
        bench.append(b"body", properties={"n": "v" * (room + 1)})
    with pytest.raises(MessageIllegalError, match="properties have"):
        bench.store.writer.append_batch("T", 0, [(0, b"", b"v" * 32750, 0)], 0, 1, IPV6, IPV6)
    bench.store.commit()
    assert len(bench.messages()) == 1


def test_demanding_what_nobody_writes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="enabledAppendPropCRC = true too"):
        StoreConfig(checksum_property_required=True)
