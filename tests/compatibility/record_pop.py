"""Golden traffic of POP.

    PYTHONPATH=tests/lib python tests/compatibility/record_pop.py RELEASE DIRECTORY [SCENARIO …]

A real broker of the release answers raw requests; each scenario is a file in the format of
docs/spec/traffic.md, with everything that it needs: topics, groups and messages are made in it, so
that a test can ask another broker the same. `push` is what the unmodified Java consumer asks that
pops (clientRebalance=false), by way of a proxy. What the broker writes about order and modes goes
to DIRECTORY/documents.
"""

import base64
import gzip
import json
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import clusters, drivers
from peer.popping import BATCH_ACK, PEEK, POLLING, Raw, frames, now_ms
from peer.toolchain import HERE

MAIN = "org.apache.rocketmq"
VERSION = 479
"""V5_3_3, for all."""
TIMER = "rmq_sys_wheel_timer"


class Recording:
    """The lines of one scenario."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._began_s = time.monotonic()
        self._lines: list[dict[str, Any]] = []
        self._asked: dict[tuple[int, str, int], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def put(self, connection: int, peer: str, direction: str, frame: bytes) -> None:
        """One frame with its length, ">" to the server or "<" from it."""
        length = struct.unpack_from(">I", frame, 4)[0] & 0xFFFFFF
        header, body = json.loads(frame[8 : 8 + length]), frame[8 + length :]
        with self._lock:
            line: dict[str, Any] = {
                "scenario": self.name, "n": len(self._lines), "conn": connection, "peer": peer,
                "dir": direction, "t_ms": round((time.monotonic() - self._began_s) * 1000),
            }  # fmt: skip
            if header.get("flag", 0) & 1:
                other = "<" if direction == ">" else ">"
                asked = self._asked.pop((connection, other, header["opaque"]), None)
                if asked is not None:
                    line["re"], line["req_code"] = asked
            else:
                key = connection, direction, header["opaque"]
                self._asked[key] = line["n"], header["code"]
            line["header"] = header
            if body:
                line["body_b64"] = base64.b64encode(body).decode()
            line["frame_b64"] = base64.b64encode(frame).decode()
            self._lines.append(line)

    def save(self, directory: Path) -> None:
        rows = [json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in self._lines]
        data = "".join(f"{row}\n" for row in rows).encode()
        (directory / f"{self.name}.jsonl.gz").write_bytes(gzip.compress(data, mtime=0))


# ------------------------------------------------------------------------------------- scenarios


def one_queue(raw: Raw) -> None:
    """A queue in pieces, until nothing is left; a group that begins at the end."""
    raw.topic("T_one", 2)
    raw.group("G_one")
    raw.send("T_one", 0, "a", "b", "c", "d", "e", TAGS="A")
    raw.send("T_one", 1, "x", TAGS="A")
    raw.pop("T_one", "G_one", maxMsgNums=2)
    raw.pop("T_one", "G_one", maxMsgNums=2, queueId=0)
    raw.offset("T_one", "G_one")
    raw.pop("T_one", "G_one")
    raw.pop("T_one", "G_one")
    raw.pop("T_one", "G_one", queueId=1, maxMsgNums=1)
    raw.group("G_last")
    raw.pop("T_one", "G_last", initMode=1, maxMsgNums=1)
    raw.pop("T_one", "G_last", initMode=1)


def every_queue(raw: Raw) -> None:
    raw.topic("T_all", 3)
    raw.group("G_all")
    for queue in range(3):
        raw.send("T_all", queue, f"{queue}-a", f"{queue}-b", TAGS="A")
    raw.pop("T_all", "G_all", queueId=-1)
    raw.pop("T_all", "G_all", queueId=-1)


def filters(raw: Raw) -> None:
    raw.topic("T_filter", 1)
    for name in ("tags", "sql", "bad", "none", "other"):
        raw.group(f"G_{name}")
    for number in range(6):
        raw.send("T_filter", 0, f"m{number}", TAGS="AB"[number % 2], n=number)
    raw.pop("T_filter", "G_tags", exp="A")
    raw.pop("T_filter", "G_tags", exp="A")
    raw.offset("T_filter", "G_tags")
    raw.pop("T_filter", "G_sql", exp="n >= 2 AND n <> 4", expType="SQL92")
    raw.pop("T_filter", "G_sql", exp="n > 100", expType="SQL92")
    raw.offset("T_filter", "G_sql")
    raw.pop("T_filter", "G_bad", exp="n >", expType="SQL92")
    raw.pop("T_filter", "G_bad", exp="n", expType="NOSUCH")
    raw.pop("T_filter", "G_none", exp=None, expType=None, maxMsgNums=3)
    raw.pop("T_filter", "G_other", exp="C")
    raw.offset("T_filter", "G_other")


def acks(raw: Raw) -> None:
    """One by one, several at once, twice, and what the timer's queue holds of it."""
    raw.topic("T_ack", 2)
    raw.group("G_ack")
    raw.send("T_ack", 0, "a", "b", "c", "d", TAGS="A")
    found = raw.pop("T_ack", "G_ack")
    raw.ack("G_ack", found[1])
    raw.ack("G_ack", found[1])
    raw.ack_all("G_ack", [found[0], found[3]], "T_ack")
    raw.call(BATCH_ACK, None, b'{"acks":[],"brokerName":"broker-g"}')
    raw.call(BATCH_ACK, None, b"")
    raw.offset("T_ack", "G_ack")
    raw.pull(TIMER)
    handle = found[2].handle
    for change in (
        {"offset": 5}, {"offset": -1}, {"offset": 4}, {"queueId": 2}, {"queueId": -1},
        {"topic": "T_nosuch"}, {"consumerGroup": "G_nosuch"}, {"extraInfo": "1 2 3"},
        {"extraInfo": None}, {"extraInfo": handle.replace("broker-g", "broker-x")},
    ):  # fmt: skip
        raw.ack("G_ack", found[2], **change)  # type: ignore[arg-type]
    strange = {"b": "AQ==", "c": "G_ack", "it": 1, "pt": 1, "q": 9, "r": "0", "rq": 0, "so": 0}
    for row in ({**strange, "t": "T_nosuch"}, {**strange, "t": "T_ack"}):
        body = json.dumps({"acks": [row], "brokerName": "broker-g"}).encode()
        raw.call(BATCH_ACK, None, body)


