"""What a bystander feels beside clients that ask for expensive things, or attack.

    python -m benchmarks.abuse [--seconds 5] [--only WORD] [--abusers 4] [--json FILE]

`sluice up` in a process of its own, with name server, broker, proxy and metrics; for each abuse
some connections do it again and again, while one client sends a message, waits for the answer, and
sends the next. The table shows that client's latencies and, told by the process itself, the longest
turn of its loop in CPU milliseconds, which does not depend on what else the machine does. The last
columns are the process's anonymous memory: how much it had grown at the end of the abuse, and five
seconds after its connections were closed.

On a quiet machine the p99 of every row is below 20 ms; with `--check` a row above it, or one that
leaves more than 48 MiB behind, is exit code 1.

The abuser's texts are made before the clock starts: the generator shares the machine.
"""

import argparse
import contextlib
import itertools
import mmap
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from benchmarks import measure
from benchmarks.attacks import attack, attacks
from sluicemq.errors import SluiceError
from sluicemq.net.blocking import BlockingChannel
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.frames import Command

MESSAGES: Final = 3_000
CONDITIONS: Final = 700
GROUPS: Final = 2_000
TURN: Final = struct.Struct("=dQ")
"""In the file that the broker's process shares: longest turn (CPU s), turns above 5 ms."""
LONG_TURN_S: Final = 0.005
AFTER_S: Final = 5.0
SETTLE_S: Final = 60.0
P99_MAX_MS: Final = 20.0
LEFT_MAX_MIB: Final = 48.0
MIB: Final = 1 << 20
CONFIGURATION: Final = """brokerName=broker-a
enablePropertyFilter=true
metricsPromExporterPort=0
mappedFileSizeCommitLog=67108864
autoCreateSubscriptionGroup=true
"""

Request = tuple[int, dict[str, object], bytes]

SEND: Final[dict[str, object]] = {
    "a": "P", "b": "BYSTANDER", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0,
    "i": "UNIQ_KEY\x01AB12\x02", "j": 0, "k": "false", "m": "false",
}  # fmt: skip
PULL: Final[dict[str, object]] = {
    "consumerGroup": "ABUSER", "queueId": 0, "queueOffset": 0, "maxMsgNums": 32, "commitOffset": 0,
    "suspendTimeoutMillis": 2000, "subVersion": 0, "expressionType": "SQL92",
}  # fmt: skip


ATTACKS: Final = attacks(
    {name: str(value) for name, value in SEND.items()} | {"i": "", "m": "true"}
)


# ------------------------------------------------------------------------------- the broker


def serve(directory: str) -> None:
    """`sluice up`, with each turn of its loop timed."""
    from asyncio import base_events

    with Path(directory, "turns").open("r+b") as file:
        shared = mmap.mmap(file.fileno(), TURN.size)
    run_once = base_events.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed(loop: Any) -> None:
        begin_s = time.thread_time()
        run_once(loop)
        passed_s = time.thread_time() - begin_s
        longest_s, long_turns = TURN.unpack_from(shared)
        if passed_s > longest_s or passed_s > LONG_TURN_S:
            is_long = passed_s > LONG_TURN_S
            TURN.pack_into(shared, 0, max(longest_s, passed_s), long_turns + is_long)

    base_events.BaseEventLoop._run_once = timed  # type: ignore[attr-defined]
    sys.modules["uvloop"] = None  # type: ignore[assignment] # its turns cannot be timed
    from sluicemq.cli import main as cli

    sys.argv = ["sluice", "up", "--nameserver-port", "0", "--broker-port", "0", "--proxy-port", "0",
                "--store", f"{directory}/store", "-c", f"{directory}/broker.conf"]  # fmt: skip
    cli()


