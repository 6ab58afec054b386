"""A raw remoting client that pops: what a scenario or a test wants of a broker, request by request.

A message is (real topic, queue id, offset, handle): of one that came again the topic is that of the
retries. Every frame may be watched, see record_pop.py.
"""

import base64
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, Self

from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command, decode, encode

POP, ACK, PEEK, CHANGE, NOTIFY, POLLING, BATCH_ACK = (
    200050, 200051, 200052, 200053, 200054, 200055, 200151,
)  # fmt: skip
OnFrame = Callable[[int, str, str, bytes], None]
"""(number of the connection, who talks to whom, ">" or "<", the frame with its length)."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def frames(connection: socket.socket) -> Iterable[bytes]:
    """Whole frames until the connection ends."""
    received = bytearray()
    while data := connection.recv(65536):
        received += data
        while len(received) >= 4:
            size = 4 + struct.unpack_from(">I", received)[0]
            if len(received) < size:
                break
            yield bytes(received[:size])
            del received[:size]


class Popped(NamedTuple):
    """A message that is hidden for who has its handle."""

    topic: str
    queue_id: int
    offset: int
    handle: str


class Raw:
    """A connection to a broker that asks what it is told."""

    def __init__(
        self,
        address: tuple[str, int],
        version: int = 479,
        number: int = 1,
        on_frame: OnFrame = lambda _number, _peer, _direction, _frame: None,
        broker: str = "broker-a",
    ) -> None:
        self.number, self.version = number, version
        self.broker = broker
        self._address, self._on_frame = address, on_frame
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opaque = 0
        self._answers: dict[int, Command] = {}
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            self._take_in()

    def _take_in(self) -> None:
        for frame in frames(self._socket):
            self._on_frame(self.number, "raw→broker", "<", frame)
            command = decode(frame[4:])
            with self._news:
                if command.is_response:
                    self._answers[command.opaque] = command
                self._news.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):  # the broker was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def beside(self, number: int) -> "Raw":
        """Another connection."""
        return Raw(self._address, self.version, number, self._on_frame, self.broker)

    def ask(self, code: int, fields: dict[str, object] | None = None, body: bytes = b"") -> int:
        """A request whose answer comes later; returns its number."""
        self._opaque += 1
        texts = None if fields is None else {k: str(v) for k, v in fields.items() if v is not None}
        command = Command(code, texts, body, self._opaque, language="JAVA", version=self.version)
        frame = encode(command)
        self._on_frame(self.number, "raw→broker", ">", frame)
        self._socket.sendall(frame)
        return self._opaque

    def answer(self, number: int, wait_s: float = 30.0) -> Command:
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, wait_s), "no answer"
            return self._answers.pop(number)

    def call(
        self, code: int, fields: dict[str, object] | None = None, body: bytes = b""
    ) -> Command:
        return self.answer(self.ask(code, fields, body))

    # ---- what scenarios are made of

    def topic(self, name: str, queues: int = 1, perm: int = 6, attributes: str = "") -> None:
        fields: dict[str, object] = {
            "topic": name, "defaultTopic": "TBW102", "readQueueNums": queues,
            "writeQueueNums": queues, "perm": perm, "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0, "order": "false", "attributes": attributes,
        }  # fmt: skip
        assert self.call(17, fields).code == 0

    def group(self, name: str, **changes: object) -> None:
        config = {"groupName": name, "consumeEnable": True, **changes}
        assert self.call(200, None, json.dumps(config).encode()).code == 0

    def change(self, **settings: object) -> None:
        body = "".join(f"{name}={value}\n" for name, value in settings.items())
        assert self.call(25, None, body.encode()).code == 0

    def send(self, topic: str, queue: int, *bodies: str, **properties: object) -> None:
        for body in bodies:
            found = {"UNIQ_KEY": f"ID{topic}{queue}{body}", "WAIT": "true", **properties}
            text = "".join(f"{name}\x01{value}\x02" for name, value in found.items())
            fields: dict[str, object] = {
                "a": "P", "b": topic, "c": "TBW102", "d": 4, "e": queue, "f": 0,
                "g": now_ms(), "h": 0, "i": text, "j": 0, "k": "false", "m": "false",
            }  # fmt: skip
            assert self.call(310, fields, body.encode()).code == 0

    def popping(self, topic: str, group: str, **changes: object) -> int:
        fields: dict[str, object] = {
            "consumerGroup": group, "topic": topic, "queueId": 0, "maxMsgNums": 32,
            "invisibleTime": 60_000, "pollTime": 0, "bornTime": now_ms(), "initMode": 0,
            "exp": "*", "expType": "TAG", "order": "false",
        }  # fmt: skip
        return self.ask(POP, fields | changes)

    def pop(self, topic: str, group: str, **changes: object) -> list[Popped]:
        """Real topic, queue id, offset and handle of each message."""
        answer = self.answer(self.popping(topic, group, **changes))
        return self.handles(answer, topic, group)

    def ack(self, group: str, message: Popped, **changes: object) -> Command:
        topic, queue, offset, handle = message
        fields: dict[str, object] = {
            "consumerGroup": group, "topic": topic, "queueId": queue, "offset": offset,
            "extraInfo": handle,
        }  # fmt: skip
        return self.call(ACK, fields | changes)

    def hide(self, group: str, message: Popped, hidden_ms: int, **changes: object) -> Popped:
        """Changes the invisible time; returns the message with its new handle."""
        topic, queue, offset, handle = message
        fields: dict[str, object] = {
            "consumerGroup": group, "topic": topic, "queueId": queue, "offset": offset,
            "extraInfo": handle, "invisibleTime": hidden_ms,
        }  # fmt: skip
        answer = self.call(CHANGE, fields | changes)
        given, words = answer.fields or {}, handle.split(" ")
        if answer.code == 0 and "popTime" in given:
            is_order = words[3] == "999"
            words[0] = words[0] if is_order else str(offset)
            words[1:4] = given["popTime"], given["invisibleTime"], given["reviveQid"]
        return Popped(topic, queue, offset, " ".join(words))

    def ack_all(self, group: str, messages: list[Popped], topic: str) -> Command:
        """All of one pop, as bits from its start on."""
        words = messages[0][3].split(" ")
        start, bits = int(words[0]), 0
        for _, _, offset, _ in messages:
            bits |= 1 << offset - start
        data = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        row = {
            "b": base64.b64encode(data).decode(), "c": group, "it": int(words[2]),
            "pt": int(words[1]), "q": messages[0][1], "r": words[4], "rq": int(words[3]),
            "so": start, "t": topic,
        }  # fmt: skip
        body = json.dumps({"acks": [row], "brokerName": words[5]}, separators=(",", ":"))
        return self.call(BATCH_ACK, None, body.encode())

    def notify(self, topic: str, group: str, **changes: object) -> int:
        fields: dict[str, object] = {
            "consumerGroup": group, "topic": topic, "queueId": 0, "pollTime": 0,
            "bornTime": now_ms(), "order": "false",
        }  # fmt: skip
        return self.ask(NOTIFY, fields | changes)

    def offset(self, topic: str, group: str, queue: int = 0) -> None:
        self.call(14, {"consumerGroup": group, "topic": topic, "queueId": queue})

    def pull(self, topic: str, queue: int = 0, offset: int = 0) -> None:
        """What lies in a queue of the broker's own."""
        fields: dict[str, object] = {
            "consumerGroup": "G_look", "topic": topic, "queueId": queue, "queueOffset": offset,
            "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0,
            "subscription": "*", "subVersion": 0, "expressionType": "TAG",
        }  # fmt: skip
        self.call(11, fields)

    def handles(self, answer: Command, topic: str, group: str) -> list[Popped]:
        """From the texts of an answer."""
        fields = answer.fields or {}
        starts = {}
        for part in filter(None, fields.get("startOffsetInfo", "").split(";")):
            kind, queue, start = part.split(" ")
            starts[kind, queue] = start
        found = []
        for part in filter(None, fields.get("msgOffsetInfo", "").split(";")):
            kind, queue, offsets = part.split(" ")
            joint = {"1": "_", "2": "+"}.get(kind)
            real = f"%RETRY%{group}{joint}{topic}" if joint else topic
            for offset in offsets.split(","):
                words = [
                    starts[kind, queue], fields["popTime"], fields["invisibleTime"],
                    fields["reviveQid"], kind, self.broker, queue, offset,
                ]  # fmt: skip
                found.append(Popped(real, int(queue), int(offset), " ".join(words)))
        assert len(found) == len(bodies(answer))
        return found


def bodies(answer: Command) -> list[str]:
    """Of the messages that an answer holds."""
    return [bytes(record.body).decode() for record in decode_records(answer.body)]