def hiding(raw: Raw) -> None:
    raw.topic("T_hide", 1)
    raw.group("G_hide")
    raw.send("T_hide", 0, "a", "b", "c", TAGS="A")
    found = raw.pop("T_hide", "G_hide", invisibleTime=30_000)
    later = raw.hide("G_hide", found[0], 90_000)
    raw.ack("G_hide", found[0])
    raw.ack("G_hide", later)
    raw.hide("G_hide", found[1], 45_000)
    raw.pull(TIMER)
    for change in (
        {"offset": 3}, {"offset": -1}, {"queueId": 1}, {"topic": "T_nosuch"},
        {"extraInfo": "x"}, {"invisibleTime": None},
    ):  # fmt: skip
        raw.hide("G_hide", found[2], 10_000, **change)  # type: ignore[arg-type]


def retried(raw: Raw) -> None:
    """What nobody acknowledges comes from the retry topic, and again from there."""
    raw.topic("T_retry", 1)
    raw.group("G_retry")
    raw.send("T_retry", 0, "a", "b", TAGS="A", KEYS="k1", color="red")
    found = raw.pop("T_retry", "G_retry", invisibleTime=2000)
    raw.ack("G_retry", found[0])
    again = raw.pop("T_retry", "G_retry", invisibleTime=2000, pollTime=20_000)
    assert [message[0] for message in again] == ["%RETRY%G_retry_T_retry"], again
    raw.offset("%RETRY%G_retry_T_retry", "G_retry")
    raw.hide("G_retry", again[0], 3000)
    third = raw.pop("T_retry", "G_retry", queueId=-1, invisibleTime=60_000, pollTime=20_000)
    raw.ack("G_retry", third[0])
    raw.ack("G_retry", again[0])
    raw.pop("T_retry", "G_retry", pollTime=1000)


