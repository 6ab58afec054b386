"""What a client of RocketMQ 5 asks of a proxy, and the same as grpcio sends it.

    PYTHONPATH=tests/lib python -m fuzz.grpc_calls tests/golden/traffic/grpc/grpcio.jsonl.gz

records anew: each line has the bytes that one connection wrote, in base64.
"""

import asyncio
import base64
import gzip
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from sluicemq.net.grpc import Call, GrpcServer
from sluicemq.proxy import messages as m
from sluicemq.wire.hpack import HeaderField

SERVICE: Final = "/apache.rocketmq.v2.MessagingService/"
TOPIC, GROUP = m.Resource(name="T"), m.Resource(name="G")
HANDLE: Final = "0 1790000000000 60000 3 0 broker-a 0 0"
CLIENT: Final = "host@4711@0@2a"
METADATA: Final[tuple[HeaderField, ...]] = (
    ("x-mq-language", "PYTHON"), ("x-mq-protocol", "v2"), ("x-mq-client-version", "5.0.8"),
    ("x-mq-client-id", CLIENT), ("x-mq-namespace", ""), ("x-mq-date-time", "20261123T094500Z"),
    ("x-mq-request-id", "8c7f4d0e-36d1-4a53-8b0c-6f1c62a7a5d1"),
    ("authorization", "MQv2-HMAC-SHA1 Credential=a, SignedHeaders=x-mq-date-time, Signature=00"),
)  # fmt: skip


def seconds(count: int) -> Any:
    return m.Duration(seconds=count)


def message(**system: Any) -> Any:
    properties = {"message_id": "01" + "AB" * 16, "message_type": m.MessageType.NORMAL, **system}
    made = m.Message(
        topic=TOPIC, body=b"hello", user_properties={"color": "red", "n": "7"},
        system_properties=m.SystemProperties(**properties),
    )  # fmt: skip
    made.system_properties.born_timestamp.seconds = 1_790_000_000
    return made


def settings(kind: int, **part: Any) -> Any:
    return m.TelemetryCommand(
        settings=m.Settings(
            client_type=kind,
            user_agent=m.UA(language=6, version="5.0.8", platform="Linux", hostname="host"),
            request_timeout=seconds(3),
            **part,
        )
    )


def requests() -> Iterator[tuple[str, list[Any]]]:
    """Each method and its messages, more than one for those that take a stream."""
    subscription = m.SubscriptionEntry(topic=TOPIC, expression=m.FilterExpression(expression="A"))
    queue = m.MessageQueue(topic=TOPIC, id=-1, broker=m.Broker(name="broker-a"))
    common: dict[str, Any] = {
        "group": GROUP,
        "topic": TOPIC,
        "receipt_handle": HANDLE,
        "message_id": "01AB",
    }
    yield "QueryRoute", [m.QueryRouteRequest(topic=TOPIC)]
    yield (
        "Telemetry",
        [
            settings(m.ClientType.PRODUCER, publishing=m.Publishing(topics=[TOPIC])),
            settings(
                m.ClientType.PUSH_CONSUMER,
                subscription=m.Subscription(
                    group=GROUP, subscriptions=[subscription], long_polling_timeout=seconds(1)
                ),
            ),
            m.TelemetryCommand(
                thread_stack_trace=m.ThreadStackTrace(nonce="1", thread_stack_trace="")
            ),
            m.TelemetryCommand(verify_message_result=m.VerifyMessageResult(nonce="1")),
        ],
    )
    yield "Heartbeat", [m.HeartbeatRequest(group=GROUP, client_type=m.ClientType.SIMPLE_CONSUMER)]
    yield "SendMessage", [m.SendMessageRequest(messages=[message(tag="A", keys=["k"])])]
    fifo = message(message_type=m.MessageType.FIFO, message_group="g")
    yield "SendMessage", [m.SendMessageRequest(messages=[fifo])]
    delayed = message(message_type=m.MessageType.DELAY)
    delayed.system_properties.delivery_timestamp.seconds = 1_790_000_060
    yield "SendMessage", [m.SendMessageRequest(messages=[delayed])]
    half = message(message_type=m.MessageType.TRANSACTION)
    yield "SendMessage", [m.SendMessageRequest(messages=[half])]
    yield "SendMessage", [m.SendMessageRequest(messages=[message(), message()])]
    yield "QueryAssignment", [m.QueryAssignmentRequest(topic=TOPIC, group=GROUP)]
    for kind, expression in ((m.FilterType.TAG, "A || B"), (m.FilterType.SQL, "n > 5")):
        yield "ReceiveMessage", [
            m.ReceiveMessageRequest(
                group=GROUP, message_queue=queue, batch_size=32, attempt_id="a",
                filter_expression=m.FilterExpression(type=kind, expression=expression),
                invisible_duration=seconds(15), long_polling_timeout=seconds(1),
            )
        ]  # fmt: skip
    entry = m.AckMessageEntry(message_id="01AB", receipt_handle=HANDLE)
    yield "AckMessage", [m.AckMessageRequest(group=GROUP, topic=TOPIC, entries=[entry, entry])]
    yield (
        "ForwardMessageToDeadLetterQueue",
        [
            m.ForwardMessageToDeadLetterQueueRequest(
                **common, delivery_attempt=17, max_delivery_attempts=17
            )
        ],
    )
    yield (
        "EndTransaction",
        [m.EndTransactionRequest(topic=TOPIC, message_id="01AB", transaction_id="1", resolution=1)],
    )
    yield (
        "ChangeInvisibleDuration",
        [m.ChangeInvisibleDurationRequest(**common, invisible_duration=seconds(30))],
    )
    yield (
        "PullMessage",
        [
            m.PullMessageRequest(
                group=GROUP, message_queue=queue, batch_size=32, long_polling_timeout=seconds(1)
            )
        ],
    )
    yield "UpdateOffset", [m.UpdateOffsetRequest(group=GROUP, message_queue=queue, offset=5)]
    yield "GetOffset", [m.GetOffsetRequest(group=GROUP, message_queue=queue)]
    yield "QueryOffset", [m.QueryOffsetRequest(message_queue=queue)]
    yield "RecallMessage", [m.RecallMessageRequest(topic=TOPIC, recall_handle="djEgVCBicm9rZXI=")]
    yield "SyncLiteSubscription", [m.SyncLiteSubscriptionRequest(topic=TOPIC, group=GROUP)]
    yield "NotifyClientTermination", [m.NotifyClientTerminationRequest(group=GROUP)]