class Server:
    """The process."""

    def __init__(self, directory: Path) -> None:
        (directory / "broker.conf").write_text(CONFIGURATION)
        (directory / "turns").write_bytes(bytes(TURN.size))
        with (directory / "turns").open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), TURN.size)
        self.log = (directory / "log.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.abuse", "--serve", str(directory)],
            stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.addresses = dict(part.split("=", 1) for part in line.split()[1:] if "=" in part)
        self.address = self.addresses["broker"]
        found = re.search(r"metrics at http://([0-9.:]+)/", (directory / "log.txt").read_text())
        assert found is not None, "the log says where the metrics are"
        self.addresses["metrics"] = found[1]

    def settle(self) -> None:
        """Wait until what the first requests have begun is done: its memory stays the same."""
        before, end_s = 0, time.monotonic() + SETTLE_S
        while abs((now := self.memory_bytes()) - before) > MIB and time.monotonic() < end_s:
            before = now
            time.sleep(AFTER_S)

    def memory_bytes(self) -> int:
        """Resident memory that is no file: pages of the log belong to the kernel's cache."""
        return int(measure.own_mib(self.process.pid) * MIB)

    def take(self) -> tuple[float, int]:
        """Longest turn (CPU s) and number of long ones since the last time."""
        found = TURN.unpack_from(self._shared)
        TURN.pack_into(self._shared, 0, 0.0, 0)
        return found

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


# -------------------------------------------------------------------------------- the abuses


def contains(rng: random.Random, names: int = 1, count: int = CONDITIONS, word: str = "OR") -> str:
    """So many conditions, none of which holds."""
    texts = (f"p{rng.randrange(names)} CONTAINS '#{rng.getrandbits(64):x}'" for _ in range(count))
    return f" {word} ".join(texts)


def deep(rng: random.Random) -> str:
    """As deep as it may be, as wide as it may be long."""
    inner = contains(rng, 4, 3)
    for at in range(190):
        inner = f"({inner}) {'AND' if at % 2 else 'OR'} p{at % 4} <> '{rng.getrandbits(64):x}'"
    return inner


def pull(expression: str, topic: str = "T", wait: bool = False) -> Request:
    fields = PULL | {"topic": topic, "subscription": expression, "sysFlag": 6 if wait else 4}
    return Code.PULL_MESSAGE, fields, b""


def heartbeat(expressions: list[str], client: str) -> Request:
    consumers = [
        {
            "groupName": f"g{at}", "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [{
                "topic": "T", "subString": text, "subVersion": time.time_ns() // 1_000_000,
                "expressionType": "SQL92",
            }],
        }
        for at, text in enumerate(expressions)
    ]  # fmt: skip
    said = {"clientID": client, "consumerDataSet": consumers, "producerDataSet": []}
    return Code.HEART_BEAT, {}, orjson.dumps(said)


def check(expression: str) -> Request:
    subscription = {"topic": "T", "subString": expression, "subVersion": 1,
                    "expressionType": "SQL92"}  # fmt: skip
    said = {"clientId": "c", "group": "ABUSER", "subscriptionData": subscription}
    return Code.CHECK_CLIENT_CONFIG, {}, orjson.dumps(said)


def attempt(expression: str) -> Request:
    return (
        Code.SLUICE_TRY_FILTER,
        {"topic": "T", "subscription": expression, "expressionType": "SQL92"},
        b"",
    )


def lag(expression: str) -> Request:
    fields = {
        "group": "ABUSER",
        "topic": "T",
        "subscription": expression,
        "expressionType": "SQL92",
    }
    return Code.SLUICE_FILTERED_LAG, fields, b""


def by_key(rng: random.Random) -> Request:
    fields = {"topic": "T", "key": f"k{rng.randrange(3)}", "maxNum": 64, "beginTimestamp": 0,
              "endTimestamp": 1 << 62}  # fmt: skip
    return Code.QUERY_MESSAGE, fields, b""


def units(rng: random.Random) -> Request:
    fields = {"topic": "T", "queueId": 0, "index": 0, "count": 100_000, "consumerGroup": "g0"}
    return Code.QUERY_CONSUME_QUEUE, fields, b""


def by_time(rng: random.Random) -> Request:
    fields = {"topic": "T", "queueId": 0, "timestamp": int(time.time() * 1000) - rng.randrange(9)}
    return Code.SEARCH_OFFSET_BY_TIMESTAMP, fields, b""


