"""HTTP/2 and HPACK beside another implementation: the packages h2 and hpack as client and judge."""

import asyncio
import contextlib
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.connections import Wire, World, settle
from fuzz.grpc_calls import SERVICE
from http2_client import frames_of, message
from sluicemq.net.http2 import Http2Connection
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderDecoder, encode_headers
from sluicemq.wire.http2 import Http2Error

pytestmark = pytest.mark.slow

hpack = pytest.importorskip("hpack")
pytest.importorskip("h2")

LATIN = st.text(st.characters(max_codepoint=255), max_size=40)
NAMES = st.sampled_from(["x-mq-client-id", "authorization", ":path", "te", "user-agent", "x"])
FIELDS = st.lists(st.tuples(NAMES, LATIN), max_size=10)


# -------------------------------------------------------------------------------------- headers


@given(st.lists(st.tuples(FIELDS, st.booleans(), st.sampled_from([None, 0, 50, 4096])), max_size=6))
def test_what_hpack_writes_is_read(blocks: list[tuple[list[tuple[str, str]], bool, Any]]) -> None:
    encoder, reader = hpack.Encoder(), HeaderDecoder()
    for fields, is_coded, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        assert reader.decode(encoder.encode(raw, huffman=is_coded)) == dict(fields)


@given(FIELDS)
def test_what_is_written_hpack_reads(fields: list[tuple[str, str]]) -> None:
    found = hpack.Decoder().decode(encode_headers(fields), raw=True)
    assert [(name.decode("latin-1"), value.decode("latin-1")) for name, value in found] == fields


@given(FIELDS, st.booleans(), st.data())
def test_of_a_changed_block_both_make_the_same(
    fields: list[tuple[str, str]], is_coded: bool, data: st.DataObject
) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
    block = bytearray(hpack.Encoder().encode(raw, huffman=is_coded))
    for _ in range(data.draw(st.integers(1, 3)) if block else 0):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    block = block[: data.draw(st.integers(0, len(block)))]
    theirs: dict[str, str] | None = None
    with contextlib.suppress(hpack.HPACKError):
        found = hpack.Decoder().decode(bytes(block), raw=True)
        theirs = {n.decode("latin-1"): v.decode("latin-1") for n, v in found}
    mine: dict[str, str] | None = None
    with contextlib.suppress(Http2Error):
        mine = HeaderDecoder().decode(bytes(block))
    assert mine == theirs


# --------------------------------------------------------------------------------------- frames


class Talk:
    """A client of the h2 library that does everything it may, on a connection in memory."""

    def __init__(self, rng: Random) -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        self.rng, self.world, self.wire = rng, World(), Wire()
        found = self.world.server._new_connection()
        assert isinstance(found, Http2Connection)
        self.connection = found
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        configuration = H2Configuration(client_side=True, header_encoding="latin-1")
        self.client: Any = H2Connection(configuration)
        self.client.initiate_connection()
        self.is_setting = True
        self.left: dict[int, bytes] = {}  # what is to be sent
        self.wanted: dict[int, bytes] = {}
        self.got: dict[int, bytearray] = {}
        self.status: dict[int, str] = {}
        self.unread = list[tuple[int, int]]()  # bytes and their stream, not given back yet

    async def exchange(self) -> None:
        """What h2 has to say, and all that is answered."""
        while data := self.client.data_to_send():
            size = self.rng.choice((len(data), 7, 100))
            for at in range(0, len(data), max(size, len(data) // 50)):
                self.connection.data_received(data[at : at + max(size, len(data) // 50)])
            await settle(self.connection, self.wire)
            written, self.wire.written = self.wire.written, b""
            for frame in frames_of(written)[0]:  # h2 takes larger ones from the next call on
                for event in self.client.receive_data(h.encode_frame(*frame)):
                    self.see(event)
            assert not self.wire.is_closed

    def see(self, event: Any) -> None:
        kind, stream = type(event).__name__, getattr(event, "stream_id", 0)
        if kind == "DataReceived":
            if stream in self.got:
                self.got[stream] += event.data
            self.unread.append((event.flow_controlled_length, stream))
        elif kind in ("TrailersReceived", "ResponseReceived"):
            fields = dict(event.headers)
            self.status[stream] = fields.get("grpc-status", self.status.get(stream, ""))
        elif kind == "SettingsAcknowledged":
            self.is_setting = False
        assert kind != "ConnectionTerminated", event

    def open(self) -> None:
        stream = self.client.get_next_available_stream_id()
        name = self.rng.choice(("QueryRoute", "SendMessage", "ReceiveMessage", "PullMessage"))
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", SERVICE + name),
            (":authority", "a"), ("te", "trailers"), ("content-type", "application/grpc"),
            ("x-mq-client-id", f"c{self.rng.randrange(3)}"),
        ]  # fmt: skip
        self.client.send_headers(stream, fields)
        text = self.rng.randbytes(self.rng.choice((0, 5, 1000, 20_000, 70_000)))
        several = b"".join(map(message, (b"x" * 20_000, b"", b"y" * 100)))
        self.left[stream] = message(text)
        self.wanted[stream] = several if name == "ReceiveMessage" else message(text)
        self.got[stream] = bytearray()

    def say(self) -> None:
        if not self.left:
            return
        stream = self.rng.choice(list(self.left))
        room = min(
            self.client.local_flow_control_window(stream), self.client.max_outbound_frame_size
        )
        padding = self.rng.choice((None, None, 0, 9))
        room -= 0 if padding is None else padding + 1
        if room <= 0:
            return
        rest = self.left[stream]
        size = self.rng.choice((1, 5, 300, room, room))
        part, rest = rest[: min(size, room)], rest[min(size, room) :]
        self.client.send_data(stream, part, end_stream=not rest, pad_length=padding)
        self.left[stream] = rest
        if not rest:
            del self.left[stream]

    def other(self) -> None:
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            self.client.ping(rng.randbytes(8))
        elif kind < 0.6 and not self.is_setting:  # h2 takes the first answer for all
            self.is_setting = True
            number, sizes = rng.choice(
                ((4, (0, 1, 100, 65_535, 1 << 20)), (5, (16_384, 50_000, 1 << 20)))
            )
            self.client.update_settings({number: rng.choice(sizes)})
        elif kind < 0.7 and self.left:
            stream = rng.choice(list(self.left))
            self.client.reset_stream(stream)
            for known in (self.left, self.got, self.wanted):
                known.pop(stream)
        else:
            self.give_back()

    def give_back(self) -> None:
        """Windows for what was received."""
        for size, stream in self.unread:
            self.client.acknowledge_received_data(size, stream)
        self.unread.clear()

    async def finish(self) -> None:
        """With windows that let all through."""
        await self.exchange()
        self.client.update_settings({4: 1 << 24})
        self.client.increment_flow_control_window(1 << 24)
        for _ in range(10_000):
            self.say()
            await self.exchange()
            self.give_back()
            await self.exchange()
            if not self.left:
                break
        assert not self.left
        assert {stream: bytes(data) for stream, data in self.got.items()} == self.wanted
        assert {self.status[stream] for stream in self.got} <= {"0"}
        self.wire.is_closed = True
        self.connection.connection_lost(None)


@given(st.integers(0, 1 << 40))
def test_a_client_of_h2_finds_nothing_wrong(seed: int) -> None:
    async def main() -> None:
        talk = Talk(Random(seed))
        await talk.exchange()
        for _ in range(60):
            talk.rng.choice((talk.open, talk.say, talk.say, talk.say, talk.other))()
            if talk.rng.random() < 0.6:
                await talk.exchange()
        await talk.finish()

    asyncio.run(main())
