"""What real brokers 5.3.3 and 5.5.0 answered to those who pop, asked of ours.

The scenarios `pop53-*` and `pop55-*` are complete: they make their topics, groups and messages
(tests/compatibility/record_pop.py). Each request is asked of our broker as long after the one
before as it was, with the times and revive queues that our own answers named instead of theirs.
Compared are codes, remarks, the names and values of header fields, messages, and what lies in the
timer's queue. Not compared is what is chosen by chance (revive queues, with which queue a pop of
all begins), what says when something happened, sentences of Java exceptions, and where a checkpoint
begins: theirs do where the look at the queue began, ours with the first message that the filter
took; how far the messages are from there follows.
"""

import base64
import dataclasses
import functools
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from simulation.stepped import SMALL, ManualClock, SteppedBroker, SteppedClient
from sluicemq.config import BrokerConfig
from sluicemq.record.codec import decode_records
from sluicemq.wire import tables
from sluicemq.wire.frames import Command, decode, encode
from sluicemq.wire.popping import ReceiptHandle

TRAFFIC = Path(__file__).parent / "traffic" / "pop"
DOCUMENTS = sorted(TRAFFIC.glob("*.json"))
SCENARIOS = sorted(path.name for path in TRAFFIC.glob("*.jsonl.gz"))
POP, ACK, PEEK, CHANGE, BATCH_ACK, PULL, OFFSET, CREATE_GROUP, SHARE, SHOW_MODES = (
    200050, 200051, 200052, 200053, 200151, 11, 14, 200, 400, 402,
)  # fmt: skip
OF_THE_MESSAGES = {POP, ACK, CHANGE}
"""Of a real consumer: which messages meet in one pop depends on how threads of the broker ran."""
ORDERED = "999"
PATIENCE_S = 30.0
TIMER = "rmq_sys_wheel_timer"
TIMES = {"popTime", "reviveQid", "msgId", "version"}
PLACES = {"nextBeginOffset", "maxOffset", "minOffset"}
MASKED = {"1ST_POP_TIME", "TIMER_OUT_MS", "TIMER_DELIVER_MS", "MSG_REGION"}
LEFT_OUT = {"SLUICE_NEXT", "ORIGIN_GROUP"}
"""What only our checkpoints, and retries of 5.5.0, have."""

Record = dict[str, Any]