Make = Callable[[random.Random], list[Request]]
ABUSES: Final[dict[str, tuple[Make, bool]]] = {
    "nobody": (lambda rng: [], False),
    "pull: 700 CONTAINS, new each time": (lambda rng: [pull(contains(rng))], True),
    "pull: 700 CONTAINS on 8 properties": (lambda rng: [pull(contains(rng, 8))], True),
    "pull: 700 CONTAINS, AND NOT": (
        lambda rng: [pull(contains(rng, 4, 700, "AND").replace("CONTAINS", "NOT CONTAINS"))], True
    ),
    "pull: 700 CONTAINS, the same": (lambda rng: [pull(contains(random.Random(1)))], False),
    "pull: deep": (lambda rng: [pull(deep(rng))], True),
    "pull: 50 small filters, pipelined": (
        lambda rng: [pull(contains(rng, 4, 5)) for _ in range(50)], True
    ),
    "pull: 700 CONTAINS, 100 that wait": (
        lambda rng: [pull(contains(rng, 4), "BYSTANDER", wait=True) for _ in range(100)], True
    ),
    "heartbeat: 2,000 groups, all different": (
        lambda rng: [heartbeat([contains(rng, 4, 5) for _ in range(GROUPS)], "c1")], True
    ),
    "heartbeat: 2,000 groups, one expression": (
        lambda rng: [heartbeat([contains(rng, 4, 5)] * GROUPS, "c1")], True
    ),
    "heartbeat: 2,000 groups, the same again": (
        lambda rng: [heartbeat([contains(random.Random(1), 4, 5)] * GROUPS, "c1")], False
    ),
    "check: 700 CONTAINS, pipelined": (
        lambda rng: [check(contains(rng)) for _ in range(8)], True
    ),
    "check: deep": (lambda rng: [check(deep(rng)) for _ in range(8)], True),
    "try filter": (lambda rng: [attempt(contains(rng, 4))], True),
    "exact lag": (lambda rng: [lag(contains(rng, 4))], True),
    "query by key": (lambda rng: [by_key(rng) for _ in range(16)], False),
    "query consume queue": (lambda rng: [units(rng)], False),
    "offset by time": (lambda rng: [by_time(rng) for _ in range(64)], False),
}  # fmt: skip


def abuse(
    address: str,
    batches: Iterator[list[Request]],
    over: threading.Event,
    counts: list[int],
    channels: list[BlockingChannel],
) -> None:
    """One connection that asks, and asks again as soon as it is answered."""
    with (
        contextlib.suppress(SluiceError, OSError, ValueError),
        contextlib.closing(BlockingChannel(address, 60.0)) as channel,
    ):
        channels.append(channel)
        for batch in batches:
            if over.is_set():
                break
            for code, fields, body in batch:
                texts = {name: str(value) for name, value in fields.items()}
                channel.send(Command(code, texts, body))
            for _ in batch:
                channel.receive()
            counts[0] += len(batch)


def bystand(address: str, seconds: float, waits_s: list[float]) -> None:
    fields = {name: str(value) for name, value in SEND.items()}
    with contextlib.closing(BlockingChannel(address, 60.0)) as channel:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            begin_s = time.monotonic()
            answer = channel.call(Command(Code.SEND_MESSAGE_V2, dict(fields), b"still here"))
            waits_s.append(time.monotonic() - begin_s)
            assert answer.code == 0, answer.remark
            time.sleep(0.001)


def fill(address: str) -> None:
    rng = random.Random(7)
    with contextlib.closing(BlockingChannel(address, 30.0)) as channel:
        for at in range(MESSAGES):
            values = [f"p{n}\x01value {at} {rng.getrandbits(200):x}" for n in range(8)]
            properties = "\x02".join([f"UNIQ_KEY\x01{at:032X}", f"KEYS\x01k{at % 3}", *values, ""])
            fields = {n: str(v) for n, v in (SEND | {"b": "T", "i": properties}).items()}
            answer = channel.call(Command(Code.SEND_MESSAGE_V2, fields, b"x" * 100))
            assert answer.code == 0, answer.remark
        send = {name: str(value) for name, value in SEND.items()}
        channel.call(Command(Code.SEND_MESSAGE_V2, send, b"x"))
        channel.call(Command(Code.PULL_MESSAGE, {n: str(v) for n, v in pull("p0='1'")[1].items()}))


