"""The limits of one connection, one address, and all connections of a server together."""

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from framing import frame
from sluicemq.errors import RequestError
from sluicemq.files import descriptors
from sluicemq.model.addresses import is_loopback
from sluicemq.model.ids import Host
from sluicemq.net import limits
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import (
    AddressLimit,
    LogRateLimit,
    ServerLimits,
    UnfinishedBytes,
    check_fastjson_extensions,
    check_request,
)
from sluicemq.net.server import RemotingServer
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command, FrameReader, encode, encode_response
from waiting import limit


class Carrier:
    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None:
        self.closed = True


def new_peer() -> Peer:
    return Peer(Carrier(), Host("10.0.0.1", 1), Host("10.0.0.2", 2))


def ok(command: Command, _: Peer) -> Command:
    return Command(0, {})


@contextlib.asynccontextmanager
async def serving(dispatcher: Dispatcher, **options: Any) -> AsyncIterator[RemotingServer]:
    server = RemotingServer(dispatcher, **options)
    await server.start("127.0.0.1", [0])
    try:
        yield server
    finally:
        await server.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1 << 16), limit(5)) == b""
    except ConnectionResetError:
        return True


# --------------------------------------------------------------------------- connections


def test_an_address_has_so_many_connections_and_gets_one_back_when_one_ends() -> None:
    crowd = AddressLimit(2)
    assert crowd.acquire("10.0.0.1")
    assert crowd.acquire("10.0.0.1")
    assert not crowd.acquire("10.0.0.1")
    assert crowd.acquire("10.0.0.2")
    crowd.release("10.0.0.1")
    assert crowd.acquire("10.0.0.1")
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
        crowd.release(address)
    assert len(crowd) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1"])
def test_loopback_has_any_number_of_connections(address: str) -> None:
    crowd = AddressLimit(1)
    assert all(crowd.acquire(address) for _ in range(3))
    assert is_loopback(address)
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("no address")


def test_no_limit_is_zero() -> None:
    crowd = AddressLimit(0)
    assert all(crowd.acquire("10.0.0.1") for _ in range(3))


async def test_one_connection_too_many_of_an_address_is_closed_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(
        Dispatcher({7: ok}), limits=ServerLimits(connections_per_address_max=1)
    ) as server:
        monkeypatch.setattr(server, "_addresses", AddressLimit(1, lambda _: False))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
        writer.write(encode(Command(7, {}, b"", 1)))
        await reader.read(10)
        other, also = await asyncio.open_connection("127.0.0.1", server.ports[0])
        assert await is_closed(other)
        writer.write(encode(Command(7, {}, b"", 2)))
        assert await reader.read(10)
        for each in (writer, also):
            each.close()


async def test_who_speaks_for_another_counts_as_itself_until_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speak_for(command: Command, peer: Peer) -> Command:
        peer.set_remote(Host("10.0.0.9", 9))
        return Command(0)

    async with serving(
        Dispatcher({7: speak_for}), limits=ServerLimits(connections_per_address_max=1)
    ) as server:
        monkeypatch.setattr(server, "_addresses", AddressLimit(1, lambda _: False))
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            writer.write(encode(Command(7, {}, b"", 1)))
            assert await reader.read(10)
            writer.close()
            while server.peers:
                await asyncio.sleep(0.01)


# --------------------------------------------------------------------------- unfinished frames


async def test_a_frame_that_does_not_become_whole_closes_its_connection() -> None:
    async with serving(
        Dispatcher({7: ok}), limits=ServerLimits(frame_timeout_s=0.1, idle_timeout_s=60)
    ) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
        data = encode(Command(7, {}, bytes(1000), 1))

        async def drip() -> None:  # each byte resets the idle time
            for byte in data:
                writer.write(bytes((byte,)))
                await asyncio.sleep(0.02)

        task = asyncio.ensure_future(drip())
        assert await is_closed(reader)
        task.cancel()
        writer.close()


