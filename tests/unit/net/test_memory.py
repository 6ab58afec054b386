"""The network in memory: the same commands, errors and life cycle as over sockets."""

import asyncio

import pytest

from sluicemq.errors import ConnectionLostError
from sluicemq.net.channel import Channel
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.network import MemoryNetwork
from sluicemq.wire.frames import Command


async def test_calls_go_through_both_ways() -> None:
    network, peers = MemoryNetwork(), []

    def handle(command: Command, peer: Peer) -> Command:
        peers.append(peer)
        return Command(0, {"n": str(command.opaque)}, command.body)

    await network.listener(Dispatcher({7: handle})).start("127.0.0.1", [10911])
    channel = await network.dial(
        "127.0.0.1:10911", on_request=lambda c, _: Command(0, {"code": str(c.code)})
    )
    got = await asyncio.gather(*(channel.call(Command(7, None, bytes(n)), 5) for n in range(20)))
    assert [len(command.body) for command in got] == list(range(20))
    peer: Peer = peers[0]
    answer: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
    peer.send_request(Command(307), answer.set_result)
    assert (await answer).fields == {"code": "307"}
    assert str(peer.local) == "127.0.0.1:10911"
    assert peer.remote == channel.local


async def test_either_end_closes_both() -> None:
    network, peers, gone = MemoryNetwork(), [], []
    dispatcher = Dispatcher({7: lambda c, peer: peers.append(peer) or Command(0)})
    await network.listener(dispatcher, on_disconnect=gone.append).start("h", [1])
    closed: list[Channel] = []
    first = await network.dial("h:1", on_close=closed.append)
    await first.call(Command(7), 5)
    await first.close()
    assert peers[0].closed
    second = await network.dial("h:1", on_close=closed.append)
    await second.call(Command(7), 5)
    peers[1].close()
    await asyncio.sleep(0.01)
    assert second.closed
    assert gone == peers
    assert closed == [first, second]


async def test_a_stopped_service_breaks_its_connections_and_takes_no_more() -> None:
    network = MemoryNetwork()
    listener = network.listener(Dispatcher({7: lambda c, _: None}))
    await listener.start("h", [1])
    channel = await network.dial("h:1")
    call = asyncio.get_running_loop().create_task(channel.call(Command(7), 5))
    await asyncio.sleep(0.01)
    await listener.close()
    with pytest.raises(ConnectionLostError):
        await call
    with pytest.raises(ConnectionLostError, match="No server listens on h:1"):
        await network.dial("h:1")