def retried_newer(raw: Raw) -> None:
    """With the names of retry topics that enableRetryTopicV2 makes."""
    raw.change(enableRetryTopicV2="true")
    raw.topic("T_newer", 1)
    raw.group("G_newer")
    raw.send("T_newer", 0, "a", TAGS="A")
    raw.pop("T_newer", "G_newer", invisibleTime=2000)
    again = raw.pop("T_newer", "G_newer", pollTime=20_000)
    assert [message[0] for message in again] == ["%RETRY%G_newer+T_newer"], again
    raw.ack_all("G_newer", again, "T_newer")
    raw.change(enableRetryTopicV2="false")


def waiting(raw: Raw) -> None:
    """Long polls: woken by a message of their queue, of any queue, of their tag; or too late."""
    raw.topic("T_wait", 2)
    for name in ("one", "any", "tag", "late"):
        raw.group(f"G_wait_{name}")
    one = raw.popping("T_wait", "G_wait_one", pollTime=10_000)
    anywhere = raw.popping("T_wait", "G_wait_any", queueId=-1, pollTime=10_000)
    tagged = raw.popping("T_wait", "G_wait_tag", exp="B", pollTime=10_000)
    late = raw.popping("T_wait", "G_wait_late", queueId=1, pollTime=1500)
    time.sleep(0.5)
    raw.call(POLLING, {"consumerGroup": "G_wait_any", "topic": "T_wait", "queueId": -1})
    raw.call(POLLING, {"consumerGroup": "G_wait_any", "topic": "T_wait", "queueId": 0})
    raw.send("T_wait", 0, "first", TAGS="A")
    raw.answer(one)
    raw.answer(anywhere)
    time.sleep(0.3)
    raw.send("T_wait", 0, "second", TAGS="B")
    raw.answer(tagged)
    raw.answer(late)
    raw.pop("T_wait", "G_wait_late", queueId=1, pollTime=500, bornTime=now_ms() - 2000)
    raw.call(POLLING, {"consumerGroup": "G_wait_any", "topic": "T_wait", "queueId": -1})


def crowd(raw: Raw) -> None:
    raw.change(popPollingSize=1)
    raw.topic("T_crowd", 1)
    raw.group("G_crowd")
    asked = []
    for _ in range(4):
        asked.append(raw.popping("T_crowd", "G_crowd", pollTime=2500))
        time.sleep(0.1)
    for number in asked:
        raw.answer(number)
    raw.change(popPollingSize=1024)


def notified(raw: Raw) -> None:
    raw.topic("T_note", 2)
    raw.group("G_note")
    raw.answer(raw.notify("T_note", "G_note"))
    number = raw.notify("T_note", "G_note", pollTime=10_000)
    anywhere = raw.notify("T_note", "G_note", queueId=-1, pollTime=10_000)
    late = raw.notify("T_note", "G_note", queueId=1, pollTime=1000)
    raw.answer(late)
    raw.send("T_note", 0, "a", TAGS="A")
    raw.answer(number)
    raw.answer(anywhere)
    raw.answer(raw.notify("T_note", "G_note"))
    raw.answer(raw.notify("T_note", "G_note", queueId=-1))
    raw.pop("T_note", "G_note")
    raw.answer(raw.notify("T_note", "G_note"))
    raw.answer(raw.notify("T_nosuch", "G_note"))
    raw.answer(raw.notify("T_note", "G_note", queueId=2))


