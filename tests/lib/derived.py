"""A store in which every kind of derived state is in use, and a ledger of what was promised.

`Workload.round` does a little of everything at a broker: messages with keys, tags and properties,
delay levels, POP, orderly POP, lanes, exactly-once epochs and transactions; each round leaves some
of it undecided. `Workload.missing` looks at a broker that was started later, as its clients would,
and returns what was acknowledged and does not come any more. Messages may come more than once,
but for those of epochs and transactions.
"""

import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from simulation.lanes import ModelConsumer, Shared, read_all
from simulation.popping import Held, Popper
from simulation.pops import POP, ack, handles, pop_fields
from simulation.small_wheel import make_wheel_small
from simulation.stepped import SMALL, SteppedBroker, SteppedClient, send_fields
from sluicemq.filter.subscriptions import TagFilter, compile_sql92, parse_subscription
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.system_names import SCHEDULE_TOPIC, STAGING_TOPIC
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records, encode_batch
from sluicemq.store.columns import blocks, scan
from sluicemq.store.columns import file as columns_file
from sluicemq.wire import bodies as wire_bodies
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.staging import Owner, Stage, StagedRange, encode_staged_ranges

CONFIG: Final = dataclasses.replace(
    SMALL, commit_log_file_bytes=1 << 15, consume_queue_file_bytes=4000, index_slots=50,
    index_entries=200, flush_thorough_interval_ms=1000,
)  # fmt: skip
TOPICS: Final = ("T", "D", "P", "O", "L", "E", "X")
QUEUES: Final = 2
COMMIT_EPOCH, COMMIT, ROLLBACK, CHECK = 900201, 8, 12, 39
EXPRESSION: Final = "n >= 3 AND n <= 5"
LANES: Final = {"one": {"L": (SQL92, "n > 4")}, "two": {"L": (TAG, "a")}}
STEP_S: Final = 4.0
SECONDS: Final = 80.0
"""After this time everything that waits has come: delays, deadlines of pops, checks."""


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files of timers and columns small, so that a few messages fill them."""
    make_wheel_small(monkeypatch)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 16)
    monkeypatch.setattr(blocks, "SLOT_ROWS", 4)
    monkeypatch.setattr(columns_file, "PROOF_ROWS", 4)
    monkeypatch.setattr(scan, "ROWS_MIN", 1)


def messages_of(
    broker: SteppedBroker, topic: str, message_filter: object = None
) -> list[StoredMessage]:
    """Return the messages of all queues of a topic, as pulls with this filter show them."""
    found: list[StoredMessage] = []
    for name, queue_id in sorted(broker.store.queues()):
        if name != topic:
            continue
        offset, end = broker.store.queue_offsets(name, queue_id)
        while offset < end:
            result = broker.store.reader.read(
                name, queue_id, offset, 32, 1 << 24, message_filter  # type: ignore[arg-type]
            )  # fmt: skip
            found += decode_records(b"".join(result.data))
            assert result.next_offset > offset
            offset = result.next_offset
    return found


class Workload:
    """Clients of one store, over all brokers that had it. `name` begins each body."""

    def __init__(self, name: str = "", *, leaves_open: bool = True) -> None:
        """`leaves_open`: one transaction of each round stays undecided."""
        self.name = name
        self._leaves_open = leaves_open
        self.rounds = 0
        self._number = 0
        self.plain: dict[int, tuple[str, int]] = {}
        """By number: tag, value of the property n."""
        self.delayed: set[bytes] = set()
        self.cancelled: set[bytes] = set()
        self.reset_to = 0
        self.popped: set[bytes] = set()
        self.pop_acknowledged: set[bytes] = set()
        self.ordered: set[bytes] = set()
        self.order_acknowledged: set[bytes] = set()
        self.laned: set[bytes] = set()
        self.lane_done: set[bytes] = set()
        self.published: list[bytes] = []
        self.epoch = 0
        self.undecided: list[StagedRange] = []
        self.outcomes: dict[bytes, int] = {}
        """Of transactions: COMMIT, ROLLBACK, 0 while they are open."""
        self.progress = 0
        self._open: list[tuple[bytes, dict[str, object]]] = []
        self._held: list[Held] = []
        self._queue_id = 0

    # --- what clients do

    def body(self) -> bytes:
        self._number += 1
        return f"{self.name}{self._number:05d}".encode()

    def send(
        self, client: SteppedClient, topic: str, **properties: object
    ) -> tuple[bytes, Command]:
        """Send one message to the next queue; return its body and the answer."""
        body = self.body()
        known = {"UNIQ_KEY": f"U{body.decode()}", **properties}
        text = "".join(f"{name}\x01{value}\x02" for name, value in known.items())
        self._queue_id = 1 - self._queue_id
        answer = client.call(310, send_fields(topic, text, e=self._queue_id), body)
        assert answer.code == 0, answer.remark
        return body, answer

    def start(self, broker: SteppedBroker) -> None:
        """Make what is not there yet. Needed after each start of a broker."""
        topics = broker.core.topics
        for topic in TOPICS:
            if topic not in topics.table:
                topics.put(TopicConfig(topic, QUEUES, QUEUES))
        broker.store.columns.request_columns("T")

    def round(self, broker: SteppedBroker, *, count: int = 1, has_state: bool = True) -> None:
        """Do a little of everything; the tables are saved in the middle of it. Without `has_state`
        nothing is done whose answer waits until the slaves have the tables."""
        self.rounds += 1
        self.start(broker)
        for part in range(count):
            self._half(broker, has_state=has_state)
            if part == count // 2:
                self.save(broker)
        self._half(broker, has_state=has_state)

    def save(self, broker: SteppedBroker) -> None:
        """Write everything that the broker writes every few seconds."""
        for _ in range(2):  # what is only safe when it is synced is written the second time
            broker.run(1.5, 0.5)
            broker.store.tick()
            broker.store.sync()
            broker.core.delayed.save()
            for document in broker.core.documents:
                document.save()
        for step in broker.store.columns.seal_blocks():
            if callable(step):
                step()

    def _half(self, broker: SteppedBroker, *, has_state: bool = True) -> None:
        client = broker.connect()
        for _ in range(12):
            number = self._number + 1
            tag, value = "ab"[number % 2], number % 9
            self.send(client, "T", KEYS=f"k{self.name}{number}", TAGS=tag, n=value)
            self.plain[number] = (tag, value)
        self.progress = broker.store.queue_offsets("T", 0)[1] - 3
        broker.core.offsets.commit("G", "T", 0, self.progress)
        for level in (1, 2, 5, 5):
            self.delayed.add(self.send(client, "D", DELAY=level)[0])
        if has_state:
            self.cancelled.add(self.send(client, "D", DELAY=5)[0])
            broker.core.delayed.levels.cancel(
                4, broker.store.committed_offset(SCHEDULE_TOPIC, 4) - 1
            )
            self.reset_to = broker.store.committed_offset("T", 1) - 5
            broker.core.offsets.reset("GR", "T", 1, self.reset_to)
        self._pop(broker, client)
        self._pop_in_order(broker, client)
        self._use_lanes(broker, client)
        self._commit_epoch(broker, client)
        self._transact(broker, client)
        broker.settle()

    def _pop(self, broker: SteppedBroker, client: SteppedClient) -> None:
        """Acknowledge one message of each pop at once, one in the next round, and one never."""
        self.popped |= {self.send(client, "P")[0] for _ in range(8)}
        popper = Popper(broker, "GP", 20_000)
        late, self._held = self._held, []
        for held in late:
            popper.acknowledge(held)
            self.pop_acknowledged.add(held.body)
        for queue_id in range(QUEUES):
            popped = popper.pop("P", queue_id, count=3)
            broker.step()
            if popped:
                popper.acknowledge(popped[0])
                self.pop_acknowledged.add(popped[0].body)
                self._held += popped[1:2]
        broker.step()

    def _pop_in_order(self, broker: SteppedBroker, client: SteppedClient) -> None:
        self.ordered |= {self.send(client, "O", n=self._number)[0] for _ in range(4)}
        self.pop_in_order(broker, client, count=3, keep=1)
        broker.advance(1.0)

    def pop_in_order(
        self, broker: SteppedBroker, client: SteppedClient, *, count: int = 32, keep: int = 0
    ) -> set[bytes]:
        """Pop of each queue, and acknowledge all but the last `keep` messages."""
        found: set[bytes] = set()
        for queue_id in range(QUEUES):
            answer = client.call(
                POP,
                pop_fields(
                    broker, topic="O", consumerGroup="GO", order="true", queueId=queue_id,
                    maxMsgNums=count, invisibleTime=20_000,
                ),
            )  # fmt: skip
            if answer.code:
                continue
            found |= {message.body for message in decode_records(answer.body)}
            popped = sorted(handles(answer).items())
            names = {int(m.properties["n"]): m.body for m in decode_records(answer.body)}
            for number, handle in popped[: len(popped) - keep]:
                assert ack(client, handle, topic="O", consumerGroup="GO").code == 0
                self.order_acknowledged.add(names[number])
        return found

    def _use_lanes(self, broker: SteppedBroker, client: SteppedClient) -> None:
        for _ in range(8):
            value = self._number % 9
            tag = "ab"[self._number % 2]
            body, _ = self.send(client, "L", TAGS=tag, n=value)
            if tag == "a" or value > 4:
                self.laned.add(body)
        shared, consumers = self.consumers(broker)
        read_all(consumers, 2)
        for _ in range(4):
            value = self._number % 9
            tag = "ab"[self._number % 2]
            body, _ = self.send(client, "L", TAGS=tag, n=value)
            if tag == "a" or value > 4:
                self.laned.add(body)
        consumers[0].pull(next(iter(consumers[0].readings)))
        in_hand = {body for one in consumers for body in one.in_hand}
        self.lane_done |= {body.encode() for body in shared.deliveries if body not in in_hand}
        for one in consumers:
            one.connection.disconnect()
        broker.settle()

    def consumers(self, broker: SteppedBroker) -> tuple[Shared, list[ModelConsumer]]:
        """Return the members of the group that has lanes."""
        shared = Shared("GL")
        version = 1
        members = [ModelConsumer(broker, shared, who, LANES[who], version) for who in LANES]
        broker.settle()
        return shared, members

    # --- epochs

    def _ask(self, client: SteppedClient, step: str, ranges: Iterable[StagedRange]) -> Command:
        fields = {"query": "q", "epoch": self.epoch, "step": step, "topics": "E"}
        return client.call(COMMIT_EPOCH, fields, encode_staged_ranges(ranges))

    def _stage(self, client: SteppedClient) -> StagedRange:
        found = [self.body() for _ in range(3)]
        value = Stage(Owner("q", self.epoch, 0, 0), "E", 0, None).encode()
        batch = [
            (0, body, f"SLUICE_STAGE\x01{value}\x02UNIQ_KEY\x01U{body.decode()}\x02".encode())
            for body in found
        ]
        answer = client.call(320, send_fields(STAGING_TOPIC, m="true"), encode_batch(batch))
        assert answer.code == 0, answer.remark
        offset = int((answer.fields or {})["queueOffset"])
        self.published += found
        return StagedRange("broker-a", 0, offset, 3, zlib.crc32(b"".join(found)), 0, 0)

    def finish_epoch(self, broker: SteppedBroker, client: SteppedClient) -> str:
        """Commit the epoch that is under way, again and again; return what is wrong, or ""."""
        for _ in range(100):
            answer = self._ask(client, "commit", self.undecided)
            if answer.code:
                return f"epoch {self.epoch}: {answer.remark}"
            if (answer.fields or {})["state"] == "published":
                self.epoch += 1
                self.undecided = []
                return ""
            broker.settle()
        return f"epoch {self.epoch} is never published"

    def _commit_epoch(self, broker: SteppedBroker, client: SteppedClient) -> None:
        """Publish an epoch, and leave the next one somewhere on its way."""
        if not self.epoch:
            self._ask(client, "prepare", [])
        if self.undecided:
            error = self.finish_epoch(broker, client)
            assert not error, error
        self.undecided = [self._stage(client)]
        error = self.finish_epoch(broker, client)
        assert not error, error
        self.undecided = [self._stage(client)]
        self._ask(client, "commit", self.undecided)

    # --- transactions

    def _begin(self, client: SteppedClient) -> tuple[bytes, dict[str, object]]:
        body = self.body()
        properties = f"UNIQ_KEY\x01U{body.decode()}\x02TRAN_MSG\x01true\x02PGROUP\x01P\x02"
        answer = client.call(310, send_fields("X", properties, f=4), body)
        assert answer.code == 0, answer.remark
        fields = answer.fields or {}
        self.outcomes[body] = 0
        return body, {
            "producerGroup": "P", "tranStateTableOffset": fields["queueOffset"],
            "commitLogOffset": int(fields["msgId"][16:], 16), "fromTransactionCheck": "false",
            "msgId": f"U{body.decode()}", "transactionId": f"U{body.decode()}",
        }  # fmt: skip

    def _end(
        self, client: SteppedClient, body: bytes, fields: dict[str, object], outcome: int
    ) -> None:
        client.feed(client.request(37, fields | {"commitOrRollback": outcome}, flag=FLAG_ONEWAY))
        self.outcomes[body] = outcome

    def _transact(self, broker: SteppedBroker, client: SteppedClient) -> None:
        """Of four transactions one is committed, one rolled back, one ends in the next round."""
        for body, fields in self._open:
            self._end(client, body, fields, COMMIT)
        broker.step()
        begun = [self._begin(client) for _ in range(4 if self._leaves_open else 3)]
        self._end(client, *begun[0], COMMIT)
        self._end(client, *begun[1], ROLLBACK)
        self._open = begun[2:3]
        broker.step()

    def answer_checks(self, client: SteppedClient) -> None:
        """Answer what the broker asks the producer: what is open is committed."""
        requests, client.requests = client.requests, []
        for request in requests:
            if request.code != CHECK:
                continue
            asked = request.fields or {}
            body = asked["msgId"][1:].encode()
            outcome = self.outcomes.get(body) or COMMIT
            fields = {
                "producerGroup": "P", "tranStateTableOffset": asked["tranStateTableOffset"],
                "commitLogOffset": asked["commitLogOffset"], "fromTransactionCheck": "true",
                "msgId": asked["msgId"], "transactionId": asked["transactionId"],
                "commitOrRollback": outcome,
            }  # fmt: skip
            client.feed(client.request(37, fields, flag=FLAG_ONEWAY))

    # --- what must still be there

    def missing(self, broker: SteppedBroker) -> list[str]:
        """Let SECONDS pass at a broker that has started; return what is wrong, a line each."""
        self.start(broker)
        client, producer = broker.connect(), broker.connect()
        beat = wire_bodies.encode_heartbeat(wire_bodies.Heartbeat("p", ("P",), ()))
        producer.feed(Command(34, {}, beat))
        popper = Popper(broker, "GP", 600_000)
        again: set[bytes] = set()
        wrong = self._plain_missing(broker)
        progress = broker.core.offsets.committed("G", "T", 0)
        if progress > self.progress:
            wrong.append(f"1 offset of G: {progress} instead of {self.progress}")
        told = broker.core.offsets.resets.redirect("GR", "T", 1, 10_000) or self.reset_to
        if told > self.reset_to:
            wrong.append(f"GR is reset to {told} instead of {self.reset_to}")
        shared, consumers = self.consumers(broker)
        for _ in range(round(SECONDS / STEP_S)):
            broker.pass_seconds(STEP_S)
            self.answer_checks(producer)
            broker.settle()
            for queue_id in range(QUEUES):
                for found in (
                    popper.pop("P", queue_id),
                    popper.pop_retries("P", queue_id=queue_id),
                ):
                    again |= {one.body for one in found}
            read_all(consumers, 1)
        delayed = {message.body for message in messages_of(broker, "D")}
        _note(wrong, "delayed", self.delayed - delayed)
        _note(wrong, "cancelled, but there", self.cancelled & delayed)
        _note(wrong, "popped", self.popped - self.pop_acknowledged - again)
        done = self.order_acknowledged.copy()
        for _ in range(3):
            done |= self.pop_in_order(broker, client)
            broker.pass_seconds(25.0)
        _note(wrong, "popped in order", self.ordered - done)
        got = self.lane_done | {body.encode() for body in shared.deliveries}
        _note(wrong, "of lanes", self.laned - got)
        self._epochs_missing(broker, client, wrong)
        self._transactions_missing(broker, wrong)
        return wrong

    def _plain_missing(self, broker: SteppedBroker) -> list[str]:
        wrong: list[str] = []
        bodies = {number: f"{self.name}{number:05d}".encode() for number in self.plain}
        found = {message.body for message in messages_of(broker, "T")}
        _note(wrong, "plain", set(bodies.values()) - found)
        kinds: list[tuple[str, object, Callable[[str, int], bool]]] = [
            ("by tag", TagFilter(parse_subscription("T", "a")), lambda tag, _: tag == "a"),
            ("by SQL92", compile_sql92(EXPRESSION), lambda _, value: 3 <= value <= 5),
        ]
        for name, message_filter, is_wanted in kinds:
            filtered = {message.body for message in messages_of(broker, "T", message_filter)}
            wanted = {bodies[number] for number, item in self.plain.items() if is_wanted(*item)}
            _note(wrong, name, wanted - filtered)
            _note(wrong, f"not {name}", filtered - wanted)
        keys = broker.store.keys
        no_key = {
            bodies[number]
            for number in self.plain
            if not ((hit := keys.find("T", f"k{self.name}{number}", 9, 0, 1 << 60)) and hit.records)
        }
        _note(wrong, "by key", no_key)
        return wrong

    def _epochs_missing(
        self, broker: SteppedBroker, client: SteppedClient, wrong: list[str]
    ) -> None:
        self._ask(client, "prepare", [])
        if self.undecided:
            wrong += filter(None, [self.finish_epoch(broker, client)])
        self.undecided = [self._stage(client)]
        wrong += filter(None, [self.finish_epoch(broker, client)])
        found = Counter(message.body for message in messages_of(broker, "E"))
        _note(wrong, "of epochs", set(self.published) - set(found))
        _note(wrong, "of epochs, repeated", {body for body, count in found.items() if count > 1})

    def _transactions_missing(self, broker: SteppedBroker, wrong: list[str]) -> None:
        found = Counter(message.body for message in messages_of(broker, "X"))
        wanted = {body for body, outcome in self.outcomes.items() if outcome != ROLLBACK}
        _note(wrong, "of transactions", wanted - set(found))
        _note(wrong, "rolled back, but there", set(found) - wanted)
        _note(wrong, "of transactions, repeated", {b for b, count in found.items() if count > 1})


def _note(wrong: list[str], what: str, bodies: set[bytes]) -> None:
    if bodies:
        names = sorted(body.decode() for body in bodies)
        wrong.append(f"{len(names)} {what}: {', '.join(names[:5])}")
