"""What RocketMQ 5.x says of the lag of a group with a filter: an estimate, from its metrics.

The real broker does not count. For a group whose consumers are online it samples the consume queue
(`estimateAccumulation`) and multiplies; it tells the result as the gauge
`rocketmq_consumer_lag_messages`. Here a consumer announces itself with a filter, is said to have
consumed nothing, and the gauge is read.
"""

import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.orders import Question
from sluicemq.client.core import requests
from sluicemq.client.sync.admin import Admin
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.bodies import CONSUME_PASSIVELY, ConsumerData, Heartbeat

GAUGE = "rocketmq_consumer_lag_messages"
TRIES = 20
PAUSE_S = 0.5


def settings(port: int) -> dict[str, str]:
    """Of a broker that serves its metrics on a port."""
    return {
        "metricsExporterType": "PROM",
        "metricsPromExporterHost": "127.0.0.1",
        "metricsPromExporterPort": str(port),
    }


@dataclass(frozen=True)
class Estimate:
    """`count`: what the broker says; `truth`: how many match."""

    share: str
    count: int
    truth: int
    ms: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.count - self.truth) / max(self.truth, 1)


def estimated(
    name_server: str, broker: str, port: int, topic: str, questions: list[Question]
) -> list[Estimate]:
    """One for each question, each of a group of its own; `ms` is what reading all metrics takes."""
    with ExitStack() as stack:
        admin = stack.enter_context(Admin(name_server))
        groups = {f"Estimate{number}": question for number, question in enumerate(questions)}
        for group, question in groups.items():
            _announce(admin, broker, topic, group, question)
        found, ms = _read(port, set(groups))
    return [
        Estimate(question.share, found[group], question.count, ms)
        for group, question in groups.items()
    ]


def _announce(admin: Admin, broker: str, topic: str, group: str, question: Question) -> None:
    wanted = parse_subscription(topic, question.expression, question.kind)
    consumer = ConsumerData(group, CONSUME_PASSIVELY, subscriptions=(wanted,))
    admin.call(broker, requests.heartbeat(Heartbeat(f"{group}@bench", consumers=(consumer,))))
    for queue in admin.queues(topic):
        place = MessageQueue(topic, queue.broker, queue.queue_id)
        admin.call(broker, requests.commit_offset(group, place, 0))


def _read(port: int, groups: set[str]) -> tuple[dict[str, int], float]:
    """The gauge by group, and how long it took to be told. Raises RuntimeError when it is not."""
    for _ in range(TRIES):
        begin_s = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        ms = (time.perf_counter() - begin_s) * 1000
        found = {
            sample.labels["consumer_group"]: int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == GAUGE and sample.labels["consumer_group"] in groups
        }
        if groups <= set(found):
            return found, ms
        time.sleep(PAUSE_S)
    raise RuntimeError(f"the broker's metrics do not tell {GAUGE} of {groups - set(found)}")
