"""A broker in a process of its own under inputs: who is asked meanwhile, and what is looked at.

The bystander is a thread with a connection of its own that asks and sends, again and again. The
memory is what the process has for itself (RssAnon: files of the store that are mapped do not
count); Linux tells it.

With access control the bystander and most inputs are signed, and the file of rules is written anew
again and again: now with rules, now with something that nearly is rules.

What differs between protocols is a `Speech`. Of gRPC a PING is the question, the bystander sends by
it too, and a broken conversation has a connection of its own, which has to end with it.
"""

import collections
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import IO, Final, NamedTuple

from fuzz import grpc_calls, http2, rules
from fuzz.corpus import Template
from fuzz.mutate import Account, Input, Mutator
from http2_client import Client
from simulation.stepped import send_fields
from sluicemq.acl.loading import load_rules
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.net.blocking import BlockingChannel
from sluicemq.proxy import messages as m
from sluicemq.wire import http2 as h
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command, encode
from sluicemq.wire.signature import sign_command

CONFIGURATION: Final = """brokerName=broker-a
metricsExporterType=DISABLE
mappedFileSizeCommitLog=16777216
timerWheelEnable=true
sluiceAutoTopicsMax=400
sluiceAutoGroupsMax=400
sluiceTransactionsOpenMax=1000
defaultTopicQueueNums=2
"""
GUARDED: Final = "aclEnable=true\n"
FUZZER: Final = ("fuzzer-1", "secret-of-the-fuzzer")
BYSTANDER: Final = ("bystander", "secret-of-the-bystander")
RULES: Final = f"""accounts:
- accessKey: {FUZZER[0]}
  secretKey: {FUZZER[1]}
  admin: true
- accessKey: {BYSTANDER[0]}
  secretKey: {BYSTANDER[1]}
  topicPerms: [BYSTANDER=PUB]
"""
RULES_EVERY: Final = 16
"""Batches between two texts for the file of rules."""
BATCH: Final = 64
IN_FLIGHT: Final = 3
ASK: Final = 0x5A17
"""The opaque of the question at the end of a batch."""
ASK_CODE: Final = 4321
ANSWER_WAIT_S: Final = 20.0
BYSTANDER_PAUSE_S: Final = 0.004
P99_MAX_S: Final = 2.0
GROWTH_MAX: Final = 192 * 1024 * 1024
WARM_PART: Final = 0.1
_TROUBLE: Final = re.compile(r"Traceback|MemoryError| CRITICAL ")
_QUESTION: Final = encode(Command(ASK_CODE, None, b"", ASK))
_ANSWER: Final = f'"opaque":{ASK},'.encode()


