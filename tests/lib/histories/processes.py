"""Histories of real processes: senders and readers in threads, faults, rest, and the checker.

    PYTHONPATH=tests/lib python -m histories.processes --histories 100 [--seed 7] [--replicas 2]
        [--seconds 20] [--parallel 4]

One cluster serves many histories: each has a topic of its own, some seconds of faults, and is
judged when all replicas are in sync again. A sender tries each value once and says what it was
told; nobody asks the product how it works, only the consensus' record is read.

In each history a master loses its role and gets it back (A→B→A, A→B→C→A), by planned switches or
kills. A quarter of the messages are timed, due while faults happen or shortly after; each has to be
delivered when the history is judged. With --parallel each of several processes has a cluster of its
own, in network namespaces and a directory of its own, and runs its part of the seeds.
"""

import argparse
import contextlib
import logging
import math
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from histories import timed
from histories.checker import check
from histories.history import Change, End, Filtered, History, Left, Outcome, Seen, Send, Timed
from histories.namespaces import BROKER, Cluster, available
from histories.report import Report
from sluicemq.client.core import requests
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.requests import PullStatus
from sluicemq.errors import SluiceError
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import MessageQueue, TopicConfig
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.codec import decode_records
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

if TYPE_CHECKING:
    from histories.sinks import Sink

QUEUES: Final = 2
SENDERS: Final = 4
TIMEOUT_S: Final = 4.0
CLASSES, SPARK = "classes", "spark"
"""Kinds of sinks."""
SPARK_SLOWNESS: Final = 4
"""A micro-batch of Spark takes seconds."""
REST_S: Final = 120.0
USED_BY: Final = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
SEND_PAUSE_S: Final = 0.03
"""The longest pause of a sender, for each of the clusters that share the machine."""
READS: Final = 6
"""Pulls of the reader in the longest pause of a sender."""
HOP_S: Final = 90.0
"""Generous: a broker takes half a minute to start on a machine that is very busy."""
TAKE_OVER_S: Final = 20.0
"""For an election after a kill; longer than the lease of the one that was killed."""
CIRCLES_MAX: Final = 4
TIMED_SHARE: Final = 0.25
GROUP_COMMIT_MS: Final = 2000.0
"""The longest group commit of a broker on a busy machine; on virtual time it takes none."""
DUE_AFTER_S: Final = 4.0
"""The last timed messages are due so long after the last fault."""
DELIVERY_S: Final = 20.0
FILTERS: Final = (
    ("a", TAG, "a"), ("b || c", TAG, "bc"), ("tag = 'c'", SQL92, "c"),
    ("tag IN ('a', 'b')", SQL92, "ab"), ("tag <> 'a'", SQL92, "bc"),
)  # fmt: skip
"""Expression, kind, the tags that it wants."""


def sink_of(seed: int) -> str:
    """Which sink a history has, where it can be had: every fourth one, a whole Spark every 32nd."""
    if seed % 4 or find_spec("pyspark") is None:
        return ""
    return SPARK if seed % 32 == 16 and shutil.which("java") else CLASSES


def tag_of(value: str) -> str:
    """What filters tell values apart by."""
    return "abc"[zlib.crc32(value.encode()) % 3]