async def test_a_silent_connection_outlives_the_time_of_a_frame() -> None:
    async with serving(
        Dispatcher({7: ok}), limits=ServerLimits(frame_timeout_s=0.05, idle_timeout_s=60)
    ) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
        await asyncio.sleep(0.3)
        writer.write(encode(Command(7, {}, b"", 1)))
        assert await reader.read(10)
        writer.close()


async def test_unfinished_frames_together_are_bounded_and_given_back() -> None:
    async with serving(
        Dispatcher({7: ok}), limits=ServerLimits(pending_bytes_max=1 << 20)
    ) as server:
        data = encode(Command(7, {}, bytes(700_000), 1))
        first, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
        writer.write(data[:-1])
        while server.unfinished.total_bytes < len(data) - 1:
            await asyncio.sleep(0.01)
        second, also = await asyncio.open_connection("127.0.0.1", server.ports[0])
        also.write(data[:-1])
        assert await is_closed(second)
        writer.write(data[-1:])
        assert await first.read(10)
        assert server.unfinished.total_bytes == 0
        for each in (writer, also):
            each.close()


def test_who_has_not_been_let_in_shares_a_quarter() -> None:
    pending = UnfinishedBytes(1000, is_guarded=True)
    assert pending.add(250, is_trusted=False)
    assert not pending.add(1, is_trusted=False)
    pending.add(-1, is_trusted=False)
    assert pending.add(700, is_trusted=True)
    pending.move_to_trusted(250)
    assert pending.untrusted_bytes == 0
    assert not pending.add(51, is_trusted=True)
    assert UnfinishedBytes(1000, is_guarded=False).add(1000, is_trusted=False)


# --------------------------------------------------------------------------- before authentication


def test_a_connection_that_is_only_refused_is_closed_after_a_while() -> None:
    def before(command: Command, _: Peer) -> bytes | None:
        return None if command.opaque == 0 else encode_response(command, 1, remark="no")

    dispatcher = Dispatcher({7: ok}, authorize=before)
    stranger, friend = new_peer(), new_peer()
    dispatcher.handle_frames(encode(Command(7, {}, b"", 0)), friend)
    for number in range(limits.REFUSALS_MAX):
        for peer in (stranger, friend):
            assert dispatcher.handle_frames(encode(Command(7, {}, b"", number + 1)), peer)[1]
            assert not peer.closed
    for peer in (stranger, friend):
        dispatcher.handle_frames(encode(Command(7, {}, b"", 99)), peer)
    assert stranger.closed
    assert not friend.closed


# --------------------------------------------------------------------------- headers and bodies


def answer_to(data: bytes, dispatcher: Dispatcher) -> Command:
    _, answers = dispatcher.handle_frames(data, new_peer())
    (answer,) = FrameReader().feed(answers)
    return answer


def test_too_many_header_fields_are_an_error_and_the_next_request_is_answered() -> None:
    dispatcher = Dispatcher({7: ok})
    fields = {f"f{number}": "" for number in range(limits.FIELDS_MAX + 1)}
    answer = answer_to(encode(Command(7, fields, b"", 1)), dispatcher)
    assert answer.code == 1
    assert "257 header fields, the limit is 256" in str(answer.remark)
    fields.popitem()
    assert answer_to(encode(Command(7, fields, b"", 1)), dispatcher).code == 0


@pytest.mark.parametrize("serialization", [0, 1])
def test_a_header_above_its_limit_breaks_the_connection(serialization: int) -> None:
    header = bytes(limits.HEADER_BYTES_MAX + 1)
    with pytest.raises(Exception, match="A header has 1048577 bytes, the limit is 1048576"):
        Dispatcher({7: ok}).handle_frames(frame(header, b"", serialization), new_peer())


