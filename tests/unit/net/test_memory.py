"""The network in memory: the same commands, errors and life cycle as over sockets."""

import asyncio

import pytest

from sluicemq.errors import ConnectionLostError
from sluicemq.net.channel import Channel
from sluicemq.net.dispatch import Dispatcher
from sluicemq.net.network import MemoryNetwork
from sluicemq.net.peer import Peer
from sluicemq.wire.frames import Command


async def test_calls_go_through_both_ways() -> None:
    network, peers = MemoryNetwork(), []
    network.serve(
        "127.0.0.1:10911",
        Dispatcher({7: lambda c, _: Command(0, {"n": str(c.opaque)}, c.body)}),
        on_connect=peers.append,
    )
    channel = await network.dial(
        "127.0.0.1:10911", on_request=lambda c, _: Command(0, {"code": str(c.code)})
    )
    got = await asyncio.gather(*(channel.call(Command(7, None, bytes(n)), 5) for n in range(20)))
    assert [len(command.body) for command in got] == list(range(20))
    peer: Peer = peers[0]
    answer: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
    peer.ask(Command(307), answer.set_result)
    assert (await answer).fields == {"code": "307"}
    assert str(peer.local) == "127.0.0.1:10911"
    assert peer.remote == channel.local


async def test_either_end_closes_both() -> None:
    network, peers, gone = MemoryNetwork(), [], []
    network.serve("h:1", Dispatcher({}), on_connect=peers.append, on_disconnect=gone.append)
    closed: list[Channel] = []
    first = await network.dial("h:1", on_close=closed.append)
    await first.close()
    assert peers[0].closed
    second = await network.dial("h:1", on_close=closed.append)
    peers[1].close()
    await asyncio.sleep(0.01)
    assert second.closed
    assert gone == peers
    assert closed == [first, second]


async def test_a_stopped_service_breaks_its_connections_and_takes_no_more() -> None:
    network = MemoryNetwork()
    network.serve("h:1", Dispatcher({7: lambda c, _: None}))
    channel = await network.dial("h:1")
    call = asyncio.get_running_loop().create_task(channel.call(Command(7), 5))
    await asyncio.sleep(0.01)
    network.stop("h:1")
    with pytest.raises(ConnectionLostError):
        await call
    with pytest.raises(ConnectionLostError, match="Nobody serves h:1"):
        await network.dial("h:1")
