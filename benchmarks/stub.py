"""A server that only answers: what a client reaches when the broker costs next to nothing.

    python -m benchmarks.stub        # prints its address

Name server and broker at once. A route has one broker, this one; every send is stored as offset 0;
whatever else is asked has succeeded.
"""

import asyncio
import struct
import sys
from typing import cast

import uvloop

LENGTHS = struct.Struct(">II")
ROUTE, SENDS = b'"code":105,', (b'"code":310,', b'"code":10,', b'"code":320,')
SENT = b'{"msgId":"7F00000100002A9F0000000000000000","queueId":"0","queueOffset":"0"}'
ROUTE_BODY = (
    b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:%d"},"brokerName":"broker-a","cluster":'
    b'"DefaultCluster"}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
    b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)


class Stub(asyncio.Protocol):
    """Answers all frames of what was received with one write."""

    def __init__(self, port: int) -> None:
        self._rest = b""
        self._route = ROUTE_BODY % port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none

    def data_received(self, data: bytes) -> None:
        data, at, answers = self._rest + data, 0, []
        while len(data) - at >= 8:
            size, header_size = LENGTHS.unpack_from(data, at)
            if len(data) - at < 4 + size:
                break
            answers.append(self._answer(data[at + 8 : at + 8 + (header_size & 0xFFFFFF)]))
            at += 4 + size
        self._rest = data[at:]
        self._transport.write(b"".join(answers))

    def _answer(self, header: bytes) -> bytes:
        opaque = header[header.index(b'"opaque":') + 9 :].split(b",", 1)[0].rstrip(b"}")
        body = self._route if ROUTE in header else b""
        fields = SENT if any(code in header for code in SENDS) else b"{}"
        said = (
            b'{"code":0,"extFields":%b,"flag":1,"language":"JAVA","opaque":%b,'
            b'"serializeTypeCurrentRPC":"JSON","version":479}' % (fields, opaque)
        )
        return LENGTHS.pack(4 + len(said) + len(body), len(said)) + said + body


async def serve() -> None:
    loop = asyncio.get_running_loop()
    port = 0
    server = await loop.create_server(lambda: Stub(port), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"127.0.0.1:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(serve()))