def test_only_requests_that_bring_messages_have_large_bodies() -> None:
    body = bytes(limits.BODY_BYTES_MAX + 1)
    codes = limits.CODES_WITH_MESSAGES
    check_request(Command(RequestCode.SEND_MESSAGE_V2, {}, body), codes)
    check_request(Command(RequestCode.HEART_BEAT, {}, body), None)
    with pytest.raises(RequestError, match="has 1048577 bytes, the limit is 1048576"):
        check_request(Command(RequestCode.HEART_BEAT, {}, body), codes)
    small = bytes(limits.SMALL_BODY_BYTES_MAX + 1)
    check_request(Command(RequestCode.HEART_BEAT, {}, small), codes)
    with pytest.raises(RequestError, match="has 65537 bytes, the limit is 65536"):
        check_request(Command(RequestCode.CHECK_CLIENT_CONFIG, {}, small), codes)


def test_odd_json_may_be_small_only() -> None:
    odd = b"{" + b",".join(b"%d:0" % number for number in range(6000)) + b"}"
    codes = limits.CODES_WITH_MESSAGES
    assert len(odd) < limits.SMALL_BODY_BYTES_MAX
    with pytest.raises(
        RequestError, match="is not standard JSON; such bodies may have at most 65536 bytes"
    ):
        check_request(Command(RequestCode.CHECK_CLIENT_CONFIG, {}, odd), codes)
    with pytest.raises(
        RequestError, match="is not standard JSON; such bodies may have at most 65536 bytes"
    ):
        check_fastjson_extensions(odd)  # where a heartbeat is decoded
    check_request(Command(RequestCode.HEART_BEAT, {}, odd), codes)
    plain = orjson.dumps({str(number): 0 for number in range(5000)})
    check_request(Command(RequestCode.CHECK_CLIENT_CONFIG, {}, plain), codes)
    with pytest.raises(RequestError, match="has references and more than 8192 values"):
        check_fastjson_extensions(b'{"a":{"$ref":"$"},"b":[' + b"1," * 10_000 + b"1]}")
    with pytest.raises(RequestError, match="more than 250000 values, or more than 32768 objects"):
        check_request(Command(RequestCode.HEART_BEAT, {}, b"[" + b"[]," * 33_000 + b"[]]"), codes)
    check_request(Command(RequestCode.REGISTER_BROKER, {}, odd), codes)
    check_request(Command(RequestCode.SEND_MESSAGE, {}, odd), codes)


def test_a_header_of_nothing_but_odd_values_is_not_read_for_seconds() -> None:
    header = b"{" + b",".join(b"%d:0" % number for number in range(100_000)) + b"}"
    with pytest.raises(Exception, match="more than 4096 values"):
        Dispatcher({7: ok}).handle_frames(frame(header), new_peer())


def test_lengths_of_a_frame_are_unsigned() -> None:
    with pytest.raises(Exception, match="above the limit"):
        Dispatcher({}).handle_frames(struct.pack(">II", 0xFFFFFFFF, 4) + bytes(8), new_peer())


# --------------------------------------------------------------------------- log


def record(text: str, created: float, name: str = "a") -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, "", 0, text, (), None)
    made.created = created
    return made


def test_a_kind_of_record_is_logged_so_often_and_then_counted() -> None:
    limit = LogRateLimit(count_max=2, period_s=60)
    assert [limit.filter(record("x %s", 1.0 + n)) for n in range(5)] == [True] * 2 + [False] * 3
    assert limit.filter(record("y", 5.0))
    assert limit.filter(record("x %s", 5.0, "b"))
    later = record("x %s", 62.0)
    assert limit.filter(later)
    assert later.msg == "x %s (3 more like this were suppressed)"


def test_connections_end_where_the_descriptors_of_the_store_begin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(Dispatcher({1: ok})) as server:
            first, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            number = writer.get_extra_info("socket").fileno()
            monkeypatch.setattr(descriptors, "socket_descriptor_end", lambda: number)
            other, other_writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            assert await is_closed(other)
            monkeypatch.undo()
            last, last_writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            for reader, one in ((first, writer), (last, last_writer)):
                one.write(encode(Command(1, {})))
                assert await asyncio.wait_for(reader.read(1 << 16), limit(5))
            for one in (writer, other_writer, last_writer):
                one.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "open files is reserved for the store" in caplog.text
    assert "ulimit -n" in caplog.text