def peeked(raw: Raw) -> None:
    raw.topic("T_peek", 2)
    raw.group("G_peek")
    raw.send("T_peek", 0, "a", "b", "c", TAGS="A")
    base: dict[str, object] = {
        "consumerGroup": "G_peek", "topic": "T_peek", "queueId": 0, "maxMsgNums": 2
    }  # fmt: skip
    raw.call(PEEK, base)
    raw.call(PEEK, base)
    raw.pop("T_peek", "G_peek", maxMsgNums=2)
    raw.call(PEEK, base)
    raw.call(PEEK, base | {"queueId": 1})
    raw.call(PEEK, base | {"queueId": -1, "maxMsgNums": 32})
    for change in ({"topic": "T_nosuch"}, {"queueId": 2}, {"maxMsgNums": 0}):
        raw.call(PEEK, base | change)


def ordered(raw: Raw) -> None:
    """One queue in order: blocked, the same attempt again, acknowledged from the back, hidden
    longer, again after its time with counts."""
    raw.topic("T_order", 2)
    raw.group("G_order")
    raw.send("T_order", 0, "a", "b", "c", "d", TAGS="A")
    raw.send("T_order", 1, "x", TAGS="A")
    first: dict[str, object] = {"order": "true", "attemptId": "one", "invisibleTime": 4000}
    other = first | {"attemptId": "two"}
    found = raw.pop("T_order", "G_order", maxMsgNums=3, **first)
    raw.pop("T_order", "G_order", **other)
    raw.answer(raw.notify("T_order", "G_order", order="true", attemptId="two"))
    raw.pop("T_order", "G_order", **(first | {"attemptId": None}))
    raw.pop("T_order", "G_order", queueId=1, **other)
    same = raw.pop("T_order", "G_order", maxMsgNums=3, **first)
    raw.ack("G_order", found[0])
    raw.offset("T_order", "G_order")
    raw.ack("G_order", same[1])
    raw.offset("T_order", "G_order")
    raw.ack("G_order", same[0], offset=3)
    raw.hide("G_order", same[0], 6000)
    waits = raw.popping("T_order", "G_order", pollTime=15_000, **other)
    again = raw.handles(raw.answer(waits), "T_order", "G_order")
    assert [message[2] for message in again] == [0, 1, 2, 3], again
    raw.ack("G_order", same[0])
    raw.offset("T_order", "G_order")
    waits = raw.popping("T_order", "G_order", pollTime=15_000, **(first | {"attemptId": "three"}))
    raw.ack_all("G_order", again[:2], "T_order")
    raw.offset("T_order", "G_order")
    last = raw.handles(raw.answer(waits), "T_order", "G_order")
    assert [message[2] for message in last] == [2, 3], last
    raw.hide("G_order", last[1], 60_000)
    raw.ack("G_order", last[0])
    raw.ack("G_order", last[0])
    raw.offset("T_order", "G_order")
    raw.pop("T_order", "G_order", queueId=-1, **first)
    raw.ack("G_order", last[1])
    raw.pop("T_order", "G_order", **first)


def refused(raw: Raw) -> None:
    raw.topic("T_no", 1)
    raw.topic("T_write", 1, perm=2)
    raw.group("G_no")
    raw.group("G_off", consumeEnable=False)
    raw.send("T_no", 0, "a", TAGS="A")
    raw.pop("T_no", "G_no", maxMsgNums=33)
    raw.pop("T_no", "G_no", maxMsgNums=0)
    raw.pop("T_no", "G_no", queueId=1)
    raw.pop("T_no", "G_no", queueId=-2, maxMsgNums=1)
    raw.pop("T_nosuch", "G_no")
    raw.pop("T_write", "G_no")
    raw.pop("T_no", "G_off")
    raw.pop("T_no", "G_no", initMode=None)
    raw.pop("T_no", "G_no", bornTime=0)
    raw.change(autoCreateSubscriptionGroup="false")
    raw.pop("T_no", "G_unknown")
    raw.answer(raw.notify("T_no", "G_unknown"))
    raw.change(autoCreateSubscriptionGroup="true")
    raw.pop("T_no", "G_unknown")
    raw.call(POLLING, {"consumerGroup": "G_no", "topic": "T_nosuch", "queueId": 0})
    raw.change(brokerPermission=2)
    raw.pop("T_no", "G_no")
    raw.change(brokerPermission=6)


