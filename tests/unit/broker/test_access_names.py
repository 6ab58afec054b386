"""State that goes by names which users choose (groups, transactions, handles, queries): what one
account keeps there, another account neither reads nor changes. Epochs of exactly-once sinks are in
test_epochs.py, clients of the proxy in tests/unit/proxy/test_clients.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from simulation.pops import handles, pop_fields
from simulation.stepped import SteppedBroker, pull_fields, send_fields
from sluicemq.config import BrokerConfig
from sluicemq.files import overwrite_text
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.bodies import (
    ConsumerData,
    Heartbeat,
    LockBatch,
    encode_heartbeat,
    encode_lock_batch,
)
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import PopAck, ReceiptHandle, encode_pop_acks
from sluicemq.wire.signature import sign_command

RULES_PATH = "/store/conf/plain_acl.yml"
RULES = """\
accounts:
- accessKey: owner001
  secretKey: secret-of-owner001
  topicPerms: [T=PUB|SUB]
  groupPerms: [G=SUB]
- accessKey: intruder
  secretKey: secret-of-intruder
  topicPerms: [M=PUB|SUB]
  groupPerms: [I=SUB]
"""


@dataclass
class Victim:
    """A broker, and what `owner001` has there."""

    broker: SteppedBroker
    handle: ReceiptHandle
    half_offset: int
    half_place: int
    recall_handle: str
    opaque: int = 0

    def call(self, account: str, code: int, fields: Mapping[str, object], body: bytes) -> Command:
        self.opaque += 1
        texts = {name: str(value) for name, value in fields.items()}
        command = Command(code, texts, body, self.opaque)
        sign_command(command, account, f"secret-of-{account}")
        client = self.broker.connect("10.0.0.7")
        client.feed(command)
        self.broker.settle()
        return client.answers.pop(self.opaque, Command(-1))

    def state(self) -> object:
        """Everything that a name of another account could lead to."""
        core = self.broker.core
        return (
            {name: dict(found) for name, found in core.offsets.table.items()},
            str(core.locks._groups),
            [(it.key, it.asked_peer is None, it.is_ending) for it in core.transactions.table],
            self.broker.store.queue_offsets(TIMER_TOPIC, 0),
            [
                str(it.checkpoint) + str([*it.pending_offsets])
                for it in core.checkpoints.open_checkpoints
            ],
            {name: len(found.members) for name, found in core.consumers.groups.items()},
            core.offsets.resets.to_objects(),
        )


@pytest.fixture
def victim() -> Victim:
    files = CrashableFiles()
    files.make_directory("/store/conf")
    files.open(RULES_PATH, create=True).close()
    overwrite_text(files, RULES_PATH, RULES)
    config = BrokerConfig(
        broker_name="broker-a",
        metrics_enable=False,
        acl_enable=True,
        acl_files=(RULES_PATH,),
        recall_enable=True,
    )
    broker = SteppedBroker(config=config, files=files)
    broker.core.topics.put(TopicConfig("T", 1, 1), TopicConfig("M", 1, 1))
    broker.core.groups.put(GroupConfig("G"), GroupConfig("I"))
    found = Victim(broker, ReceiptHandle(0, 0, 0, 0, 0, "", 0, 0), 0, 0, "")

    def call(code: int, fields: Mapping[str, object], body: bytes = b"") -> Command:
        answer = found.call("owner001", code, fields, body)
        assert answer.code == 0, answer.remark
        return answer

    call(310, send_fields("T", "UNIQ_KEY\x01AB\x02n\x010\x02"), b"TOPSECRET")
    found.handle = handles(call(200050, pop_fields(broker)))[0]
    half = call(310, send_fields("T", "TRAN_MSG\x01true\x02PGROUP\x01P\x02UNIQ_KEY\x01AC\x02", f=4))
    half_fields = half.fields or {}
    found.half_offset = int(half_fields["queueOffset"])
    found.half_place = int(half_fields["msgId"][16:], 16)
    timed = call(310, send_fields("T", "UNIQ_KEY\x01AD\x02TIMER_DELAY_SEC\x0160\x02"), b"TOPSECRET")
    found.recall_handle = (timed.fields or {})["recallHandle"]
    call(15, {"consumerGroup": "G", "topic": "T", "queueId": 0, "commitOffset": 1})
    lock = LockBatch("G", "c1", (MessageQueue("T", "broker-a", 0),))
    call(41, {}, encode_lock_batch(lock))
    return found


def _end(victim: Victim, **changes: object) -> Mapping[str, object]:
    return {
        "producerGroup": "P",
        "tranStateTableOffset": victim.half_offset,
        "msgId": "AC",
        "commitLogOffset": victim.half_place,
        "commitOrRollback": 12,
        "topic": "M",
        "fromTransactionCheck": "false",
        "transactionId": "AC",
    } | changes


def _ack(victim: Victim, group: str, topic: str) -> Mapping[str, object]:
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "offset": 0,
        "extraInfo": victim.handle.encode(),
        "invisibleTime": 1000,
    }


def _lock(group: str, topic: str) -> bytes:
    return encode_lock_batch(LockBatch(group, "c1", (MessageQueue(topic, "broker-a", 0),)))


def _heartbeat(group: str) -> bytes:
    return encode_heartbeat(Heartbeat("c1", (), (ConsumerData(group),)))


Attack = tuple[int, Mapping[str, object], bytes]


def attacks(victim: Victim) -> dict[str, Attack]:
    """What the intruder tries, by what it is about."""
    offset = {"queueId": 0, "commitOffset": 0}
    found: dict[str, Attack] = {
        "end a transaction": (37, _end(victim), b""),
        "end a transaction, no topic": (37, _end(victim, topic=""), b""),
        "answer a check": (37, _end(victim, fromTransactionCheck="true"), b""),
        "leave a check open": (
            37,
            _end(victim, fromTransactionCheck="true", commitOrRollback=0),
            b"",
        ),
        "list transactions": (900111, {}, b""),
        "resolve a transaction": (900112, {"transactionId": "AC", "commitOrRollback": 12}, b""),
        "take a timed message back": (
            370,
            {
                "producerGroup": "P",
                "topic": "M",
                "recallHandle": victim.recall_handle,
            },
            b"",
        ),
        "take a timed message back, its topic": (
            370,
            {
                "producerGroup": "P",
                "topic": "T",
                "recallHandle": victim.recall_handle,
            },
            b"",
        ),
        "cancel a timed message": (900102, {"handle": victim.recall_handle}, b""),
        "list timed messages": (900101, {}, b""),
        "reset offsets": (
            222,
            {
                "topic": "T",
                "group": "G",
                "timestamp": 0,
                "isForce": "true",
            },
            b"",
        ),
        "clone offsets": (
            314,
            {
                "srcGroup": "G",
                "destGroup": "I",
                "topic": "T",
                "offline": "false",
            },
            b"",
        ),
        "unregister a member": (35, {"clientID": "c1", "consumerGroup": "G"}, b""),
        "send back": (
            36,
            {
                "group": "I",
                "offset": 0,
                "delayLevel": 1,
                "originTopic": "M",
                "originMsgId": "",
            },
            b"",
        ),
        "read in flight": (900134, {"consumerGroup": "G", "topic": "T"}, b""),
        "heartbeat as a member": (34, {}, _heartbeat("G")),
        "members": (38, {"consumerGroup": "G"}, b""),
    }  # the rest by group and topic, of which one is the intruder's own
    for group, topic in (("G", "T"), ("I", "T"), ("G", "M")):
        where = {"consumerGroup": group, "topic": topic}
        name = f"{group} {topic}"
        acks = encode_pop_acks("broker-a", [PopAck(group, topic, victim.handle, (0,))])
        found |= {
            f"acknowledge {name}": (200051, _ack(victim, group, topic), b""),
            f"hide {name}": (200053, _ack(victim, group, topic), b""),
            f"acknowledge many {name}": (200151, {}, acks),
            f"pop {name}": (200050, {**pop_fields(victim.broker), **where}, b""),
            f"peek {name}": (200052, {**where, "queueId": 0, "maxMsgNums": 1}, b""),
            f"polls {name}": (200055, {**where, "queueId": 0}, b""),
            f"lock {name}": (41, {}, _lock(group, topic)),
            f"unlock {name}": (42, {}, _lock(group, topic)),
            f"commit offset {name}": (15, {**where, **offset}, b""),
            f"read offset {name}": (14, {**where, "queueId": 0}, b""),
            f"pull {name}": (11, pull_fields(topic, consumerGroup=group, sysFlag=5), b""),
            f"filtered lag {name}": (900131, where, b""),
            f"try a filter {name}": (900132, where, b"{}"),
        }
    return found


NAMES = sorted(attacks(Victim(SteppedBroker(), ReceiptHandle(0, 0, 0, 0, 0, "", 0, 0), 0, 0, "")))


@pytest.mark.parametrize("name", NAMES)
def test_an_account_neither_reads_nor_changes_what_another_keeps_under_a_name(
    victim: Victim, name: str
) -> None:
    before = victim.state()
    answer = victim.call("intruder", *attacks(victim)[name])
    assert answer.code not in (0, -1), f"{name} is answered with success, or not at all"
    assert b"TOPSECRET" not in bytes(answer.body)
    assert victim.state() == before


def test_the_owner_may_do_what_others_may_not(victim: Victim) -> None:
    """Else the table above would prove nothing."""
    expected = {
        "end a transaction, no topic": 0,
        "acknowledge G T": 0,
        "commit offset G T": 0,
        "lock G T": 0,
        "take a timed message back, its topic": 0,
        "pull G T": 0,
    }
    found = attacks(victim)
    codes = {name: victim.call("owner001", *found[name]).code for name in expected}
    assert codes == expected
