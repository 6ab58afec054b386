"""A slave's connection to its master: the late end of an old one does not end the new one."""

import asyncio
from collections.abc import Callable

import pytest

from sluicemq.broker.replication.log_receiver import keep_connected
from sluicemq.net.stream import ByteStream, StreamProtocol
from waiting import limit


class FakeReceiver:
    """Notes the calls of its connections."""

    def __init__(self) -> None:
        self.last_error = ""
        self.calls: list[str] = []

    def start(self, stream: ByteStream) -> None:
        self.calls.append("connected")

    def data_received(self, data: bytes) -> None:
        self.calls.append(data.decode())

    def resume_writing(self) -> None:
        self.calls.append("writable")

    def connection_lost(self) -> None:
        self.calls.append("lost")

    def tick(self) -> None: ...


class OpenStream:
    """A stream that only its own side closes."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Network:
    """Opens streams, and remembers their protocols."""

    def __init__(self) -> None:
        self.streams: list[OpenStream] = []
        self.users: list[StreamProtocol] = []

    async def dial_stream(self, address: str, user: StreamProtocol) -> OpenStream:
        self.streams.append(OpenStream())
        self.users.append(user)
        return self.streams[-1]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(limit(10)):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_the_late_end_of_an_old_connection_does_not_end_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluicemq.broker.replication.log_receiver.RETRY_S", 0.0)
    monkeypatch.setattr("sluicemq.broker.replication.log_receiver.TICK_S", 0.001)
    receiver, network = FakeReceiver(), Network()
    task = asyncio.create_task(keep_connected(network, receiver, lambda: "master:1"))  # type: ignore[arg-type]
    try:
        await until(lambda: len(network.users) == 1)
        network.users[0].data_received(b"one")
        network.streams[0].close()
        await until(lambda: len(network.users) == 2)
        network.users[1].data_received(b"two")
        network.users[0].connection_lost()
        network.users[0].data_received(b"late")
        network.users[0].resume_writing()
        network.users[1].resume_writing()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert receiver.calls == [
        "connected", "one", "lost", "connected", "two", "writable", "lost",
    ]  # fmt: skip