def load(path: Path) -> list[bytes]:
    """What was recorded: the bytes of each connection."""
    with gzip.open(path, "rt") as lines:
        return [base64.b64decode(json.loads(line)["bytes_b64"]) for line in lines]


def record(path: Path) -> None:
    """All requests by one channel of grpcio, and each by a channel of its own."""
    import grpc  # type: ignore[import-untyped]

    calls = [(name, [it.SerializeToString() for it in messages]) for name, messages in requests()]
    lines = []
    for part in [calls, *([call] for call in calls)]:
        with Splice() as splice, grpc.insecure_channel(f"127.0.0.1:{splice.port}") as channel:
            for name, data in part:
                call = channel.stream_stream(SERVICE + name)
                list(call(iter(data), timeout=10, metadata=METADATA))
        lines.append({"client": f"grpcio {grpc.__version__}", "calls": [it[0] for it in part],
                      "bytes_b64": base64.b64encode(splice.sent).decode()})  # fmt: skip
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in lines)


def answered(_data: bytes, call: Call) -> None:
    """An answer of no fields to whatever is asked, when all is asked."""
    call.on_half_close = lambda: call.reply(b"")


class Splice:
    """A server that answers, behind a socket that keeps what one client sends."""

    def __enter__(self) -> "Splice":
        self.sent = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        names = {name for name, _ in requests()}
        server = GrpcServer({SERVICE + name: answered for name in names})
        await server.start("127.0.0.1", [0])
        pumps, writers = set[asyncio.Task[None]](), set[asyncio.StreamWriter]()

        async def copy(source: asyncio.StreamReader, sink: Callable[[bytes], object]) -> None:
            while data := await source.read(1 << 16):
                sink(data)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers, there = await asyncio.open_connection("127.0.0.1", server.ports[0])

            def keep(data: bytes) -> None:
                self.sent += data
                there.write(data)

            pumps.add(self._loop.create_task(copy(reader, keep)))
            pumps.add(self._loop.create_task(copy(answers, writer.write)))
            writers.update((writer, there))

        async with await asyncio.start_server(accept, sock=self._listener):
            ready.set()
            await self._over.wait()
            for pump in pumps:
                pump.cancel()
            for writer in writers:
                writer.close()
        await server.close()


if __name__ == "__main__":
    record(Path(sys.argv[1]))
