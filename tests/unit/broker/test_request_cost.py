"""What each kind of request costs the loop: CPU time that grows as the request does, in pieces of a
few milliseconds.

Of each family requests of growing size are made, and what they cost is measured in CPU time of this
thread (`metered`, `cost`). A family that grows faster than its size, or holds the loop for long,
would let one client keep all others waiting.
"""

import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson
import pytest

from cost import FACTOR, STEEPEST
from metered import MeteredBroker, Pieces
from simulation.stepped import send_fields
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.table import TABLE
from sluicemq.config import BrokerConfig
from sluicemq.net.limits import BODY_BYTES_MAX
from sluicemq.record.codec import encode_batch
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import wire_names
from sluicemq.wire.frames import Command

pytestmark = pytest.mark.slow

Values = dict[str, Any]
Request = tuple[int, dict[str, str], bytes]
SMALL: Final = 120
LONGEST_MS: Final = 60.0
"""Of a piece. On a quick machine the longest takes 12 ms."""
FLOOR_S: Final = 0.001


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Writing the log is not what is measured."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# ------------------------------------------------------------------------------ the families


def subscription(topic: str, text: str = "*", kind: str = "TAG", **more: Any) -> Values:
    return {"topic": topic, "subString": text, "expressionType": kind, "subVersion": 1, **more}


def heartbeat(groups: dict[str, list[Values]], producers: list[str] | None = None) -> Request:
    consumers = [{"groupName": g, "subscriptionDataSet": said} for g, said in groups.items()]
    names = [{"groupName": name} for name in producers or ()]
    body = {"clientID": "c", "producerDataSet": names, "consumerDataSet": consumers}
    return Code.HEART_BEAT, {}, orjson.dumps(body)


def lock(queues: list[Any], code: int = Code.LOCK_BATCH_MQ) -> Request:
    return code, {}, orjson.dumps({"consumerGroup": "g", "clientId": "c", "mqSet": queues})


def queue(number: int) -> Values:
    return {"topic": "T", "brokerName": "broker-a", "queueId": number}


def check(**wanted: Any) -> Request:
    body = {"clientId": "c", "group": "g", "subscriptionData": subscription("T", **wanted)}
    return Code.CHECK_CLIENT_CONFIG, {}, orjson.dumps(body)