class Talk:
    """A client's connections, one a replica; every call has one try."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._channels: dict[int, BlockingChannel] = {}

    def call(self, replica: int, command: Command) -> Command:
        """Raises SluiceError."""
        channel = self._channels.get(replica)
        if channel is None or channel.closed:
            address = f"{self._cluster.replicas[replica - 1].address}:10911"
            channel = self._channels[replica] = BlockingChannel(address, TIMEOUT_S)
        return channel.call(command)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


class Run:
    """One history of a cluster."""

    def __init__(
        self, cluster: Cluster, seed: int, seconds: float, sink: str = "", parallel: int = 1
    ) -> None:
        self.cluster = cluster
        self.pause_s = SEND_PAUSE_S * parallel
        self.rng = random.Random(seed)
        self.topic = f"history-{seed}"
        self.seconds = seconds * (SPARK_SLOWNESS if sink == SPARK else 1)
        self.history = History(
            epoch_ms=(time.time() - time.monotonic()) * 1000, early_ms=GROUP_COMMIT_MS
        )
        self.queues = [MessageQueue(self.topic, BROKER, number) for number in range(QUEUES)]
        self.story: list[str] = []
        self.sink = self._sink(sink, seed) if sink else None
        self.sink_queues: list[MessageQueue] = []
        if self.sink is not None:
            self.sink_queues = [queue._replace(topic=self.sink.topic) for queue in self.queues]
            self.history.epochs = self.sink.epochs
        self.master = 1
        self.faults_s = 0.0
        """How long the faults have lasted, when they are over."""
        self._end_s = 0.0
        self._elected_ms: dict[int, float] = {}
        self._first_revision = 0
        self._is_over = False
        self._lock = threading.Lock()

    def _sink(self, kind: str, seed: int) -> "Sink":
        from histories.sinks import Job, Writer  # where pyspark is

        topic, names = f"{self.topic}-sink", f"{self.cluster.names.address}:9876"
        if kind == SPARK:
            return Job(names, topic, seed, self.cluster.root / f"checkpoint-{seed}")
        return Writer(names, topic, seed)

    def run(self) -> list[str]:
        """What is wrong. Raises TimeoutError when it does not come to rest."""
        cluster, sink = self.cluster, self.sink
        cluster.wait(cluster.is_whole, "all replicas in sync before the history", REST_S)
        self.master, self._first_revision = cluster.master(), cluster.state()[1]
        talk = Talk(cluster)
        for topic in (self.topic, *([sink.topic] if sink is not None else [])):
            cluster.wait(partial(self._create, talk, topic), topic, REST_S)
        talk.close()
        if sink is not None:
            sink.start()
        work: list[Callable[[], None]] = [self._look, self._read, self._change, self._recall]
        work += [lambda index=index: self._send(index) for index in range(SENDERS)]  # type: ignore[misc]
        talk = Talk(cluster)  # Spark's start may have taken longer than a broker keeps who is idle
        threads = [threading.Thread(target=one, daemon=True) for one in work]
        for thread in threads:
            thread.start()
        try:
            self._break()
            cluster.heal()
            cluster.wait(cluster.is_whole, "all replicas in sync again", REST_S)
            self._await_send(talk)
            self._await_list(talk)
            if sink is not None:
                sink.finish()
        finally:
            self._is_over = True
            if sink is not None:
                sink.is_over.set()
            for thread in threads:
                thread.join(3 * TIMEOUT_S)
        self._leave(talk)
        talk.close()
        return check(self.history)

    # --- clients

    def _look(self) -> None:
        """Keeps the senders' idea of who is master: never more than some tenths of a second old."""
        while not self._is_over:
            state = self.cluster.state()[0]
            self._elected_ms.setdefault(state.get("epoch", 0), time.time() * 1000)
            self.master = int(state.get("master", 0)) or self.master
            time.sleep(0.1)

    def _send(self, index: int) -> None:
        rng, talk, count = random.Random(self.rng.random()), Talk(self.cluster), 0
        while not self._is_over:
            count += 1
            queue, value = rng.choice(self.queues), f"{self.topic}.{index}.{count}"
            target = rng.choice(range(1, len(self.cluster.replicas) + 1))
            target = self.master if rng.random() < 0.9 else target
            if rng.random() < TIMED_SHARE and not self.faults_s:
                self._send_timed(talk, target, timed.draw(rng, value, queue, self._due_ms(rng)))
            else:
                self._send_one(talk, target, queue, value)
            time.sleep(rng.uniform(0.0, self.pause_s))
        talk.close()

    def _due_ms(self, rng: random.Random) -> float:
        """Return a time (ms) from now until shortly after the last fault."""
        left_s = max(min(self._end_s - time.monotonic(), self.seconds), 0) + DUE_AFTER_S
        return time.time() * 1000 + rng.choice((0.3, 1, left_s)) * rng.uniform(0.5, 1) * 1000

    def _send_timed(self, talk: Talk, target: int, one: Timed) -> None:
        tag = tag_of(one.value)
        command = timed.send(one, BROKER, int(time.time() * 1000), f"TAGS\1{tag}\2tag\1{tag}\2")
        with self._lock:
            self.history.timed.append(one)
        with contextlib.suppress(SluiceError):
            if talk.call(target, command).code == ResponseCode.SUCCESS:
                one.outcome, one.answered_ms = Outcome.OK, time.time() * 1000

    def _send_one(self, talk: Talk, target: int, queue: MessageQueue, value: str) -> bool:
        tag = tag_of(value)
        properties = f"TAGS\1{tag}\2tag\1{tag}\2"
        send = Send(value, (queue.topic, queue.queue_id), time.monotonic())
        with self._lock:
            self.history.sends.append(send)
        outgoing = OutgoingMessage(
            queue.topic, value.encode(), properties, "", 0, 0, wait_store_ok=True
        )
        command = requests.send("histories", queue, outgoing, int(time.time() * 1000))
        try:
            answer = talk.call(target, command)
        except SluiceError:
            return False
        if answer.code != ResponseCode.SUCCESS:
            time.sleep(0.02)
            return False
        offset = requests.int_field(answer, "queueOffset")
        send.acknowledge((queue.topic, queue.queue_id), offset, time.monotonic())
        return True

    def _recall(self) -> None:
        """Take a message back now and then."""
        rng, talk = random.Random(self.rng.random()), Talk(self.cluster)
        while not self._is_over:
            self._ask(
                talk, timed.take_back(self.history, self.topic, rng, lambda: time.time() * 1000)
            )
            time.sleep(rng.uniform(0.5, 3))
        talk.close()

    def _ask(self, talk: Talk, asking: timed.Asking) -> bool:
        """Ask the master what `asking` asks for; return whether it came to its end."""
        with contextlib.suppress(SluiceError):
            command = next(asking)
            with contextlib.suppress(StopIteration):
                while True:
                    command = asking.send(talk.call(self.master, command))
            return True
        return False

    def _read(self) -> None:
        """Each message as soon as it can be seen, from whoever gives it; and where queues end."""
        rng, talk = random.Random(self.rng.random()), Talk(self.cluster)
        offsets = dict.fromkeys(self.queues + self.sink_queues, 0)
        while not self._is_over:
            queue = rng.choice(list(offsets))
            target = (
                self.master if rng.random() < 0.8 else rng.randint(1, len(self.cluster.replicas))
            )
            with contextlib.suppress(SluiceError):
                if rng.random() < 0.3:
                    self._ask_end(talk, target, queue)
                else:
                    offsets[queue] = self._pull(talk, target, queue, offsets[queue])
                    if queue in self.sink_queues:  # no tags there
                        continue
                    start = rng.randint(0, offsets[queue])
                    self._pull_filtered(talk, target, queue, start, rng.choice(FILTERS))
            time.sleep(self.pause_s / READS)
        talk.close()

    def _pull(self, talk: Talk, target: int, queue: MessageQueue, offset: int) -> int:
        command = requests.pull(
            "histories", queue, offset, subscription=Subscription(queue.topic, "*"), lite=True
        )
        answer = requests.parse_pull_response(talk.call(target, command), "")
        for message in decode_records(answer.data):
            place = (queue.topic, queue.queue_id)
            value = message.body.decode()
            self.history.seen.append(
                Seen(
                    place,
                    message.queue_offset,
                    value,
                    time.monotonic(),
                    str(target),
                    message.store_time_ms,
                )
            )
            offset = message.queue_offset + 1
        return offset

    def _pull_filtered(
        self, talk: Talk, target: int, queue: MessageQueue, start: int, wanted: tuple[str, str, str]
    ) -> None:
        """Another filter each time, over what was sent for all of them."""
        text, kind, tags = wanted
        subscription = Subscription(queue.topic, text, kind)
        command = requests.pull(
            "histories", queue, start, subscription=subscription, expression_kind=kind, lite=True
        )
        answer = requests.parse_pull_response(talk.call(target, command), "")
        if answer.status in (PullStatus.FOUND, PullStatus.NO_MATCHED_MSG):
            values = frozenset(m.body.decode() for m in decode_records(answer.data))
            place = (queue.topic, queue.queue_id)
            self.history.filtered.append(
                Filtered(
                    place, start, answer.next_offset, values, text, lambda v: tag_of(v) in tags
                )
            )

    def _ask_end(self, talk: Talk, target: int, queue: MessageQueue) -> None:
        """Only where the same master was there before and after is it known who has answered."""
        before, called_s = self.cluster.state()[0], time.monotonic()
        answer = requests.expect_success(talk.call(target, requests.offset_max(queue)))
        returned_s, after = time.monotonic(), self.cluster.state()[0]
        if before and before["epoch"] == after.get("epoch") and before["master"] == target:
            place, end = (queue.topic, queue.queue_id), requests.int_field(answer, "offset")
            self.history.ends.append(End(place, end, called_s, returned_s, before["epoch"]))

    def _change(self) -> None:
        """Topics are made."""
        talk, count = Talk(self.cluster), 0
        while not self._is_over:
            count += 1
            name = f"{self.topic}-{count}"
            if self._create(talk, name):
                self.history.changes.append(Change(f"topic {name}", Outcome.OK))
            time.sleep(0.5)
        talk.close()

    def _create(self, talk: Talk, name: str) -> bool:
        config = TopicConfig(name, QUEUES, QUEUES)
        with contextlib.suppress(SluiceError):
            answer = talk.call(self.master, requests.update_topic(config, {}))
            return answer.code == ResponseCode.SUCCESS
        return False

    # --- faults

    def _break(self) -> None:
        """Faults for `seconds`, among them a circle of the role, until one has come to its end."""
        begin_s = time.monotonic()
        self._end_s = begin_s + self.seconds
        circle_s = begin_s + self.seconds * self.rng.uniform(0.1, 0.5)
        time.sleep(self.rng.uniform(0.3, 1.0))
        for _ in range(CIRCLES_MAX):
            self._break_until(circle_s)
            self._circle()
            if self.history.returns:
                break
        self._break_until(self._end_s)
        self.faults_s = time.monotonic() - begin_s
        if not self.history.returns:
            raise TimeoutError(f"no role returned to a master: {'; '.join(self.story)}")

    def _break_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            for_s = self.rng.choice((0.2, 1.0, self.rng.uniform(2, 6)))
            self.story.append(self._fault(for_s))
            time.sleep(for_s)
            if self.rng.random() < 0.7:
                self.cluster.heal()
            time.sleep(self.rng.uniform(0.1, 2.0))

    def _circle(self) -> None:
        """The master loses its role and gets it back, over one or two others. Timed messages go on
        being sent meanwhile."""
        cluster, rng = self.cluster, self.rng
        cluster.heal()
        with contextlib.suppress(TimeoutError):
            cluster.wait(cluster.is_whole, "a whole set before a circle", HOP_S)
            first = cluster.master()
            others = [n for n in range(1, len(cluster.replicas) + 1) if n != first]
            path = [*rng.sample(others, rng.randint(1, len(others))), first]
            for target in path:
                self._hop(target)
                time.sleep(rng.uniform(0.5, 3.0))
            self.history.returns += 1
            self.story.append(f"return {'→'.join(map(str, [first, *path]))}")

    def _hop(self, target: int) -> None:
        """Make `target` the master: kill the one before, or switch as planned. Raises
        TimeoutError."""
        cluster = self.cluster
        # Without a replica that is in sync, nobody may take over from one that is killed.
        cluster.wait(cluster.is_whole, "a whole set before a hop", HOP_S)
        master = cluster.master()
        if self.rng.random() < 0.4:
            cluster.kill(master)
            self.story.append(f"kill {master} (master) in a circle")
            # One that falls out of the set just before cannot take over: then the killed one does.
            with contextlib.suppress(TimeoutError):
                cluster.wait(lambda: cluster.master() not in (0, master), "a master", TAKE_OVER_S)
            cluster.heal()
        cluster.wait(cluster.is_whole, "a whole set in a circle", HOP_S)
        master, talk = cluster.master(), Talk(cluster)
        if master != target:
            self.story.append(f"switch {master} (master) in a circle")

        def has_switched() -> bool:
            if (now := cluster.master()) != target and cluster.is_whole():
                with contextlib.suppress(SluiceError):
                    talk.call(now, requests.switch_master(target))
            return now == target

        try:
            cluster.wait(has_switched, f"replica {target} as master", HOP_S)
            cluster.wait(cluster.is_whole, "a whole set in a circle", HOP_S)
        finally:
            talk.close()

    def _fault(self, for_s: float) -> str:
        cluster, rng = self.cluster, self.rng
        master = cluster.master() or 1
        replica = master if rng.random() < 0.6 else rng.randint(1, len(cluster.replicas))
        place = cluster.replicas[replica - 1]
        kind = rng.choice(
            (
                "kill",
                "kill",
                "kill",
                "stop",
                "pull",
                "deaf",
                "etcd",
                "wipe",
                "end",
                "switch",
                "names",
            )
        )
        who = f"{replica}{' (master)' * (replica == master)}"
        if kind == "wipe" and not (replica != master and cluster.is_whole()):
            kind = "kill"
        if kind in ("kill", "wipe"):
            cluster.kill(replica, wipes=kind == "wipe")
            if rng.random() < 0.3:
                place.start("broker")
        elif kind == "end":
            with contextlib.suppress(Exception):
                place.signal("broker", signal.SIGTERM)
        elif kind == "stop":
            place.signal("broker", signal.SIGSTOP)
        elif kind == "pull":
            place.plug(is_in=False)
        elif kind == "deaf":
            place.lose(rng.choice([other for other in cluster.places if other is not place]))
        elif kind == "names":
            cluster.names.signal("names", signal.SIGKILL)
        elif kind == "etcd":
            cluster.names.signal("etcd", signal.SIGKILL)
        else:
            talk = Talk(cluster)
            with contextlib.suppress(SluiceError):
                talk.call(master, requests.switch_master(replica if replica != master else None))
            talk.close()
        return f"{kind} {who} for {for_s:.1f} s"

    # --- the end

    def _await_send(self, talk: Talk) -> None:
        count = 0

        def is_stored() -> bool:
            nonlocal count
            count += 1
            queues, value = self.queues, f"{self.topic}.last.{count}"
            return all(
                self._send_one(talk, self.master, q, f"{value}.{q.queue_id}") for q in queues
            )

        self.cluster.wait(is_stored, "a send after all faults", REST_S)

    def _await_list(self, talk: Talk) -> None:
        def is_listed() -> bool:
            now_ms = int(time.time() * 1000)
            return self._ask(talk, timed.note_pending(self.history, self.topic, now_ms))

        self.cluster.wait(is_listed, "the list of pending messages", REST_S)

    def _leave(self, talk: Talk) -> None:
        """What the master has when everything that is timed is due."""
        due_ms = max((one.due_ms for one in self.history.timed), default=0.0)
        time.sleep(max(due_ms / 1000 - time.time(), 0) + 0.5)
        history, left = self.history, Left("master")
        wanted = {change.value for change in history.changes}
        end_s = time.monotonic() + DELIVERY_S
        while True:
            for queue in self.queues + self.sink_queues:
                found = left.queues.setdefault((queue.topic, queue.queue_id), {})
                self._read_all(talk, queue, found)
            answer = requests.expect_success(
                talk.call(
                    self.cluster.master(), requests.make_request(RequestCode.GET_ALL_TOPIC_CONFIG)
                )
            )
            text = bytes(answer.body).decode()
            left.changes = frozenset(c for c in wanted if f'"{c.removeprefix("topic ")}"' in text)
            is_complete = wanted <= left.changes and not timed.undelivered(history, left.queues)
            if is_complete or time.monotonic() > end_s:
                break
            time.sleep(0.5)
        history.left.append(left)
        history.terms = [
            replace(term, at_ms=self._elected_ms.get(term.epoch, math.inf))
            for term in self.cluster.terms(self._first_revision)
        ]

    def _read_all(self, talk: Talk, queue: MessageQueue, found: dict[int, str]) -> None:
        offset = max(found, default=-1) + 1
        while True:
            command = requests.pull(
                "histories", queue, offset, subscription=Subscription(queue.topic, "*"), lite=True
            )
            answer = requests.parse_pull_response(talk.call(self.cluster.master(), command), "")
            for message in decode_records(answer.data):
                found[message.queue_offset] = value = message.body.decode()
                self.history.seen.append(
                    Seen(
                        (queue.topic, queue.queue_id),
                        message.queue_offset,
                        value,
                        time.monotonic(),
                        "at the end",
                        message.store_time_ms,
                    )
                )
                offset = message.queue_offset + 1
            if offset >= answer.offset_max:
                return


