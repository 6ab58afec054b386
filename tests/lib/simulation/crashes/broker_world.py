"""A broker (`broker.core` over `testing.broker.SteppedBroker`) that is crashed while it is used.

Here only what a client is told counts. A send that was answered with success is there after a kill,
and under SYNC_FLUSH after a power loss (unless it said WAIT=false), at the offset of its answer;
one that was refused is not; one without an answer may be. The same with topics and groups that were
made or deleted, and with the file of consumer offsets, which holds what was saved last.
"""

import collections
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from simulation.crashes.disk import Disk
from simulation.crashes.plan import Kind, Violation
from simulation.stepped import (
    ManualClock,
    SteppedBroker,
    SteppedClient,
    pull_fields,
    send_fields,
)
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.model.message import StoredMessage
from sluicemq.record.codec import decode_record, decode_records, encode_batch
from sluicemq.testing.files import CrashableFiles, PowerLost
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

TOPICS: Final = ("A", "B", "New")
QUEUES: Final = (0, 1)
GROUPS: Final = ("H", "I")
Key = tuple[str, int]
Unknown: Final = "unknown"


@dataclass(slots=True)
class Sent:
    """A message that was sent. `fate`: pending, stored, unknown, refused, deleted."""

    key: Key
    body: bytes
    client: int
    waits: bool
    fate: str = "pending"
    offset: int = -1
    place: int = -1


