"""The official gRPC client for Python (rocketmq-python-client 5.1.2), measured for clients.py.

    official_client.py ENDPOINT SECONDS COUNT SERVER_PID…

Prints a JSON line a case, with the fields of `clients.Figure`. It has no asyncio interface: its own
`send_async` returns futures, its push consumer calls a listener on threads.
"""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rocketmq import (  # type: ignore[import-not-found]
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
)

from benchmarks import measure

TOPIC, GROUP, BODY = "BenchOfficial", "bench-official", b"x" * 128
IN_FLIGHT = 256
HEAT_S = 15.0  # until the compilers of broker and proxy are done
DRAIN_TIMEOUT_S = 90


def main() -> None:
    endpoint, seconds, count, *pids = sys.argv[1:]
    configuration = ClientConfiguration(endpoint, Credentials("", ""))
    server_pids = [int(pid) for pid in pids]
    producer = Producer(configuration, (TOPIC,))
    producer.startup()
    send_for(producer, HEAT_S)
    sent = figure(
        "send_async, 256 in flight", server_pids, lambda: send_for(producer, float(seconds))
    )
    print(json.dumps(sent), flush=True)
    print(json.dumps(drain(configuration, server_pids, int(count))), flush=True)
    sys.stdout.flush()


def figure(name: str, pids: list[int], work: Callable[[], int]) -> dict[str, Any]:
    wall, cpu, server = time.perf_counter(), time.process_time(), sum(map(measure.cpu_s, pids))
    count = work()
    return {
        "name": f"rocketmq-python-client 5.1.2: {name}",
        "per_second": count / (time.perf_counter() - wall),
        "client_us": (time.process_time() - cpu) / count * 1e6,
        "server_us": (sum(map(measure.cpu_s, pids)) - server) / count * 1e6,
    }


def message() -> Any:
    made = Message()
    made.topic, made.body = TOPIC, BODY
    return made


def send_for(producer: Any, seconds: float) -> int:
    """Sends with a window of futures; the oldest is awaited first."""
    end, sent = time.perf_counter() + seconds, 0
    open_: deque[Future[Any]] = deque()
    while time.perf_counter() < end:
        if len(open_) == IN_FLIGHT:
            open_.popleft().result(30)
        open_.append(producer.send_async(message()))
        sent += 1
    for one in open_:
        one.result(30)
    return sent


class Counting(MessageListener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()

    def consume(self, message: Any) -> Any:
        with self.lock:
            self.count += 1
        return ConsumeResult.SUCCESS


def drain(configuration: Any, pids: list[int], count: int) -> dict[str, Any]:
    """A push consumer gets `count` messages of those that were sent, from its first one on."""
    listener = Counting()
    consumer = PushConsumer(configuration, GROUP, listener, {TOPIC: FilterExpression()})
    consumer.startup()
    end = time.perf_counter() + DRAIN_TIMEOUT_S
    while not listener.count and time.perf_counter() < end:
        time.sleep(0.01)
    before = listener.count

    def work() -> int:
        while listener.count - before < count and time.perf_counter() < end:
            time.sleep(0.02)
        return listener.count - before

    return figure("push", pids, work)


if __name__ == "__main__":
    main()