@functools.cache
def records(name: str) -> list[Record]:
    with gzip.open(TRAFFIC / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def frame_of(record: Record) -> bytes:
    return base64.b64decode(record["frame_b64"])


def command_of(record: Record) -> Command:
    return decode(frame_of(record)[4:])


def began_ms(name: str) -> int:
    """When the scenario began: requests tell their time."""
    for record in records(name):
        fields = record["header"].get("extFields") or {}
        time_ms = int(fields.get("g") or fields.get("bornTime") or 0)
        if time_ms:
            return time_ms - int(record["t_ms"])
    return 1_795_300_000_000


class Replay:
    """Our broker, asked what another one was asked."""

    def __init__(self, name: str) -> None:
        self.broker = SteppedBroker(
            config=BrokerConfig(broker_name="broker-g", metrics_enable=False),
            store_config=dataclasses.replace(SMALL, flush_sync=True),
            clock=ManualClock(began_ms(name)),
        )
        self._began_ms, self._at_ms = began_ms(name), 0
        self._clients: dict[int, SteppedClient] = {}
        self._ours: dict[tuple[str, ...], list[str]] = {}
        """(pop time, invisible time, revive queue) of theirs -> ours."""

    def ask(self, record: Record) -> Command:
        request = command_of(record)
        pause_ms, self._at_ms = max(record["t_ms"] - self._at_ms, 1), record["t_ms"]
        self.broker.run(pause_ms // 100 / 10, 0.1)
        self.broker.run(pause_ms % 100 / 1000, 0.001)
        self._translate(request)
        number = record["conn"]
        if number not in self._clients:
            self._clients[number] = self.broker.connect()
        self._clients[number].feed_bytes(encode(request))
        self.broker.settle()
        return request

    def answer(self, record: Record, request: Command) -> Command | None:
        """Ours; a long poll is given its time."""
        answers = self._clients[record["conn"]].answers
        self._at_ms = record["t_ms"]
        for _ in range(round(PATIENCE_S / 0.1)):
            if request.opaque in answers:
                break
            self.broker.run(0.1, 0.1)
        ours, theirs = answers.get(request.opaque), command_of(record)
        if ours is not None and request.code in (POP, CHANGE):
            key, value = stamp(theirs.fields), stamp(ours.fields)
            if all(key) and all(value):
                self._ours[key] = list(value)
        return ours

    def _translate(self, request: Command) -> None:
        fields = request.fields or {}
        if int(fields.get("bornTime", 0)):
            late_ms = self._began_ms + self._at_ms - self.broker.clock.now_ms()
            fields["bornTime"] = str(int(fields["bornTime"]) - late_ms)
        words = fields.get("extraInfo", "").split(" ")
        if tuple(words[1:4]) in self._ours:
            words[1:4] = self._ours[tuple(words[1:4])]
            fields["extraInfo"] = " ".join(words)
        if request.code == BATCH_ACK and request.body:
            body = json.loads(request.body)
            for row in body["acks"]:
                theirs = str(row["pt"]), str(row["it"]), str(row["rq"])
                row["pt"], row["it"], row["rq"] = map(int, self._ours.get(theirs, theirs))
            request.body = json.dumps(body).encode()


def stamp(fields: Mapping[str, str] | None) -> tuple[str, ...]:
    given = fields or {}
    return tuple(given.get(name, "") for name in ("popTime", "invisibleTime", "reviveQid"))


# ---------------------------------------------------------------------------- what is compared


def seen(request: Command, answer: Command, groups: set[str]) -> dict[str, Any]:
    """What of an answer does not depend on moment and chance."""
    body: Any = bytes(answer.body)
    if request.code in (POP, PEEK, PULL):
        found = (message_of(message) for message in decode_records(body))
        rows = {str(row): row for row in found if row["group"] in groups}
        body = [row for _, row in sorted(rows.items())]  # theirs acknowledge again what is done
    elif request.code in (SHARE, SHOW_MODES):
        body = json.loads(body)
        body.get("messageQueueAssignments", []).sort(key=str)
    else:
        body = None
    remark = re.sub(r"(, )?/?127\.0\.0\.\d:\d+", "", answer.remark or "")
    fields = None if answer.fields is None else dict(masked_fields(request, answer.fields))
    return {"code": answer.code, "remark": remark, "fields": fields, "body": body}


def masked_fields(request: Command, fields: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    is_ordered = fields.get("reviveQid") == ORDERED
    for name, value in fields.items():
        if name == "startOffsetInfo":
            yield name, sorted(part.rpartition(" ")[0] for part in value.split(";"))
        elif name in ("msgOffsetInfo", "orderCountInfo"):
            yield name, sorted(value.split(";"))
        elif name == "invisibleTime" and request.code == CHANGE and is_ordered:
            yield name, round(int(value), -3)
        elif name in TIMES or (request.code == PULL and name in PLACES):
            yield name, "" if value != ORDERED else value
        else:
            yield name, value


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_handle_that_the_proxy_makes_is_the_one_that_the_real_broker_wrote(name: str) -> None:
    """The proxy trusts no property of a message; the header of the answer says the same."""
    decode_popped = pytest.importorskip("sluicemq.proxy.receiving").decode_popped
    for record in records(name):
        command = command_of(record)
        if "msgOffsetInfo" not in (command.fields or {}) or not command.body:
            continue
        for popped in decode_popped(command, "broker-g"):
            written = popped.stored.properties.get("POP_CK")
            assert written is None or popped.handle._replace(
                physical_offset=-1
            ) == ReceiptHandle.parse(written)


def message_of(message: Any) -> dict[str, Any]:
    """`group`: whose record it is, None of a message that is not the broker's own."""
    properties = {
        name: "" if name in MASKED else value
        for name, value in message.properties.items()
        if name not in LEFT_OUT
    }
    if "POP_CK" in properties:
        words = properties["POP_CK"].split(" ")
        properties["POP_CK"] = " ".join([words[2], *words[4:]])
    body, offset, group = bytes(message.body), message.queue_offset, None
    record: dict[str, Any] = {}
    if message.topic == TIMER:
        record = json.loads(body)
        record.pop("sp", None)
        record |= {"pt": 0, "reviveTime": 0}
        if "d" in record:
            record["d"] = [record["so"] + far for far in record["d"]]
            record["so"] = 0
        body, offset, group = b"", 0, record["c"]
        words = properties.pop("UNIQ_KEY").split("@")
        properties |= {"UNIQ_KEY": "@".join(words[:4] + words[5:]), "REAL_QID": ""}
    return {
        "topic": message.topic, "queue": message.queue_id, "offset": offset, "body": body,
        "record": record, "reconsumed": message.reconsume_times, "properties": properties,
        "group": group,
    }  # fmt: skip


def names_of(answer: Command) -> set[str]:
    return {*(answer.fields or {})}


def difference(
    request: Command, ours: Command | None, theirs: Command, groups: set[str]
) -> str | None:
    if ours is None:
        return "no answer"
    if (request.code, theirs.code, ours.fields) == (14, 22, {"offset": "0"}):
        return None  # an empty queue: ours names its end (`QueryHandlers.query_committed_offset`)
    one, other = seen(request, ours, groups), seen(request, theirs, groups)
    if other["remark"].startswith(("java.", "parse the consumer's subscription failed")):
        one["remark"] = other["remark"]
    if request.code == OFFSET and int(one["fields"].get("offset", 0)) > int(
        other["fields"].get("offset", 0)
    ):
        return None  # theirs moves a moment later
    names = [name for name in one if one[name] != other[name]]
    return "; ".join(f"{name} {other[name]} became {one[name]}" for name in names) or None


@pytest.mark.parametrize("name", SCENARIOS)
def test_those_who_pop_are_answered_as_recorded(name: str) -> None:
    replay, groups = Replay(name), {None}
    requests: dict[int, Command] = {}
    differences = []
    for record in records(name):
        if not record["peer"].endswith("→broker"):
            continue
        if record["dir"] == ">":
            request = requests[record["n"]] = replay.ask(record)
            if request.code == CREATE_GROUP:
                groups.add(json.loads(request.body)["groupName"])
        elif record.get("re") in requests:
            request = requests[record["re"]]
            ours, theirs = replay.answer(record, request), command_of(record)
            if "push" in name and request.code in OF_THE_MESSAGES:
                assert ours is not None
                assert ours.code != theirs.code or names_of(ours) == names_of(theirs)
                continue
            if found := difference(request, ours, theirs, groups):
                fields = request.fields or bytes(request.body)
                differences.append(f"frame {record['n']}, {request.code} {fields}: {found}")
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_they_write_is_read_and_written_again(path: Path) -> None:
    """To the byte as 5.3 writes it; 5.5 has another layout, and reads that of 5.3."""
    text, is_newer = path.read_text(), path.name.startswith("55-")
    if "consumerOrderInfo" in path.name:
        table = tables.decode_order_file(text)
        infos = [info for queues in table.values() for info in queues.values()]
        assert any(info.counts for info in infos)
        assert any(info.visible_ms for info in infos)
        written = tables.encode_order_file(table)
        assert tables.decode_order_file(written) == table
    else:
        modes = tables.decode_request_modes(text)
        written = tables.encode_request_modes_file(modes)
        assert tables.decode_request_modes(written) == modes
    assert written == text or is_newer