def moved(raw: Raw) -> None:
    """A group is sent elsewhere while messages are in flight."""
    raw.topic("T_move", 1)
    raw.group("G_move")
    raw.send("T_move", 0, "a", "b", "c", "d", TAGS="A")
    found = raw.pop("T_move", "G_move", maxMsgNums=3)
    reset: dict[str, object] = {
        "topic": "T_move", "group": "G_move", "timestamp": -1, "isForce": "true", "queueId": 0,
        "offset": 1,
    }  # fmt: skip
    raw.call(222, reset)
    raw.offset("T_move", "G_move")
    raw.ack("G_move", found[0])
    raw.pop("T_move", "G_move", maxMsgNums=2)
    raw.offset("T_move", "G_move")
    first: dict[str, object] = {"order": "true", "attemptId": "one"}
    raw.group("G_move_order")
    found = raw.pop("T_move", "G_move_order", maxMsgNums=3, **first)
    raw.call(222, reset | {"group": "G_move_order"})
    raw.ack("G_move_order", found[0])
    raw.pop("T_move", "G_move_order", maxMsgNums=2, **(first | {"attemptId": "two"}))
    raw.offset("T_move", "G_move_order")


def shares(raw: Raw) -> None:
    """Who reads what of a topic, with four members on connections of their own."""
    raw.topic("T_share", 4)
    raw.group("G_share")
    asked = {
        "topic": "T_share", "consumerGroup": "G_share", "clientId": "a", "strategyName": "AVG",
        "messageModel": "CLUSTERING",
    }  # fmt: skip

    def ask(**changes: object) -> None:
        raw.call(400, None, json.dumps(asked | changes).encode())

    def mode(**changes: object) -> None:
        body = {"topic": "T_share", "consumerGroup": "G_share", "mode": "POP"} | changes
        raw.call(401, None, json.dumps(body).encode())

    ask()
    others = [raw.beside(number) for number in (2, 3, 4, 5)]
    for other, name in zip(others, "abcd", strict=True):
        row = {
            "groupName": "G_share", "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [], "unitMode": False,
        }  # fmt: skip
        body = {"clientID": name, "consumerDataSet": [row], "producerDataSet": []}
        other.call(34, {}, json.dumps(body).encode())
    ask()
    ask(clientId="c", strategyName="AVG_BY_CIRCLE")
    ask(clientId="stranger")
    ask(strategyName="CONSISTENT_HASH")
    ask(messageModel="BROADCASTING", strategyName="")
    ask(topic="T_nosuch")
    ask(topic="%RETRY%G_share")
    ask(consumerGroup="G_nobody")
    for number in (0, 1, 2, 3):
        mode(popShareQueueNum=number)
        for name in ("a", "d", "stranger"):
            ask(clientId=name)
    raw.topic("T_few", 2)
    mode(topic="T_few", popShareQueueNum=1)
    for name in ("a", "b", "c", "stranger"):
        ask(topic="T_few", clientId=name)
    mode(topic="%RETRY%G_share")
    mode(topic="T_nosuch")
    mode(mode="PULL", popShareQueueNum=0)
    ask()
    raw.call(402)
    for other in others:
        other.close()


SCENARIOS: dict[str, Callable[[Raw], None]] = {
    "one-queue": one_queue, "every-queue": every_queue, "filters": filters, "acks": acks,
    "hiding": hiding, "retried": retried, "retried-v2": retried_newer, "waiting": waiting,
    "crowd": crowd, "notified": notified, "peeked": peeked, "ordered": ordered,
    "refused": refused, "moved": moved, "shares": shares,
}  # fmt: skip


# ----------------------------------------------------------------------------- the Java consumer