class Process:
    """`sluice up` with its log in a file."""

    def __init__(self, directory: Path, *, is_guarded: bool = False) -> None:
        self.directory = directory
        self.is_guarded = is_guarded
        config = directory / "broker.conf"
        config.write_text(CONFIGURATION + GUARDED * is_guarded)
        if is_guarded:
            self.write_rules(RULES)
        self.log = directory / "log.txt"
        self._stderr: IO[str] = self.log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port",
             "0", "--proxy-port", "0", "--store", str(directory / "store"), "-c", str(config)],
            stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        parts = dict(part.split("=", 1) for part in line.split()[1:])
        self.address = _address(parts["broker"])
        self.proxy_address = _address(parts["proxy"])
        self._log_read = 0

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def write_rules(self, text: str) -> None:
        """For its next look at the file. Replaced as a whole, as editors do."""
        new = self.directory / "plain_acl.yml.new"
        new.write_text(text, "utf-8", "replace")
        new.replace(self.directory / "plain_acl.yml")

    def memory_bytes(self) -> int:
        """Its own memory; 0 where the system does not tell."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            found = re.search(r"RssAnon:\s+(\d+) kB", status)
            return int(found[1]) * 1024 if found else 0
        return 0

    def trouble(self) -> str:
        """What is new in the log, when something in it is a traceback."""
        if self.log.stat().st_size == self._log_read:
            return ""
        with self.log.open(errors="replace") as lines:
            lines.seek(self._log_read)
            new = lines.read()
        self._log_read += len(new.encode("utf-8", "replace"))
        return new if _TROUBLE.search(new) else ""

    def close(self) -> int:
        """Ends it in order. Its exit code."""
        if self.is_alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._stderr.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


class Bystander(threading.Thread):
    """Somebody who wants to work meanwhile."""

    def __init__(self, address: tuple[str, int], account: Account | None = None) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._account = account
        self._over = threading.Event()
        self.waits_s: list[float] = []
        self.failure = ""

    def run(self) -> None:
        try:
            with self._asking() as ask:
                while not self._over.wait(BYSTANDER_PAUSE_S):
                    begin_s = SYSTEM_CLOCK.monotonic_s()
                    failure = ask()
                    self.waits_s.append(SYSTEM_CLOCK.monotonic_s() - begin_s)
                    self.failure = self.failure or failure
        except (SluiceError, OSError, AssertionError) as error:
            self.failure = repr(error)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Callable[[], str]]:
        """What it does again and again; it says what was wrong."""
        fields = {name: str(value) for name, value in send_fields("BYSTANDER").items()}
        address = f"{self._address[0]}:{self._address[1]}"
        with contextlib.closing(BlockingChannel(address, ANSWER_WAIT_S)) as channel:

            def ask() -> str:
                command = Command(RequestCode.SEND_MESSAGE_V2, dict(fields), b"still here")
                if self._account is not None:
                    sign_command(command, *self._account)
                answer = channel.call(command)
                return "" if answer.code == 0 else f"it was answered {answer.code}: {answer.remark}"

            yield ask

    def stop(self) -> None:
        self._over.set()
        self.join(ANSWER_WAIT_S + 5)

    def p99_s(self) -> float:
        ordered = sorted(self.waits_s)
        return ordered[len(ordered) * 99 // 100] if ordered else 0.0


class Caller(Bystander):
    """The same over gRPC: each answer has to be of its own message."""

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Callable[[], str]]:
        host, port = self._address
        with Client(port, host) as client:
            client.begin()
            client.send(h.encode_window_update(0, http2.WINDOW))
            numbers = itertools.count()

            def ask() -> str:
                sent = grpc_calls.message(message_id=f"01{next(numbers):032X}")
                sent.topic.name = "BYSTANDER"
                request = m.SendMessageRequest(messages=[sent]).SerializeToString()
                fields = ("x-mq-client-id", "bystander")
                answer = client.call(grpc_calls.SERVICE + "SendMessage", request, fields)
                client.frames.clear()
                client.headers.clear()
                if answer.status != 0:
                    return f"it was answered {answer.headers}"
                found = m.SendMessageResponse.FromString(answer.messages[0])
                if [it.message_id for it in found.entries] != [sent.system_properties.message_id]:
                    return f"it was answered {found}"
                return ""

            yield ask


class Batch(NamedTuple):
    """So many inputs for one connection."""

    number: int
    inputs: list[Input]


class Finding(NamedTuple):
    """What went wrong, and the inputs before it."""

    what: str
    batches: tuple[Batch, ...]


class Result(NamedTuple):
    """How a run went."""

    inputs: int
    closed: int
    seconds: float
    p99_s: float
    longest_s: float
    answers: int
    memory_before: int
    memory_after: int
    kinds: dict[str, int]
    findings: tuple[Finding, ...]


def make_batch(
    templates: tuple[Template, ...], seed: int, number: int, account: Account | None = None
) -> Batch:
    """The batch with this number: the same inputs for the same seed and templates."""
    mutator = Mutator(templates, Random(f"{seed}:{number}"), account)
    inputs = [mutator.plain() for _ in range(BATCH - 1)]
    return Batch(number, [*inputs, mutator.breaking()])


def rules_for(seed: int, number: int) -> str:
    """Rules that let the bystander work, or nearly rules, which have to change nothing."""
    rng = Random(f"{seed}:rules:{number}")
    tried = rules.text(rng).encode("utf-8", "replace").decode()
    try:
        load_rules(tried, "plain_acl.yml")
    except ConfigurationError:
        return tried
    return RULES


class Speech:
    """The remoting protocol: how a batch is made, and how it ends."""

    opening: bytes = b""
    question, answer = _QUESTION, _ANSWER

    def __init__(self, process: Process, templates: tuple[Template, ...], seed: int) -> None:
        self.address = process.address
        self._account = FUZZER if process.is_guarded else None
        self._templates = templates
        self.seed = seed

    def batch(self, number: int) -> Batch:
        return make_batch(self._templates, self.seed, number, self._account)

    def bystander(self, process: Process) -> Bystander:
        return Bystander(process.address, BYSTANDER if process.is_guarded else None)

    def break_off(self, connection: socket.socket, data: bytes) -> str:
        """Sends what may break the connection; what is wrong then."""
        _write(connection, data)
        return ""


class GrpcSpeech(Speech):
    """gRPC at the proxy's port. `recorded`: what clients wrote."""

    opening = http2.OPENING
    question, answer = http2.QUESTION, http2.ANSWER

    def __init__(self, process: Process, recorded: list[bytes], seed: int) -> None:
        super().__init__(process, (), seed)
        self.address = process.proxy_address
        self._recorded = recorded
        with contextlib.closing(BlockingChannel("{}:{}".format(*process.address))) as channel:
            for topic in ("T", "BYSTANDER"):
                fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": "2",
                          "writeQueueNums": "2", "perm": "6", "order": "false"}  # fmt: skip
                channel.call(Command(RequestCode.UPDATE_AND_CREATE_TOPIC, fields))

    def batch(self, number: int) -> Batch:
        mutator = http2.Http2Mutator(self._recorded, Random(f"{self.seed}:grpc:{number}"))
        inputs = [mutator.plain() for _ in range(BATCH - 1)]
        return Batch(number, [*inputs, mutator.breaking()])

    def bystander(self, process: Process) -> Bystander:
        return Caller(process.proxy_address)

    def break_off(self, connection: socket.socket, data: bytes) -> str:
        """A conversation of its own, which has to end when the client has said all."""
        with socket.create_connection(self.address, ANSWER_WAIT_S) as other:
            writer = threading.Thread(target=_write_all, args=(other, data), daemon=True)
            writer.start()
            try:
                while other.recv(1 << 18):
                    pass
            except TimeoutError:
                return f"a connection has not ended within {ANSWER_WAIT_S:.0f} s"
            except OSError:
                pass
            writer.join(ANSWER_WAIT_S)
        return ""


