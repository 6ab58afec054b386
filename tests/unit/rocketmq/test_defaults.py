"""The defaults of the classes with RocketMQ's names, beside those of the real client.

`tests/golden/java_defaults/client-5.5.0.txt`, written by `Defaults.java` beside it, has a line for
each plain field of a new object of the real classes: class, field, value.
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from sluicemq import rocketmq

RECORDED = Path(__file__).parents[2] / "golden" / "java_defaults" / "client-5.5.0.txt"
OTHER_NAMES = {("DefaultMQPushConsumer", "consume_max_span"): "consumeConcurrentlyMaxSpan"}
"""Attributes whose field has another name than theirs in Java."""
DIFFERENT = {
    ("DefaultMQProducer", "send_msg_timeout"): (10_000, "3000"),
    ("DefaultMQProducer", "retry_times_when_send_async_failed"): (0, "2"),
    ("DefaultMQPushConsumer", "consume_thread_min"): (None, "20"),
}
"""Ours and Java's, where ours is another one on purpose. Consumers promise Java's values, so they
have no line here but for settings without effect."""


def java_defaults() -> dict[tuple[str, str], str]:
    found = {}
    for line in RECORDED.read_text().splitlines():
        kind, field, value = line.split(" ", 2) if line.count(" ") > 1 else (*line.split(" "), "")
        found.setdefault((kind, field), value)  # a class before the classes that it extends
    return found


JAVA = java_defaults()
KINDS = sorted({kind for kind, _ in JAVA})


def field_of(kind: str, name: str) -> str:
    camel = re.sub(r"_(\w)", lambda found: found[1].upper(), name)
    return OTHER_NAMES.get((kind, name), camel)


def text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def shared() -> list[tuple[str, str]]:
    """Return the attributes that Java's class has as a plain field too."""
    found = []
    for kind in KINDS:
        made = getattr(rocketmq, kind)
        for name in dir(made):
            value = getattr(made, name)
            is_plain = value is None or isinstance(value, bool | int | str | Enum)
            if not name.startswith("_") and is_plain and (kind, field_of(kind, name)) in JAVA:
                found.append((kind, name))
    return found


@pytest.mark.parametrize(("kind", "name"), shared())
def test_a_default_is_java_s(kind: str, name: str) -> None:
    ours, java = getattr(getattr(rocketmq, kind), name), JAVA[kind, field_of(kind, name)]
    if (kind, name) in DIFFERENT:
        assert DIFFERENT[kind, name] == (ours, java)
    else:
        assert text(ours).replace("None", "null") == java


def test_most_settings_are_compared() -> None:
    compared = shared()
    for kind, count in {
        "DefaultMQProducer": 5, "DefaultMQPushConsumer": 14, "DefaultLitePullConsumer": 10,
        "DefaultMQPullConsumer": 2,
    }.items():  # fmt: skip
        assert sum(one == kind for one, _ in compared) >= count, (kind, compared)
    assert ("DefaultLitePullConsumer", "pull_batch_size") in compared


def test_an_explicit_batch_size_stays() -> None:
    consumer = rocketmq.DefaultLitePullConsumer("g")
    consumer.set_pull_batch_size(32)
    assert consumer.get_pull_batch_size() == 32