def await_same_logs(cluster: Cluster) -> str:
    """Wait until the replicas' logs are equal (`same_logs`): a replica that led a moment ago may
    not have cut its log yet. Return "", or after REST_S seconds in which file they differ."""
    end_s = time.monotonic() + REST_S
    while (wrong := same_logs(cluster)) and time.monotonic() < end_s:
        time.sleep(0.5)
    return wrong


def same_logs(cluster: Cluster) -> str:
    """Compare the replicas' logs, of what all of them have. Return "" if they are equal, else in
    which file they differ."""
    logs = [
        {path.name: path for path in sorted((cluster.disk(i + 1) / "commitlog").iterdir())}
        for i in range(len(cluster.replicas))
    ]
    for name in set.intersection(*map(set, logs)):
        texts = [log[name].read_bytes() for log in logs]
        size = min(len(text.rstrip(b"\0")) for text in texts)
        if len({text[:size] for text in texts}) > 1:
            return f"apart: the replicas differ in {name}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="the first one's")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of faults, each")
    parser.add_argument("--sink", choices=(CLASSES, SPARK), help="in all, not by seed")
    parser.add_argument("--mutant", default="", help="a fault of histories.mutants in every broker")
    parser.add_argument("--parallel", type=int, default=1, help="clusters at a time")
    parser.add_argument("--share", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help="the file (JSON) to add what was run to")
    options = parser.parse_args(arguments)
    if reason := available():
        sys.stdout.write(f"skipped: {reason}\n")
        return 0
    logging.getLogger("sluicemq.spark").setLevel(logging.ERROR)
    report = Report(
        options.replicas, options.seconds, options.report,
        parallel=max(options.parallel, options.share),
    )  # fmt: skip
    if options.parallel > 1:
        return run_parallel(options, report)
    return run_many(
        options.histories, options.seed, report, sink=options.sink, mutant=options.mutant
    )