class Drive:
    """Sends batches and looks what becomes of them."""

    def __init__(self, process: Process, speech: Speech, p99_max_s: float = P99_MAX_S) -> None:
        """`p99_max_s`: a bystander that waits longer is a finding."""
        self._process = process
        self._p99_max_s = p99_max_s
        self._speech = speech
        self._open: collections.deque[tuple[Batch, socket.socket]] = collections.deque()
        self.inputs = self.closed = 0
        self.kinds: collections.Counter[str] = collections.Counter()
        self.findings: list[Finding] = []

    def run(self, first: int, inputs: int) -> Result:
        """From the batch with this number on."""
        bystander = self._speech.bystander(self._process)
        bystander.start()
        begin_s = SYSTEM_CLOCK.monotonic_s()
        memory = 0
        for number in range(first, first + max(1, inputs // BATCH)):
            if self.findings or not self._process.is_alive:
                break
            if self._process.is_guarded and number % RULES_EVERY == 0:
                self._process.write_rules(rules_for(self._speech.seed, number))
            self._send(self._speech.batch(number))
            if len(self._open) >= IN_FLIGHT:
                self._receive()
            if not memory and self.inputs >= inputs * WARM_PART:
                memory = self._process.memory_bytes()
        while self._open:
            self._receive()
        seconds = SYSTEM_CLOCK.monotonic_s() - begin_s
        bystander.stop()
        after = self._process.memory_bytes()
        self._judge(bystander, memory, after)
        return Result(
            self.inputs, self.closed, seconds, bystander.p99_s(), max(bystander.waits_s, default=0),
            len(bystander.waits_s), memory, after, dict(self.kinds), tuple(self.findings),
        )  # fmt: skip

    def _send(self, batch: Batch) -> None:
        """All but the last, and the question."""
        speech = self._speech
        data = b"".join(each.data for each in batch.inputs if not each.breaks)
        data = speech.opening + data + speech.question
        try:
            connection = socket.create_connection(speech.address, ANSWER_WAIT_S)
        except OSError as error:
            self._find(f"no connection: {error}", batch)
            return
        self._open.append((batch, connection))
        writer = threading.Thread(target=_write, args=(connection, data), daemon=True)
        if len(data) > 1 << 16:  # it may want us to read first
            writer.start()
        else:
            _write(connection, data)

    def _receive(self) -> None:
        batch, connection = self._open.popleft()
        with contextlib.closing(connection):
            answered = self._is_answered(batch, connection)
            if answered:
                data = b"".join(each.data for each in batch.inputs if each.breaks)
                wrong = self._speech.break_off(connection, data)
                if wrong:
                    self._find(wrong, batch)
        if answered:
            self.inputs += len(batch.inputs)
            for each in batch.inputs:
                self.kinds[each.kind] += 1
        trouble = self._process.trouble()
        if trouble:
            self._find(f"in the log: {trouble[-2000:]}", batch)

    def _is_answered(self, batch: Batch, connection: socket.socket) -> bool:
        """Was the question of the batch answered? One whose connection was closed is counted."""
        tail = b""
        try:
            while True:
                data = connection.recv(1 << 18)
                if not data:
                    self.closed += 1
                    return False
                if self._speech.answer in tail + data:
                    return True
                tail = (tail + data)[-len(self._speech.answer) :]
        except TimeoutError:
            self._find(f"no answer within {ANSWER_WAIT_S:.0f} s", batch)
        except OSError:
            self.closed += 1
        return False

    def _find(self, what: str, *batches: Batch) -> None:
        self.findings.append(Finding(what, (*batches, *(batch for batch, _ in self._open))))

    def _judge(self, bystander: Bystander, memory: int, after: int) -> None:
        if not self._process.is_alive:
            self._find(f"the broker has ended: {self._process.process.returncode}")
        elif bystander.failure:
            self._find(f"the bystander: {bystander.failure}")
        elif bystander.p99_s() > self._p99_max_s:
            self._find(f"the bystander waited {bystander.p99_s():.2f} s (p99)")
        elif self.closed > 2:
            self._find(f"{self.closed} connections were closed that sent frames only")
        if memory and after - memory > GROWTH_MAX:
            self._find(f"the memory grew from {memory >> 20} to {after >> 20} MiB")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _write_all(connection: socket.socket, data: bytes) -> None:
    """All that this side has to say."""
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def _write(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)