@dataclass
class Promises:
    """What clients were told, or may expect."""

    sent: dict[bytes, Sent] = field(default_factory=dict)
    seen: dict[Key, dict[int, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Topic or group (as `group G`) -> yes, no, unknown."""
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    """As they were saved last."""
    offsets_now: dict[str, dict[int, int]] | None = None
    """As they were being saved when the broker ended: these or those are there."""

    def of_topic(self, topic: str) -> list[Sent]:
        return [sent for sent in self.sent.values() if sent.key[0] == topic]


class BrokerWorld:
    """One broker on a disk of its own, two producers, and what they were promised."""

    def __init__(self, rng: random.Random) -> None:
        self.store_config = StoreConfig(
            root="/store",
            commit_log_file_bytes=rng.choice((4096, 16_384, 65_536)),
            consume_queue_file_bytes=rng.choice((100, 2000)),
            flush_sync=rng.random() < 0.7,
            flush_thorough_interval_ms=rng.choice((500, 10_000)),
            consume_queue_flush_thorough_interval_ms=rng.choice((500, 60_000)),
        )
        self.config = BrokerConfig(broker_name="broker-a", metrics_enable=False)
        self.clock = ManualClock()
        self.promises = Promises()
        self.waiting: dict[tuple[int, int], Callable[[Command], None]] = {}
        self.serial = 0
        self.latest: collections.Counter[str] = collections.Counter()
        self.deleted: set[str] = set()
        """Topics that were asked to be deleted, ever."""
        self.sync_failed = False
        self.is_over = False
        self.disk = Disk(CrashableFiles(), self._open)
        self._open()

    def _open(self) -> None:
        self.broker = SteppedBroker(
            config=self.config,
            store_config=self.store_config,
            files=self.disk.files,
            clock=self.clock,
            holds_announcements=True,
        )
        self.clients = [self.broker.connect() for _ in range(2)]
        self.waiting.clear()

    def take(self, kind: str, rng: random.Random) -> str:
        """One step; then the answers that have left are believed."""
        try:
            text: str = getattr(self, f"do_{kind}")(rng)
            self._believe()
        except PowerLost as lost:
            self._believe()
            self._restart(rng)
            text = f"interrupted at {lost}"
        except StoreDamagedError:
            raise
        except (StoreError, OSError) as error:
            if not self.disk.is_troubled:
                raise
            self.sync_failed = True
            self._believe()
            text = f"refused: {error}"
        return text

    def finish(self) -> None:
        """Cut the power once more and look."""
        self.disk.files.power_fails_after = None
        self._restart(random.Random(0), power=True)

    # --- requests and their answers

    def _ask(
        self,
        client: int,
        code: int,
        fields: dict[str, object],
        body: bytes,
        then: Callable[[Command], None],
    ) -> None:
        request = self.clients[client].request(code, fields, body)
        self.waiting[client, request.opaque] = then
        self.clients[client].feed(request)

    def _believe(self) -> None:
        for number, client in enumerate(self.clients):
            for opaque in list(client.answers):
                then = self.waiting.pop((number, opaque), None)
                if then is not None:
                    then(client.answers.pop(opaque))

    def do_send(self, rng: random.Random) -> str:
        """One message or a batch, from one of two connections; several can be in one turn."""
        client = rng.randrange(2)
        key = (rng.choice(TOPICS), rng.choice(QUEUES))
        waits = rng.random() < 0.85
        count = rng.choice((1, 1, 1, 3))
        sent = [self._new_message(rng, key, client, waits) for _ in range(count)]
        wait = "" if waits else "WAIT\x01false\x02"
        fields = send_fields(key[0], properties=f"UNIQ_KEY\x01U{self.serial}\x02{wait}", e=key[1])
        body, code = sent[0].body, RequestCode.SEND_MESSAGE_V2
        if count > 1:
            code = RequestCode.SEND_BATCH_MESSAGE
            body = encode_batch([(0, each.body, b"") for each in sent])
            fields["m"] = "true"
        latest = self._asked(key[0], "yes")
        self._ask(client, code, fields, body, lambda answer: self._sent(sent, latest, answer))
        return f"{client}: {key[0]}:{key[1]} x {count}{'' if waits else ', does not wait'}"

    def _new_message(self, rng: random.Random, key: Key, client: int, waits: bool) -> Sent:
        self.serial += 1
        body = struct.pack(">i", self.serial) + bytes(rng.choice((0, 40, 40, 400, 900)))
        sent = self.promises.sent[body] = Sent(key, body, client, waits)
        return sent

    def _sent(self, sent: list[Sent], latest: int, answer: Command) -> None:
        for index, each in enumerate(sent):
            if each.fate != "pending":
                continue  # its topic was deleted meanwhile
            if answer.code == ResponseCode.SUCCESS and answer.fields:
                each.fate = "stored"
                each.offset = int(answer.fields["queueOffset"]) + index
                each.place = int(answer.fields["msgId"].split(",")[index][16:], 16)
                is_safe = each.waits and self.store_config.flush_sync
                if is_safe and self.latest[each.key[0]] == latest:
                    self.promises.names[each.key[0]] = "yes"
            elif answer.code == ResponseCode.FLUSH_DISK_TIMEOUT or self._is_unsure(answer):
                each.fate = Unknown
            else:
                each.fate = "refused"
            if each.fate == "refused" and not self.disk.is_troubled:
                raise Violation(f"a send is answered {answer.code}: {answer.remark}")

    def _is_unsure(self, answer: Command) -> bool:
        """After an error of the disk at an fsync, of the log or of a new topic: stored or not."""
        failed = self.broker.store._log.failure is not None
        remark = answer.remark or ""
        return failed or "may come back" in remark or "may reappear" in remark

    # --- what a broker does by itself

    def do_step(self, rng: random.Random) -> str:
        """The turn ends."""
        self.broker.step()
        return f"{self.broker.syncs_waiting} fsyncs wait"

    def do_fsync(self, rng: random.Random) -> str:
        """An fsync ends."""
        if not self.broker.syncs_waiting:
            return "none waits"
        try:
            self.broker.finish_sync()
        except (StoreError, OSError) as error:
            self.sync_failed = True
            self.broker._syncs.clear()
            return f"failed: {error}"
        return "done"

    def do_tick(self, rng: random.Random) -> str:
        seconds = rng.choice((0.5, 1.0, 3.0, 61.0))
        self.broker.advance(seconds)
        if self.broker.store.tick():
            self.broker.store.sync()
        self.broker.store.keys.flush_due()
        return f"{seconds} s later"

    def do_announce(self, rng: random.Random) -> str:
        """Changed tables are saved, then their answers leave."""
        self.broker.finish_announcements()
        return ""

    def do_save(self, rng: random.Random) -> str:
        """The chore that writes consumer offsets."""
        self._save_offsets()
        return str(self.promises.offsets)

    def _save_offsets(self) -> None:
        """Save the table of offsets. What it holds is promised from then on, whether or not the
        document finds anything to write."""
        core = self.broker.core
        table = {key: dict(queues) for key, queues in core.offsets.table.items()}
        self.promises.offsets_now = table
        core.offsets.document.save()
        self.promises.offsets, self.promises.offsets_now = table, None

    # --- what consumers and administrators do

    def do_pull(self, rng: random.Random) -> str:
        """A reader looks at a queue from its beginning; what it gets it has seen."""
        key = (rng.choice(TOPICS), rng.choice(QUEUES))
        found = self._read(key)
        self._check_known(key, found)
        self.promises.seen.setdefault(key, {}).update((m.queue_offset, m.body) for m in found)
        return f"{key[0]}:{key[1]} has {len(found)}"

    def _read(self, key: Key) -> list[StoredMessage]:
        reader = self.broker.connect()
        found: list[StoredMessage] = []
        while True:
            answer = self._pull(reader, key, len(found))
            if answer.code != ResponseCode.SUCCESS:
                return found
            found += decode_records(answer.body)

    def _pull(self, reader: SteppedClient, key: Key, offset: int) -> Command:
        request = reader.request(11, pull_fields(key[0], offset, queueId=key[1]))
        reader.feed(request)
        return reader.answers.pop(request.opaque)

    def do_commit(self, rng: random.Random) -> str:
        """A consumer commits its offset; the table is saved later."""
        fields: dict[str, object] = {
            "consumerGroup": rng.choice(GROUPS), "topic": rng.choice(TOPICS),
            "queueId": rng.choice(QUEUES), "commitOffset": rng.randrange(20),
        }  # fmt: skip
        self._ask(0, RequestCode.UPDATE_CONSUMER_OFFSET, fields, b"", lambda _: None)
        return str(fields)

    def do_topic(self, rng: random.Random) -> str:
        topic = rng.choice(TOPICS)
        fields = {"topic": topic, "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        self._change(topic, "yes", RequestCode.UPDATE_AND_CREATE_TOPIC, dict(fields), b"")
        return topic

    def do_group(self, rng: random.Random) -> str:
        group = rng.choice(GROUPS)
        body = f'{{"groupName":"{group}"}}'.encode()
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        self._change(f"group {group}", "yes", code, {}, body)
        return group

    def _change(
        self, name: str, state: str, code: int, fields: dict[str, object], body: bytes
    ) -> None:
        latest = self._asked(name, state)

        def answered(answer: Command) -> None:
            if answer.code != ResponseCode.SUCCESS or self.disk.is_troubled:
                self.promises.names[name] = Unknown
            elif latest == self.latest[name]:
                self.promises.names[name] = state

        self._ask(0, code, fields, body, answered)

    def _asked(self, name: str, state: str) -> int:
        """Somebody wants to change it: until the answer to the latest wish nobody knows."""
        if self.promises.names.get(name) != state:
            self.promises.names[name] = Unknown
        self.latest[name] += 1
        return self.latest[name]

    def do_delete(self, rng: random.Random) -> str:
        """A topic goes; answered only when its queues are gone for good."""
        topic = rng.choice(TOPICS)
        self.deleted.add(topic)
        promises = self.promises
        for key in [key for key in promises.seen if key[0] == topic]:
            del promises.seen[key]
        for sent in promises.of_topic(topic):
            if sent.fate != "refused":
                sent.fate = Unknown

        fields: dict[str, object] = {"topic": topic}
        self._change(topic, "no", RequestCode.DELETE_TOPIC_IN_BROKER, fields, b"")
        for sent in promises.of_topic(topic):
            sent.fate = "deleted" if not self.disk.is_troubled else Unknown
        return topic

    # --- what the world does

    def do_arm(self, rng: random.Random) -> str:
        return self.disk.arm(rng)

    def do_fault(self, rng: random.Random) -> str:
        return self.disk.inject(rng) if rng.random() < 0.8 else self.disk.fill(rng)

    def do_mend(self, rng: random.Random) -> str:
        return self.disk.mend()

    def do_crash(self, rng: random.Random) -> str:
        return self._restart(rng, power=True)

    def do_kill(self, rng: random.Random) -> str:
        return self._restart(rng, power=False)

    def do_stop(self, rng: random.Random) -> str:
        """In order: all that was stored is there, whatever happens next."""
        try:
            self._save_offsets()
            self.broker.close()
            self._believe()
        except (StoreError, OSError) as error:
            if not self.disk.is_troubled:
                raise
            self.sync_failed = True
            self._believe()
            return f"failed: {error}; {self._restart(rng)}"
        return self._restart(rng, power=rng.random() < 0.5, is_stopped=True)

    def _restart(
        self, rng: random.Random, *, power: bool | None = None, is_stopped: bool = False
    ) -> str:
        self.disk.restart(rng, power=power)
        is_safe = is_stopped and not self.sync_failed
        return self._check(is_safe=is_safe)

    # --- looking

    def _check(self, *, is_safe: bool) -> str:
        power_lost = (self.disk.power_lost and not is_safe) or self.sync_failed
        self.sync_failed = False
        total = 0
        for topic in TOPICS:
            for queue_id in QUEUES:
                total += self._check_queue((topic, queue_id), power_lost)
        self._check_tables()
        for sent in self.promises.sent.values():
            if sent.fate == "pending":
                sent.fate = Unknown
        return f"{total} messages are there"

    def _check_queue(self, key: Key, power_lost: bool) -> int:
        if self.promises.names.get(key[0], "no") == "no" and key[0] not in self.broker.core.topics:
            return 0
        found = self._read(key)
        self._check_known(key, found)
        is_sync = self.store_config.flush_sync
        bodies = {message.body for message in found}
        if is_sync and key in self.promises.seen:
            self._check_seen(key, found)
        for sent in self.promises.sent.values():
            must = sent.waits and is_sync if power_lost else True
            if sent.key == key and sent.fate == "stored" and sent.body not in bodies:
                if must:
                    raise Violation(f"lost: {key} lacks message {sent.offset} at {sent.place}")
                sent.fate = Unknown
        for message in found:
            self._settle(self.promises.sent[message.body], message)
        self.promises.seen[key] = {m.queue_offset: m.body for m in found}
        return len(found)

    def _settle(self, sent: Sent, message: StoredMessage) -> None:
        if sent.fate != "deleted":
            sent.fate = "stored"
            sent.offset, sent.place = message.queue_offset, message.physical_offset

    def _check_known(self, key: Key, found: list[StoredMessage]) -> None:
        """Every message was sent, once, to this queue, and stands where its answer said."""
        if [m.queue_offset for m in found] != list(range(len(found))):
            raise Violation(f"{key} shows the offsets {[m.queue_offset for m in found]}")
        if len({m.body for m in found}) < len(found):
            raise Violation(f"{key} shows a message twice")
        last: dict[int, int] = {}
        for message in found:
            sent = self.promises.sent.get(message.body)
            if sent is None or sent.key != key or sent.fate in ("refused", "deleted"):
                raise Violation(f"phantom in {key}: {message.queue_offset} is {sent}")
            if sent.fate == "stored" and sent.offset != message.queue_offset:
                raise Violation(f"{key} has at {message.queue_offset} what was stored as {sent}")
            number = struct.unpack_from(">i", sent.body)[0]
            if last.get(sent.client, 0) > number:
                raise Violation(f"{key}: message {number} comes after a later one of its sender")
            last[sent.client] = number
            self._check_view(message)

    def _check_view(self, message: StoredMessage) -> None:
        """The same message by its place in the log."""
        answer = self._view(message.physical_offset)
        if answer.code != ResponseCode.SUCCESS or decode_record(answer.body).body != message.body:
            raise Violation(f"the message at {message.physical_offset} is not found by its id")

    def _view(self, place: int) -> Command:
        client = self.broker.connect()
        request = client.request(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": place})
        client.feed(request)
        return client.answers.pop(request.opaque)

    def _check_seen(self, key: Key, found: list[StoredMessage]) -> None:
        bodies = {message.queue_offset: message.body for message in found}
        for offset, body in self.promises.seen[key].items():
            if bodies.get(offset) != body:
                raise Violation(f"a reader saw message {offset} of {key}, which is not there")

    def _check_tables(self) -> None:
        core, promises = self.broker.core, self.promises
        for name, state in promises.names.items():
            is_there = name.removeprefix("group ") in (
                core.groups if name.startswith("group ") else core.topics
            )
            if state != Unknown and is_there != (state == "yes"):
                raise Violation(f"{name} is {'' if is_there else 'not '}there, told was {state}")
        table = {key: dict(queues) for key, queues in core.offsets.table.items() if queues}
        known = [promises.offsets]
        if promises.offsets_now is not None:
            known.append(promises.offsets_now)
        if not any(table == self._cut(each) | self._returned(each) for each in known):
            raise Violation(f"the offsets are {table}, saved were {promises.offsets}")

    def _cut(self, offsets: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
        """What a start makes of them: nobody has consumed behind the end of a queue."""
        store = self.broker.store
        return {
            key: {
                queue_id: min(offset, store.committed_offset(topic, queue_id))
                if store.queue_exists(topic := key.partition("@")[0], queue_id)
                else offset
                for queue_id, offset in queues.items()
            }
            for key, queues in offsets.items()
        }

    def _returned(self, saved: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
        """Return the offsets 0 of groups without `saved` ones that had consumed a topic before it
        was deleted. A start gives them these when it finds the topic created again, and tells their
        consumers."""
        offsets = self.broker.core.offsets
        found: dict[str, dict[int, int]] = {}
        for (group, topic, queue_id), reset in offsets.resets.table.items():
            key = f"{topic}@{group}"
            if topic in self.deleted and key not in saved and reset.offset == 0:
                found.setdefault(key, {})[queue_id] = 0
        return found


BROKER: Final = Kind(
    "broker",
    BrokerWorld,
    {
        "send": 14, "step": 8, "fsync": 8, "tick": 3, "announce": 4, "save": 2, "pull": 3,
        "commit": 3, "topic": 2, "group": 2, "delete": 1, "arm": 2, "fault": 1, "mend": 2,
        "crash": 2, "kill": 1, "stop": 1,
    },
)  # fmt: skip