class Row(NamedTuple):
    """What one abuse did to the bystander, in ms, and to the process."""

    name: str
    sends: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    turn_cpu_ms: float
    long_turns: int
    asked: int
    cores: float
    grown_mib: float
    left_mib: float

    @property
    def is_good(self) -> bool:
        return self.p99_ms < P99_MAX_MS and self.left_mib < LEFT_MAX_MIB


def abusing(
    server: Server, name: str, abusers: int, over: threading.Event, counts: list[int],
    channels: list[BlockingChannel],
) -> list[threading.Thread]:  # fmt: skip
    """Make the threads of an abuse, and what they send."""
    if name in ATTACKS:
        what = ATTACKS[name]
        next(what.chunks())  # is made before the clock starts
        arguments = (server.addresses[what.port], what, over, [0], counts)
        return [
            threading.Thread(target=attack, args=arguments, daemon=True) for _ in range(abusers)
        ]
    make, is_new = ABUSES[name]
    threads = []
    for number in range(abusers):
        rng = random.Random(f"{name}:{number}")
        made = [make(rng) for _ in range(64 if is_new else 1)]
        if not made[0]:
            break
        asks = (server.address, itertools.cycle(made), over, counts, channels)
        threads.append(threading.Thread(target=abuse, args=asks, daemon=True))
    return threads


def run(server: Server, name: str, seconds: float, abusers: int) -> Row:
    over, counts = threading.Event(), [0]
    waits_s: list[float] = []
    channels: list[BlockingChannel] = []
    threads = abusing(server, name, abusers, over, counts, channels)
    memory = server.memory_bytes()
    server.take()
    cpu_s, begin_s = server.cpu_s(), time.monotonic()
    for thread in threads:
        thread.start()
    bystand(server.address, seconds, waits_s)
    passed_s = time.monotonic() - begin_s
    longest_s, long_turns = server.take()
    cpu_s = server.cpu_s() - cpu_s
    over.set()
    for channel in channels:
        with contextlib.suppress(OSError):
            channel._socket.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(60)
    grown = server.memory_bytes() - memory
    time.sleep(AFTER_S)
    ordered = sorted(waits_s)
    p50, p99 = (ordered[len(ordered) * part // 100] * 1000 for part in (50, 99))
    row = Row(
        name, len(ordered), p50, p99, ordered[-1] * 1000, longest_s * 1000, long_turns, counts[0],
        cpu_s / passed_s, grown / MIB, (server.memory_bytes() - memory) / MIB,
    )  # fmt: skip
    print(
        f"{name:42} {row.sends:6} {p50:8.1f} {p99:8.1f} {row.max_ms:8.1f}"
        f" {row.turn_cpu_ms:10.1f} {long_turns:6} {row.asked:8} {row.cores:6.2f}"
        f" {row.grown_mib:8.0f} {row.left_mib:8.0f} {'' if row.is_good else 'MISSED'}",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--abusers", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default="", help="write the rows into this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a row missed")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    with tempfile.TemporaryDirectory(prefix="sluicemq-abuse-") as directory:
        server = Server(Path(directory))
        try:
            fill(server.address)
            print(
                f"{'abuse':42} {'sends':>6} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}"
                f" {'turn cpu ms':>10} {'>5ms':>6} {'asked':>8} {'cores':>6} {'MiB more':>8}"
                f" {'left':>8}"
            )
            server.settle()
            rows = [
                run(server, name, options.seconds, options.abusers)
                for name in (*ABUSES, *ATTACKS)
                if options.only in name
            ]
        finally:
            server.close()
    if options.json:
        Path(options.json).write_bytes(orjson.dumps([row._asdict() for row in rows]))
    return int(options.check and not all(row.is_good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
