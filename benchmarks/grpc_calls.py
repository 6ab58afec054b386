"""What a gRPC call costs a server before anybody does anything for it: ours beside grpc.aio.

    python -m benchmarks.grpc_calls            needs grpcio, of the extra dev
    python -m benchmarks.grpc_calls --calls 500

A process serves three methods: nothing in and out, a send (300 bytes in, 90 out; parsed and read by
ours alone), and a receive that is answered with three messages. The real client, grpcio, calls
them with the metadata of RocketMQ's clients, one at a time and 64 at once on one connection. The
figure is the server's CPU time a call, the best of three rounds (docs/design/0021-grpc.md).
"""

import argparse
import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from uvloop import new_event_loop

from benchmarks.measure import exact_cpu_s

SERVICE = "/apache.rocketmq.v2.MessagingService/"
ROUNDS = 3


def messages() -> tuple[bytes, list[bytes]]:
    """A send, and what a receive is answered with."""
    from sluicemq.proxy import messages as m

    send = m.SendMessageRequest()
    message = send.messages.add(body=b"x" * 128, user_properties={"origin": "JFK"})
    message.topic.name = "TopicTest"
    system = message.system_properties
    system.tag, system.message_id, system.message_type = (
        "T10",
        "01" + "A" * 32,
        m.MessageType.NORMAL,
    )
    system.born_timestamp.seconds = 1_780_000_000
    status, timestamp = m.ReceiveMessageResponse(), m.ReceiveMessageResponse()
    status.status.code = m.Code.OK
    timestamp.delivery_timestamp.seconds = 1_780_000_000
    received = m.ReceiveMessageResponse(message=message)
    return send.SerializeToString(), [
        it.SerializeToString() for it in (status, received, timestamp)
    ]


def sent(data: bytes, _call: object) -> bytes:
    """Reads what a proxy has to read of a send."""
    from sluicemq.proxy import messages as m

    answer = m.SendMessageResponse()
    for message in m.SendMessageRequest.FromString(data).messages:
        system = message.system_properties
        _read = message.topic.name, message.body, dict(message.user_properties), system.tag
        _also = system.born_timestamp.seconds, system.message_group, system.message_type
        answer.entries.add(message_id=system.message_id, offset=5).status.code = m.Code.OK
    answer.status.code = m.Code.OK
    return answer.SerializeToString()


async def serve_ours() -> None:
    from sluicemq.net.grpc import GrpcServer
    from sluicemq.net.limits import FairScheduler

    _, received = messages()
    server = GrpcServer(
        {
            SERVICE + "Empty": lambda _data, _call: b"",
            SERVICE + "Send": sent,
            SERVICE + "Receive": lambda _data, call: call.reply_all(received),
        },
        FairScheduler(time.monotonic, asyncio.get_running_loop().call_soon),
    )
    await server.start("127.0.0.1", [0])
    print(server.ports[0], flush=True)
    await asyncio.Event().wait()


async def serve_grpc_aio() -> None:
    import grpc.aio

    _, received = messages()

    async def empty(_request: bytes, context: Any) -> bytes:
        context.invocation_metadata()
        return b""

    async def several(_request: bytes, context: Any) -> Any:
        context.invocation_metadata()
        for message in received:
            yield message

    methods = {
        "Empty": grpc.unary_unary_rpc_method_handler(empty),
        "Send": grpc.unary_unary_rpc_method_handler(empty),
        "Receive": grpc.unary_stream_rpc_method_handler(several),
    }
    server = grpc.aio.server()
    name = SERVICE.strip("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


SERVERS = {"ours": serve_ours, "grpc.aio": serve_grpc_aio}


def metadata() -> list[tuple[str, str]]:
    return [
        ("x-mq-language", "JAVA"), ("x-mq-protocol", "v2"), ("x-mq-client-version", "5.0.8"),
        ("x-mq-client-id", "host@1234@0@abcdef"), ("x-mq-date-time", "20261123T094500Z"),
        ("x-mq-request-id", str(uuid.uuid4())),
    ]  # fmt: skip


def measure(channel: Any, pid: int, name: str, window: int, calls: int) -> float:
    """Server CPU a call (µs)."""
    send, _ = messages()
    if name == "Receive":
        several = channel.unary_stream(SERVICE + name)
        call: Callable[[], Any] = lambda: several(b"", timeout=30, metadata=metadata())  # noqa: E731
        finish: Callable[[Any], Any] = list
    else:
        unary = channel.unary_unary(SERVICE + name)
        data = send if name == "Send" else b""
        call = lambda: unary.future(data, timeout=30, metadata=metadata())  # noqa: E731
        finish = lambda future: future.result()  # noqa: E731

    def rounds(count: int) -> None:
        for _ in range(count // window):
            for one in [call() for _ in range(window)]:
                finish(one)

    rounds(calls // 4)
    best = float("inf")
    for _ in range(ROUNDS):
        begin_s = exact_cpu_s(pid)
        rounds(calls)
        best = min(best, (exact_cpu_s(pid) - begin_s) / (calls // window * window))
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(SERVERS[given.serve]())
    import grpc

    print(f"{'server':10}{'call':10}{'at once':>8}{'CPU a call':>14}")
    for kind in SERVERS:
        command = [sys.executable, "-m", "benchmarks.grpc_calls", "--serve", kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                for name in ("Empty", "Send", "Receive"):
                    for window in (1, 64):
                        cost_us = measure(channel, server.pid, name, window, given.calls)
                        print(f"{kind:10}{name:10}{window:8}{cost_us:11.1f} us", flush=True)
            server.terminate()


if __name__ == "__main__":
    main()