def run_parallel(options: argparse.Namespace, report: Report) -> int:
    """Run the histories in several processes, each with a cluster of its own and a part of the
    seeds in a row. Return how many of the processes found something wrong."""
    stops = [options.histories * part // options.parallel for part in range(options.parallel + 1)]
    with tempfile.TemporaryDirectory(prefix="sluicemq-reports-") as directory:
        paths = [Path(directory) / f"{part}.json" for part in range(options.parallel)]
        workers = []
        for path, start, stop in zip(paths, stops[:-1], stops[1:], strict=True):
            words = [
                sys.executable, "-m", "histories.processes", f"--seed={options.seed + start}",
                f"--histories={stop - start}", f"--replicas={options.replicas}",
                f"--seconds={options.seconds}", f"--mutant={options.mutant}", f"--report={path}",
                f"--share={options.parallel}",
            ]  # fmt: skip
            words += [f"--sink={options.sink}"] if options.sink else []
            if stop > start:
                workers.append(subprocess.Popen(words))
        try:
            codes = [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.terminate()  # which closes its namespaces
        for path in filter(Path.exists, paths):
            report.merge(path)
        report.write()
    sys.stdout.write(f"{report.finished} histories, {report.wrong} wrong; {report.told}\n")
    sys.stdout.write(f"faults: {dict(sorted(report.faults.items()))}\n")
    return sum(map(bool, codes))


def run_many(
    count: int, first: int, report: Report, *, sink: str | None = None, mutant: str = ""
) -> int:
    """How many were wrong; the first one ends it, and its logs stay. `sink`: in all of them."""
    root = Path(tempfile.mkdtemp(prefix="sluicemq-histories-"))
    cluster = Cluster(root, report.replicas, mutant)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces do not go by themselves
    try:
        cluster.start()
        for seed in range(first, first + count):
            kind = sink_of(seed) if sink is None else sink
            if wrong := run_one(cluster, seed, kind, report):
                sys.stdout.write(f"{seed}: WRONG {wrong[:5]} ({len(wrong)}); logs in {root}\n")
                return 1
        sys.stdout.write(f"{count} histories: all went well; {report.told}\n")
        sys.stdout.write(f"faults: {dict(sorted(report.faults.items()))}\n")
        shutil.rmtree(root, ignore_errors=True)
        return 0
    finally:
        cluster.close()
        used_s = sum(sum(resource.getrusage(who)[:2]) for who in USED_BY)
        sys.stdout.write(f"{used_s:.0f} s of CPU, {used_s / max(len(report.seeds), 1):.1f} each\n")


def run_one(cluster: Cluster, seed: int, sink: str, report: Report) -> list[str]:
    """What is wrong."""
    run = Run(cluster, seed, report.seconds, sink, report.parallel)
    try:
        wrong = run.run()
    except (TimeoutError, SluiceError) as error:
        place = traceback.extract_tb(error.__traceback__)
        wrong = [f"stuck: {error} ({' > '.join(frame.name for frame in place)})"]
    wrong += filter(None, [await_same_logs(cluster) if not wrong else ""])
    history = run.history
    report.add(seed, history, run.story, sink, faults_s=run.faults_s, wrong=bool(wrong))
    acknowledged = sum(send.outcome is Outcome.OK for send in history.sends)
    text = (
        f"{seed}: {acknowledged} of {len(history.sends)} acknowledged,"
        f" {len(history.timed)} timed, {len(history.seen)} seen,"
        f" {len(history.filtered)} filtered pulls, "
    )
    if run.sink is not None:
        text += f"{len(history.epochs)} epochs ({sink}; {dict(run.sink.errors)}), "
    sys.stdout.write(f"{text}{'; '.join(run.story)}\n")
    sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