def topic_config(number: int) -> Values:
    return {"topicName": f"t{number}", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6,
            "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False}  # fmt: skip


def create(topic: str, attributes: str) -> Request:
    fields = {"topic": topic, "defaultTopic": "x", "readQueueNums": "1", "writeQueueNums": "1",
              "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
              "attributes": attributes}  # fmt: skip
    return Code.UPDATE_AND_CREATE_TOPIC, fields, b""


def send(properties: str) -> Request:
    fields = {name: str(value) for name, value in send_fields(properties=properties).items()}
    return Code.SEND_MESSAGE_V2, fields, b"x"


def batch(count: int, *, is_odd: bool = False) -> Request:
    """`is_odd`: the last message has a property that has to be looked at closely."""
    fields = {name: str(value) for name, value in send_fields(m="true", i="").items()}
    body = struct.pack(">iiiiih", 22, 0, 0, 0, 0, 0) * (count - is_odd)
    if is_odd:
        body += encode_batch([(0, b"", b"DELAY\x010\x02")])
    return Code.SEND_BATCH_MESSAGE, fields, body


def pull(expression: str, kind: str = "TAG") -> Request:
    fields = {"consumerGroup": "G", "topic": "T", "queueId": "0", "queueOffset": "0",
              "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0", "subVersion": "0",
              "suspendTimeoutMillis": "0", "subscription": expression,
              "expressionType": kind}  # fmt: skip
    return Code.PULL_MESSAGE, fields, b""


def acknowledgement() -> Values:
    return {"c": "g", "t": "T", "r": "0", "so": 0, "pt": 1, "it": 1, "rq": 0, "q": 0, "b": "AQ=="}


def staged(number: int) -> Values:
    return {"brokerName": "broker-a", "queueId": number, "offset": number, "count": 1,
            "checksum": 1, "partition": 0, "attempt": 0}  # fmt: skip


def json(code: int, **values: Any) -> Request:
    return code, {}, orjson.dumps(values)


FAMILIES: Final[dict[str, Callable[[int], Request]]] = {
    "heartbeat: groups": lambda n: heartbeat({f"g{i}": [subscription("T")] for i in range(n)}),
    "heartbeat: topics": lambda n: heartbeat({"g": [subscription(f"t{i}") for i in range(n)]}),
    "heartbeat: tags": lambda n: heartbeat(
        {"g": [subscription("T", "||".join(f"tag{i}" for i in range(n)))]}
    ),
    "heartbeat: a long tag": lambda n: heartbeat({"g": [subscription("T", "x" * n)]}),
    "heartbeat: codes": lambda n: heartbeat({"g": [subscription("T", codeSet=[*range(n)])]}),
    "heartbeat: producers": lambda n: heartbeat({}, [f"p{i}" for i in range(n)]),
    "heartbeat: SQL92": lambda n: heartbeat(
        {f"g{i}": [subscription("T", f"a{i} > {i}", "SQL92")] for i in range(n)}
    ),
    "heartbeat: a long SQL92 expression": lambda n: heartbeat(
        {"g": [subscription("T", " OR ".join(f"a{i} > 1" for i in range(n)), "SQL92")]}
    ),
    "lock": lambda n: lock([queue(i) for i in range(n)]),
    "lock: texts": lambda n: lock([orjson.dumps(queue(i)).decode() for i in range(n)]),
    "unlock": lambda n: lock([queue(i) for i in range(n)], Code.UNLOCK_BATCH_MQ),
    "check: tags": lambda n: check(text="||".join(f"tag{i}" for i in range(n))),
    "check: codes": lambda n: check(codeSet=[*range(n)]),
    "topics": lambda n: json(
        Code.UPDATE_AND_CREATE_TOPIC_LIST, topicConfigList=[topic_config(i) for i in range(n)]
    ),
    "groups": lambda n: json(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        groupConfigList=[{"groupName": f"g{i}"} for i in range(n)],
    ),
    "a group's attributes": lambda n: json(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        groupName="g", attributes={f"+a{i}": "x" for i in range(n)},
    ),
    "a topic's attributes": lambda n: create("TA", ",".join(f"+a{i}=b" for i in range(n))),
    "settings": lambda n: (
        Code.UPDATE_BROKER_CONFIG, {}, "\n".join(f"k{i}=v" for i in range(n)).encode()
    ),
    "settings: a long key": lambda n: (Code.UPDATE_BROKER_CONFIG, {}, b"k" * n + b"=v"),
    "settings: the same one": lambda n: (
        Code.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=72\n" * n
    ),
    "acknowledgements": lambda n: json(
        Code.BATCH_ACK_MESSAGE, brokerName="broker-a", acks=[acknowledgement()] * n
    ),
    "staged ranges": lambda n: (
        Code.SLUICE_COMMIT_EPOCH, {"query": "q", "epoch": "1", "step": "commit"},
        orjson.dumps({"ranges": [staged(i) for i in range(n)]}),
    ),
    "batch": batch,
    "batch: one message is odd": lambda n: batch(n, is_odd=True),
    "send: properties": lambda n: send("".join(f"k{i}\x01v\x02" for i in range(n))),
    "send: keys": lambda n: send("KEYS\x01" + " ".join(f"k{i}" for i in range(n)) + "\x02"),
    "send: a long tag": lambda n: send("TAGS\x01" + "x" * n + "\x02"),
    "pull: tags": lambda n: pull("||".join(f"tag{i}" for i in range(n))),
    "pull: SQL92": lambda n: pull(" OR ".join(f"a{i} > 1" for i in range(n)), "SQL92"),
    "assignment": lambda n: json(
        Code.QUERY_ASSIGNMENT,
        topic="T", consumerGroup="g", clientId="c", strategyName="AVG", more=["a"] * n,
    ),
    "header fields": lambda n: (Code.GET_MAX_OFFSET, {f"f{i}": "x" for i in range(n)}, b""),
}  # fmt: skip


def cost(request: Request) -> Pieces:
    """What a request costs a broker of its own."""
    code, fields, body = request
    config = BrokerConfig(broker_name="broker-a", metrics_enable=False, enable_property_filter=True)
    broker = MeteredBroker(config)
    broker.ask(Command(Code.SEND_MESSAGE_V2, send("UNIQ_KEY\x01A\x02")[1], b"x", 1))
    return broker.ask(Command(code, fields, body, 2))[0]


def least(request: Request, rounds: int) -> tuple[float, float]:
    """Total CPU seconds and the longest piece in ms, each the least of several measurements."""
    found = [cost(request) for _ in range(rounds)]
    return min(it.total_s for it in found), min(it.longest_ms for it in found)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_request_costs_as_much_as_it_is_long_in_pieces_of_milliseconds(
    make: Callable[[int], Request],
) -> None:
    """A measurement that fails is repeated: what else the machine does makes it dearer at times,
    never cheaper."""
    ratio = longest_ms = 0.0
    for rounds in (1, 4):
        little_s, _ = least(make(SMALL), rounds)
        much_s, longest_ms = least(make(FACTOR * SMALL), rounds)
        ratio = much_s / max(little_s, FLOOR_S)
        if ratio <= STEEPEST and longest_ms < LONGEST_MS:
            break
    assert ratio <= STEEPEST, f"{FACTOR} times the size takes {ratio:.1f} times the CPU time"
    assert longest_ms < LONGEST_MS


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
def test_the_largest_request_holds_the_loop_for_milliseconds(
    make: Callable[[int], Request],
) -> None:
    """The largest that fits, or half of it at least. Beyond the limits of its kind it is refused,
    which has to be cheap too."""
    count = 2 * FACTOR * SMALL
    while len(make(2 * count)[2]) < BODY_BYTES_MAX and count < 16 * FACTOR * SMALL:
        count *= 2
    longest_ms = 0.0
    for rounds in (1, 3):
        _, longest_ms = least(make(count), rounds)
        if longest_ms < LONGEST_MS:
            break
    assert longest_ms < LONGEST_MS


def test_no_request_code_costs_more_than_its_fields_are_long() -> None:
    """Each code once, its header's fields filled, with a body of the same size."""
    totals: dict[int, list[float]] = {}
    for size in (500, FACTOR * 500):
        broker = MeteredBroker()
        for code, row in TABLE.items():
            names = wire_names(row.header) if row.header is not None else ("topic", "group")
            body = orjson.dumps({"x" * 20: ["y"] * (size // 4), "topic": "x" * size})
            command = Command(code, dict.fromkeys(names, "x" * size), body, int(code))
            pieces, _ = broker.ask(command)
            totals.setdefault(int(code), []).append(pieces.total_s)
            assert pieces.longest_ms < LONGEST_MS, code
    steep = {
        code: much / max(little, FLOOR_S)
        for code, (little, much) in totals.items()
        if much / max(little, FLOOR_S) > STEEPEST
    }
    assert not steep
    assert len(totals) == len(TABLE)


def test_a_handler_that_looks_at_all_of_them_for_each_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measure itself: a planted quadratic loop is seen."""
    lock_queues = QueueLocks.lock

    def slow(self: QueueLocks, group: str, client_id: str, queues: Any) -> Any:
        for each in queues:
            assert sum(each == other for _ in range(20) for other in queues) == 20
        return lock_queues(self, group, client_id, queues)

    monkeypatch.setattr(QueueLocks, "lock", slow)
    little_s, _ = least(FAMILIES["lock"](60), 1)
    much_s, _ = least(FAMILIES["lock"](480), 1)
    assert much_s / max(little_s, FLOOR_S) > STEEPEST
