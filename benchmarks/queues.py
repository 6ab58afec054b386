"""Many queues with few descriptors: serving all of them, and starting again.

    python -m benchmarks.queues [--topics N] [--queues N] [--descriptors N]

The limit of open files is set soft and hard, so the broker cannot raise it. Each queue gets a
message and is pulled from twice over, then the broker is stopped in order and started; killed when
every queue has just got a message more (the whole tail is recovered), and killed again.
"""

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import frames, load, measure
from benchmarks.stores import Running, ours
from sluicemq.model.topic import DataVersion, TopicConfig
from sluicemq.wire import tables

WINDOW = 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queues")
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--queues", type=int, default=4, help="of each topic")
    parser.add_argument("--descriptors", type=int, default=1024)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.descriptors,) * 2)
    keys = [(f"T{t:05d}", q) for t in range(options.topics) for q in range(options.queues)]
    print(f"{len(keys)} queues, {options.descriptors} descriptors", flush=True)
    with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as name:
        directory = Path(name)
        write_topics(directory / "store", options.topics, options.queues)
        start = ours(directory, defaultTopicQueueNums="4")
        with served("first start", start) as broker:
            timed("send to every queue", broker, lambda: send(broker.address, keys))
            timed("pull from every queue", broker, lambda: pull(broker.address, keys, 1))
            time.sleep(3)  # what is written goes to the files
            timed("again, from the files", broker, lambda: pull(broker.address, keys, 1))
            timed("send again", broker, lambda: send(broker.address, keys))
        with served("start after a stop", start) as broker:
            timed("pull", broker, lambda: pull(broker.address, keys, 2))
            send(broker.address, keys)
            measure.kill(broker.pid)
        with served("start after a kill, all in the tail", start) as broker:
            timed("pull", broker, lambda: pull(broker.address, keys, 3))
            time.sleep(12)  # a checkpoint
            send(broker.address, keys[:100])
            measure.kill(broker.pid)
        with served("start after a kill, 100 in the tail", start) as broker:
            timed("pull", broker, lambda: pull(broker.address, keys[100:], 3))
            measure.kill(broker.pid)
        with served("and once more", start):
            pass
    return 0


def write_topics(root: Path, topics: int, queues: int) -> None:
    """The table as an earlier broker has left it."""
    names = [f"T{number:05d}" for number in range(topics)]
    table = tables.TopicTable(
        {name: TopicConfig(name, queues, queues, 6) for name in names}, DataVersion(1, 1, 0)
    )
    (root / "config").mkdir(parents=True)
    (root / "config/topics.json").write_text(tables.encode_topic_table_file(table))


@contextlib.contextmanager
def served(
    name: str, start: Callable[[], contextlib.AbstractContextManager[Running]]
) -> Iterator[Running]:
    with start() as broker:
        used = f"{measure.cpu_s(broker.pid):.2f} s CPU, {memory(broker)}"
        print(f"{name:36} {broker.ready_s:6.2f} s, {used}", flush=True)
        yield broker


def timed(name: str, broker: Running, work: Callable[[], int]) -> None:
    cost = measure.timed(broker.pid, work)
    print(
        f"    {name:32} {cost.seconds:6.2f} s, {cost.cpu_us:.0f} us each, {memory(broker)}",
        flush=True,
    )


def memory(broker: Running) -> str:
    held = len(list(Path(f"/proc/{broker.pid}/fd").iterdir()))
    anonymous, resident = measure.own_mib(broker.pid), measure.rss_mib(broker.pid)
    return f"{anonymous:.0f} MiB anonymous, {resident:.0f} MiB resident, {held} descriptors"


def send(address: str, keys: list[tuple[str, int]]) -> int:
    return ask(address, [frames.marked_send(topic, queue, b"") for topic, queue in keys], b"")


def pull(address: str, keys: list[tuple[str, int]], count: int) -> int:
    last = count - 1
    found = f'"nextBeginOffset":"{count}"'.encode()
    return ask(address, [frames.pull(t, q, last, frames.OPAQUE_FIRST) for t, q in keys], found)


def ask(address: str, requests: list[bytes], text: bytes) -> int:
    """Each is answered with success, and with `text` in the header."""
    done = sent = 0
    with contextlib.closing(load.Connection(address)) as connection:
        while done < len(requests):
            more = requests[sent : done + WINDOW]
            connection.socket.sendall(b"".join(more))
            sent += len(more)
            for answer in connection.answers():
                header, _ = load.header_and_body(answer)
                if load.code_of(header) != load.FOUND or text not in header:
                    raise RuntimeError(header.decode())
                done += 1
    return done


if __name__ == "__main__":
    sys.exit(main())