def proxied(listen: int, target: tuple[str, int], peer: str, recording: Recording) -> socket.socket:
    """Listens at the port and passes on, both ways, what it writes down. Returns the listener."""
    listener = socket.create_server(("127.0.0.1", listen))
    numbers = iter(range(1 if "broker" in peer else 100, 1000))

    def pump(number: int, direction: str, here: socket.socket, there: socket.socket) -> None:
        try:
            for frame in frames(here):
                recording.put(number, peer, direction, frame)
                there.sendall(frame)
            there.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve() -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            server, number = socket.create_connection(target), next(numbers)
            for arguments in ((number, ">", client, server), (number, "<", server, client)):
                threading.Thread(target=pump, args=arguments, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener


def push(directory: Path, release: str, ports: tuple[int, int], recording: Recording) -> None:
    """The Java consumer pops, and fails every message once."""
    name_port, broker_port = ports
    label = f"java-client-{release}"
    listeners = [
        proxied(name_port, ("127.0.0.2", name_port), f"{label}→namesrv", recording),
        proxied(broker_port, ("127.0.0.2", broker_port), f"{label}→broker", recording),
    ]
    source = HERE / "java" / "Delivery.java"
    driver = drivers.java_driver(f"client-{release}", directory, source=source)
    try:
        driver.call(
            "pop", ns=f"127.0.0.1:{name_port}", topic="T_push", group="G_push", count=4, fail=1,
            expect=8, step=2, hide=20_000, timeout_s=60,
        )  # fmt: skip
    finally:
        driver.close()
        for listener in listeners:
            listener.close()


def main(release: str, target: Path, names: list[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    short = "".join(release.split(".")[:2])
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        name_port, broker_port, _ = clusters.free_ports()
        name_file = clusters.write_properties(
            directory / "namesrv.conf", {"listenPort": str(name_port), "bindAddress": "127.0.0.2"}
        )
        settings = clusters.java_broker_settings(directory, name_port, broker_port) | {
            "brokerName": "broker-g",
            "bindAddress": "127.0.0.2",
            "namesrvAddr": f"127.0.0.2:{name_port}",
            "metricsPromExporterPort": "0",
        }
        broker_file = clusters.write_properties(directory / "broker.conf", settings)
        with (
            clusters.java_server(
                directory, "namesrv", f"{MAIN}.namesrv.NamesrvStartup", name_file,
                clusters.QUICK_JVM, release=release,
            ),
            clusters.java_server(
                directory, "broker", f"{MAIN}.broker.BrokerStartup", broker_file,
                clusters.QUICK_JVM, release=release, stop=signal.SIGTERM,
            ) as broker,
        ):  # fmt: skip
            clusters.await_line(broker, directory / "broker.log", "boot success")
            time.sleep(5)
            address = ("127.0.0.2", broker_port)
            for name in names or [*SCENARIOS, "push"]:
                print(name, flush=True)
                recording = Recording(f"pop{short}-{name}")
                if name == "push":
                    made = Raw(address, VERSION, 900, recording.put)
                    made.topic("T_push", 2)
                    made.group("G_push")
                    body = {"topic": "T_push", "consumerGroup": "G_push", "mode": "POP"}
                    made.call(401, None, json.dumps(body | {"popShareQueueNum": 0}).encode())
                    made.close()
                    push(directory, release, (name_port, broker_port), recording)
                else:
                    raw = Raw(address, VERSION, 1, recording.put, "broker-g")
                    SCENARIOS[name](raw)
                    raw.close()
                time.sleep(0.2)
                recording.save(target)
            time.sleep(6)  # the broker writes what it knows every five seconds
            documents = target / "documents"
            documents.mkdir(exist_ok=True)
            for name in ("consumerOrderInfo.json", "messageRequestMode.json"):
                source = directory / "store" / "config" / name
                if source.exists():
                    shutil.copy(source, documents / f"{short}-{name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
