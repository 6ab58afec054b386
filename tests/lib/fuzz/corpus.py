"""Templates of requests: recorded ones, as `tests/golden/traffic` has them, or a few built in."""

import base64
import gzip
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from simulation.stepped import pull_fields, send_fields
from sluicemq.errors import ConfigurationError
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import decode

OF_A_KIND_MAX: Final = 8
"""Recorded requests with the same code and the same fields."""
LEFT_OUT: Final = frozenset({RequestCode.UPDATE_BROKER_CONFIG})
"""It does what it says: a broker that was told to refuse sends would fail the bystander."""


class Template(NamedTuple):
    """A request to begin with."""

    code: int
    fields: dict[str, str]
    body: bytes


def load(directory: Path | None) -> tuple[Template, ...]:
    """The requests to brokers in a directory of recordings; without one, the built-in ones.

    Raises ConfigurationError when there are no recordings.
    """
    if directory is None:
        return tuple(_built_in())
    seen: Counter[tuple[int, tuple[str, ...]]] = Counter()
    found = list(_built_in())
    for path in sorted(directory.glob("*.jsonl.gz")):
        for template in _recorded(path):
            kind = (template.code, tuple(template.fields))
            seen[kind] += 1
            if seen[kind] <= OF_A_KIND_MAX and template.code not in LEFT_OUT:
                found.append(template)
    if not seen:
        raise ConfigurationError(
            f"There are no recordings (*.jsonl.gz) in {directory}.",
            fix="Name another directory, or leave the option out.",
        )
    return tuple(found)


def _recorded(path: Path) -> Iterator[Template]:
    with gzip.open(path, "rb") as lines:
        for line in lines:
            record: dict[str, Any] = orjson.loads(line)
            if record["dir"] == ">" and record["peer"].endswith("broker"):
                command = decode(base64.b64decode(record["frame_b64"])[4:])
                if not command.is_response:
                    yield Template(command.code, command.fields or {}, bytes(command.body))


def _built_in() -> Iterator[Template]:
    def texts(fields: dict[str, object]) -> dict[str, str]:
        return {name: str(value) for name, value in fields.items()}

    body = orjson.dumps({"clientID": "c", "producerDataSet": [{"groupName": "P"}]})
    queue = {"topic": "T", "brokerName": "broker-a", "queueId": 0}
    locks = orjson.dumps({"consumerGroup": "G", "clientId": "c", "mqSet": [queue]})
    yield Template(RequestCode.SEND_MESSAGE_V2, texts(send_fields()), b"hello")
    yield Template(RequestCode.PULL_MESSAGE, texts(pull_fields()), b"")
    yield Template(RequestCode.HEART_BEAT, {}, body)
    yield Template(RequestCode.LOCK_BATCH_MQ, {}, locks)
    place = {"consumerGroup": "G", "topic": "T", "queueId": "0"}
    yield Template(RequestCode.QUERY_CONSUMER_OFFSET, place, b"")
    yield Template(RequestCode.UPDATE_CONSUMER_OFFSET, place | {"commitOffset": "7"}, b"")
