"""Histories of real processes: senders and readers in threads, faults, rest, and the checker.

    PYTHONPATH=tests/lib python -m histories.processes --histories 200 [--seed 7] [--replicas 3]

One cluster serves many histories: each has a topic of its own, some seconds of faults, and is
judged when all replicas are in sync again. A sender tries each value once and says what it was
told; nobody asks the product how it works, only the consensus' record is read.
"""

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from histories.checker import check
from histories.history import Change, End, Filtered, History, Left, Outcome, Seen, Send
from histories.namespaces import BROKER, Cluster, available
from sluicemq.client.core import requests
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.requests import PullStatus
from sluicemq.errors import SluiceError
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import MessageQueue, TopicConfig
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.codec import decode_records
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

QUEUES: Final = 2
SENDERS: Final = 4
TIMEOUT_S: Final = 4.0
REST_S: Final = 60.0
DELAY_LEVEL: Final = 1
FILTERS: Final = (
    ("a", TAG, "a"), ("b || c", TAG, "bc"), ("tag = 'c'", SQL92, "c"),
    ("tag IN ('a', 'b')", SQL92, "ab"), ("tag <> 'a'", SQL92, "bc"),
)  # fmt: skip
"""Expression, kind, the tags that it wants."""


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

    def __init__(self, cluster: Cluster, seed: int, seconds: float) -> None:
        self.cluster = cluster
        self.rng = random.Random(seed)
        self.topic = f"history-{seed}"
        self.seconds = seconds
        self.history = History()
        self.queues = [MessageQueue(self.topic, BROKER, number) for number in range(QUEUES)]
        self.story: list[str] = []
        self.master = 1
        self._first_revision = 0
        self._is_over = False
        self._lock = threading.Lock()

    def run(self) -> list[str]:
        """What is wrong. Raises TimeoutError when it does not come to rest."""
        cluster, talk = self.cluster, Talk(self.cluster)
        cluster.wait(cluster.is_whole, "all replicas in sync before the history", REST_S)
        self.master, self._first_revision = cluster.master(), cluster.state()[1]
        cluster.wait(lambda: self._create(talk, self.topic), "the topic", REST_S)
        work: list[Callable[[], None]] = [self._look, self._read, self._change]
        work += [lambda index=index: self._send(index) for index in range(SENDERS)]  # type: ignore[misc]
        threads = [threading.Thread(target=one, daemon=True) for one in work]
        for thread in threads:
            thread.start()
        try:
            self._break()
            cluster.heal()
            cluster.wait(cluster.is_whole, "all replicas in sync again", REST_S)
            self._await_send(talk)
        finally:
            self._is_over = True
            for thread in threads:
                thread.join(3 * TIMEOUT_S)
        self._leave(talk)
        talk.close()
        return check(self.history)

    # --- clients

    def _look(self) -> None:
        """Keeps the senders' idea of who is master: never more than some tenths of a second old."""
        while not self._is_over:
            self.master = self.cluster.master() or self.master
            time.sleep(0.1)

    def _send(self, index: int) -> None:
        rng, talk, count = random.Random(self.rng.random()), Talk(self.cluster), 0
        while not self._is_over:
            count += 1
            queue, value = rng.choice(self.queues), f"{self.topic}.{index}.{count}"
            target = rng.choice(range(1, len(self.cluster.replicas) + 1))
            target = self.master if rng.random() < 0.9 else target
            is_delayed = rng.random() < 0.03
            self._send_one(talk, target, queue, value, is_delayed=is_delayed)
            time.sleep(rng.uniform(0.0, 0.02))
        talk.close()

    def _send_one(
        self, talk: Talk, target: int, queue: MessageQueue, value: str, *, is_delayed: bool = False
    ) -> bool:
        tag = tag_of(value)
        properties = f"TAGS\1{tag}\2tag\1{tag}\2"
        properties += f"DELAY\1{DELAY_LEVEL}\2" if is_delayed else ""
        send = Send(value, None if is_delayed else (queue.topic, queue.queue_id), time.monotonic())
        send.attempts_max = 99 if is_delayed else 1
        with self._lock:
            self.history.sends.append(send)
        outgoing = Outgoing(queue.topic, value.encode(), properties, "", 0, 0, wait_store_ok=True)
        command = requests.send("histories", queue, outgoing, int(time.time() * 1000))
        try:
            answer = talk.call(target, command)
        except SluiceError:
            return False
        if answer.code != ResponseCode.SUCCESS:
            time.sleep(0.02)
            return False
        if is_delayed:
            self.history.changes.append(Change(f"delivery of {value}", Outcome.OK))
        else:
            offset = requests.number(answer, "queueOffset")
            send.acknowledge((queue.topic, queue.queue_id), offset, time.monotonic())
        return True

    def _read(self) -> None:
        """Each message as soon as it can be seen, from whoever gives it; and where queues end."""
        rng, talk = random.Random(self.rng.random()), Talk(self.cluster)
        offsets = dict.fromkeys(self.queues, 0)
        while not self._is_over:
            queue = rng.choice(self.queues)
            target = (
                self.master if rng.random() < 0.8 else rng.randint(1, len(self.cluster.replicas))
            )
            with contextlib.suppress(SluiceError):
                if rng.random() < 0.3:
                    self._ask_end(talk, target, queue)
                else:
                    offsets[queue] = self._pull(talk, target, queue, offsets[queue])
                    start = rng.randint(0, offsets[queue])
                    self._pull_filtered(talk, target, queue, start, rng.choice(FILTERS))
            time.sleep(0.005)
        talk.close()

    def _pull(self, talk: Talk, target: int, queue: MessageQueue, offset: int) -> int:
        command = requests.pull(
            "histories", queue, offset, subscription=Subscription(queue.topic, "*"), lite=True
        )
        answer = requests.pull_answer(talk.call(target, command), "")
        for message in decode_records(answer.data):
            place = (queue.topic, queue.queue_id)
            value = message.body.decode()
            self.history.seen.append(
                Seen(place, message.queue_offset, value, time.monotonic(), str(target))
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
        answer = requests.pull_answer(talk.call(target, command), "")
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
            place, end = (queue.topic, queue.queue_id), requests.number(answer, "offset")
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
        end_s = time.monotonic() + self.seconds
        time.sleep(self.rng.uniform(0.3, 1.0))
        while time.monotonic() < end_s:
            for_s = self.rng.choice((0.2, 1.0, self.rng.uniform(2, 6)))
            self.story.append(self._fault(for_s))
            time.sleep(for_s)
            if self.rng.random() < 0.7:
                self.cluster.heal()
            time.sleep(self.rng.uniform(0.1, 2.0))

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

    def _leave(self, talk: Talk) -> None:
        """What the master has."""
        history, left = self.history, Left("master")
        wanted = {change.value for change in history.changes}
        end_s = time.monotonic() + 20
        while True:
            values: set[str] = set()
            for queue in self.queues:
                found = left.queues.setdefault((queue.topic, queue.queue_id), {})
                self._read_all(talk, queue, found)
                values.update(found.values())
            answer = requests.expect_success(
                talk.call(self.cluster.master(), requests.request(RequestCode.GET_ALL_TOPIC_CONFIG))
            )
            text = bytes(answer.body).decode()
            topics = {c for c in wanted if c.startswith("topic ") and f'"{c[6:]}"' in text}
            left.changes = frozenset(topics | {f"delivery of {value}" for value in values})
            if wanted <= left.changes or time.monotonic() > end_s:
                break
            time.sleep(0.5)
        history.left.append(left)
        history.terms = self.cluster.terms(self._first_revision)

    def _read_all(self, talk: Talk, queue: MessageQueue, found: dict[int, str]) -> None:
        offset = max(found, default=-1) + 1
        while True:
            command = requests.pull(
                "histories", queue, offset, subscription=Subscription(queue.topic, "*"), lite=True
            )
            answer = requests.pull_answer(talk.call(self.cluster.master(), command), "")
            for message in decode_records(answer.data):
                found[message.queue_offset] = message.body.decode()
                offset = message.queue_offset + 1
            if offset >= answer.offset_max:
                return


def same_logs(cluster: Cluster) -> str:
    """Compares the replicas' logs, of what all of them have; "" when they are equal."""
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
    options = parser.parse_args(arguments)
    if reason := available():
        sys.stdout.write(f"skipped: {reason}\n")
        return 0
    return run_many(options.histories, options.seed, options.replicas, options.seconds)


def run_many(count: int, first: int, replicas: int, seconds: float) -> int:
    """How many were wrong; the first one ends it, and its logs stay."""
    root = Path(tempfile.mkdtemp(prefix="sluicemq-histories-"))
    cluster = Cluster(root, replicas)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # namespaces do not go by themselves
    acknowledged = elections = 0
    try:
        cluster.start()
        for seed in range(first, first + count):
            run = Run(cluster, seed, seconds)
            try:
                wrong = run.run()
            except (TimeoutError, SluiceError) as error:
                wrong = [f"stuck: {error}"]
            wrong += filter(None, [same_logs(cluster) if not wrong else ""])
            sends = [send for send in run.history.sends if send.outcome is Outcome.OK]
            acknowledged += len(sends)
            elections += len({term.epoch for term in run.history.terms}) - 1
            sys.stdout.write(
                f"{seed}: {len(sends)} of {len(run.history.sends)} acknowledged,"
                f" {len(run.history.seen)} seen, {len(run.history.filtered)} filtered pulls,"
                f" {'; '.join(run.story)}\n"
            )
            sys.stdout.flush()
            if wrong:
                sys.stdout.write(f"{seed}: WRONG {wrong[:5]} ({len(wrong)}); logs in {root}\n")
                return 1
        sys.stdout.write(
            f"{count} histories: all went well; {acknowledged} sends acknowledged,"
            f" {elections} elections\n"
        )
        shutil.rmtree(root, ignore_errors=True)
        return 0
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(main())
