"""Crashes of a broker amid transactions, over files that keep, drop or tear what was not synced.

Producers that know how each local transaction ended begin, end, end again, repeat sends whose
answers they do not wait for, and answer checks. Power fails at random moments, several times. At
every moment: a message is visible once at most, and only if it was committed. At the end, when
everybody has been asked: every transaction whose half message has survived is decided, as its
producer says, once; and nobody is asked any more.
"""

import dataclasses
import random
from collections import Counter

import pytest

from simulation.stepped import SMALL, SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker.background import Progress
from sluicemq.broker.transactions.prepared import OpenTransaction, OpenTransactions
from sluicemq.broker.transactions.transactions import Transactions
from sluicemq.config import BrokerConfig
from sluicemq.model.system_names import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC
from sluicemq.record.codec import decode_records
from sluicemq.store.queues import UNIT
from sluicemq.wire.bodies import Heartbeat, encode_heartbeat
from sluicemq.wire.frames import FLAG_ONEWAY, Command

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
CONFIG = BrokerConfig(broker_name="broker-a", metrics_enable=False, transaction_check_max=1000)
STORE = dataclasses.replace(SMALL, commit_log_file_bytes=20_000, consume_queue_file_bytes=400)


class World:
    """A broker that crashes, and producers that remember."""

    def __init__(self, seed: int, *, flush_sync: bool) -> None:
        self.random = random.Random(seed)
        self.store_config = dataclasses.replace(STORE, flush_sync=flush_sync)
        self.broker = SteppedBroker(config=CONFIG, store_config=self.store_config)
        self.client = self.join()
        self.count = 0
        self.halves: dict[str, tuple[str, str]] = {}
        self.safe_halves: set[str] = set()
        self.safe_ends: set[str] = set()
        self.asked = 0
        self.is_patient = False

    def join(self) -> SteppedClient:
        client = self.broker.connect()
        client.feed(Command(34, {}, encode_heartbeat(Heartbeat("c", ("P",), ()))))
        self.broker.settle()
        return client

    def outcome(self, name: str) -> int:
        return COMMIT if int(name) % 3 else ROLLBACK

    # --- what producers do

    def begin(self) -> None:
        """A half message, now and then twice; answered, or not known to be stored."""
        self.count += 1
        name = str(self.count)
        properties = f"UNIQ_KEY\x01{name}\x02TRAN_MSG\x01true\x02PGROUP\x01P\x02"
        fields = {k: str(v) for k, v in send_fields("T", properties, f=4).items()}
        times = 1 if self.is_patient else self.random.choice((1, 1, 1, 2))
        opaques = [10_000 + 2 * self.count + n for n in range(times)]
        body = name.encode() + b"." * self.random.randrange(300)
        for opaque in opaques:
            self.client.feed(Command(310, dict(fields), body, opaque=opaque))
        self.maybe_settle()
        answers = [self.client.answers[o] for o in opaques if o in self.client.answers]
        for answer in answers:
            if answer.code == 0 and answer.fields:
                self.safe_halves.add(name)
                self.halves[name] = (answer.fields["queueOffset"], answer.fields["msgId"])

    def end(self) -> None:
        if not self.halves:
            return
        name = self.random.choice(sorted(self.halves))
        offset, message_id = self.halves[name]
        opaque = 50_000_000 + self.random.randrange(1 << 20)
        fields = {
            "producerGroup": "P", "tranStateTableOffset": offset,
            "commitLogOffset": str(int(message_id[16:], 16)),
            "commitOrRollback": str(self.outcome(name)), "fromTransactionCheck": "false",
            "msgId": name,
        }  # fmt: skip
        for n in range(self.random.choice((1, 1, 2))):
            self.client.feed(Command(37, dict(fields), opaque=opaque + n))
        self.maybe_settle()
        answer = self.client.answers.get(opaque)
        if answer is not None and answer.code == 0:
            self.safe_ends.add(name)

    def answer_checks(self, *, always: bool = False) -> None:
        for request in [r for r in self.client.requests if r.code == 39]:
            self.client.requests.remove(request)
            self.asked += 1
            fields = request.fields or {}
            name = fields["msgId"]
            outcome = self.outcome(name) if always or self.random.random() < 0.6 else UNKNOWN
            end = {
                "producerGroup": "P", "tranStateTableOffset": fields["tranStateTableOffset"],
                "commitLogOffset": fields["commitLogOffset"], "commitOrRollback": str(outcome),
                "fromTransactionCheck": "true", "msgId": name,
            }  # fmt: skip
            self.client.feed(Command(37, end, flag=FLAG_ONEWAY))
            if not always:
                self.maybe_settle()

    def maybe_settle(self) -> None:
        """The turn ends, or goes on; the fsync is over, or is not."""
        if self.is_patient:
            self.broker.settle()
            return
        if self.random.random() < 0.3:
            return
        self.broker.step()
        while self.broker.syncs_waiting and self.random.random() < 0.8:
            self.broker.finish_sync()
            self.broker.step()

    # --- what else happens

    def time(self) -> None:
        self.broker.advance(self.random.choice((0.2, 2.0, 7.0, 31.0)))
        self.maybe_settle()

    def save(self) -> None:
        self.broker.store.tick()
        if self.random.random() < 0.5:
            self.broker.store.sync()
            self.broker.core.sweep()
        self.broker.core.offsets.document.save()
        self.broker.core.topics.document.save()

    def crash(self, *, kill: bool = False) -> None:
        files = self.broker.files
        self.broker = SteppedBroker(
            config=CONFIG, store_config=self.store_config, clock=self.broker.clock,
            files=files.kill() if kill else files.crash(self.random),
        )  # fmt: skip
        self.client = self.join()
        if not self.store_config.flush_sync:
            end = self.broker.store.queue_offsets(HALF_TOPIC, 0)[1]
            self.halves = {n: h for n, h in self.halves.items() if int(h[0]) < end}

    # --- what must hold

    def visible(self) -> Counter[str]:
        found: Counter[str] = Counter()
        offset, client = 0, self.broker.connect()
        end = self.broker.store.queue_offsets("T", 0)[1]
        while offset < end:
            answer = client.call(11, pull_fields("T", offset))
            for message in decode_records(answer.body):
                found[message.body.rstrip(b".").decode()] += 1
            offset = int((answer.fields or {})["nextBeginOffset"])
        return found

    def check(self) -> None:
        visible = self.visible()
        assert not [name for name, times in visible.items() if times > 1]
        assert not [name for name in visible if self.outcome(name) == ROLLBACK]

    def settle_all(self) -> None:
        for _ in range(12):
            self.broker.run(31, 1.0)
            self.answer_checks(always=True)
            self.broker.settle()

    def in_half_queue(self) -> set[str]:
        """Transactions whose half messages are in the store."""
        found, offset, client = set(), 0, self.broker.connect()
        end = self.broker.store.queue_offsets(HALF_TOPIC, 0)[1]
        while offset < end:
            answer = client.call(11, pull_fields(HALF_TOPIC, offset))
            found |= {message.message_id for message in decode_records(answer.body)}
            offset = int((answer.fields or {})["nextBeginOffset"])
        return found


def live(world: World, steps: int) -> None:
    actions = [world.begin, world.end, world.end, world.answer_checks, world.time, world.save]
    for _ in range(steps):
        world.random.choice(actions)()


def play(seed: int, *, flush_sync: bool) -> None:
    """One life with five deaths."""
    world = World(seed, flush_sync=flush_sync)
    for _ in range(5):
        live(world, world.random.randrange(10, 60))
        world.crash(kill=world.random.random() < 0.3)
        world.check()
        if flush_sync:
            lost = {n for n in world.safe_ends if world.outcome(n) == COMMIT} - set(world.visible())
            assert not lost, "answered as committed and not visible"
    world.settle_all()
    world.check()
    survived = world.in_half_queue()
    if flush_sync:
        assert world.safe_halves <= survived
    committed = {name for name in survived if world.outcome(name) == COMMIT}
    assert set(world.visible()) == committed
    assert len(world.broker.core.transactions.table) == 0
    asked = world.asked
    world.settle_all()
    assert world.asked == asked, "finished transactions are asked about for ever"


@pytest.mark.parametrize("flush_sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(30))
def test_a_transaction_is_visible_once_or_not_at_all_after_any_crash(
    seed: int, flush_sync: bool
) -> None:
    play(seed, flush_sync=flush_sync)


@pytest.mark.parametrize("flush_sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("given_up", [False, True], ids=["committed", "given up"])
def test_a_crash_between_a_message_and_its_op_does_not_make_two(
    given_up: bool, flush_sync: bool
) -> None:
    """The log ends behind the message; the op that stood next to it is gone."""
    world = World(0, flush_sync=flush_sync)
    world.is_patient = True
    world.begin()
    [(name, (offset, message_id))] = world.halves.items()
    if given_up:
        world.broker.change(transaction_check_max=0)
        world.broker.run(8, 1.0)
    else:
        world.end()
    topic = CHECK_MAX_TOPIC if given_up else "T"
    assert world.broker.store.queue_offsets(topic, 0)[1] == 1
    op_position = UNIT.unpack_from(world.broker.store.reader.units(OP_TOPIC, 0, 0, 1))[0]
    files = world.broker.files.kill()
    path = "/store/commitlog/00000000000000000000"
    content = files.content(path)
    files.put(path, content[:op_position] + bytes(len(content) - op_position))
    world.broker.files = files
    world.crash(kill=True)
    assert len(world.broker.core.transactions.table) == 0
    assert world.broker.store.queue_offsets(OP_TOPIC, 0) == (0, 1)
    world.crash(kill=True)
    world.settle_all()
    assert world.asked == 0
    assert world.broker.store.queue_offsets(topic, 0)[1] == 1
    fields = {
        "producerGroup": "P", "tranStateTableOffset": offset,
        "commitLogOffset": int(message_id[16:], 16), "commitOrRollback": COMMIT,
        "fromTransactionCheck": "false", "msgId": name,
    }  # fmt: skip
    world.client.feed(Command(37, {k: str(v) for k, v in fields.items()}, opaque=5))
    world.broker.settle()
    assert world.visible().total() == (0 if given_up else 1)


# --- planted bugs have to be found


def end_without_op(self: Transactions, transaction: OpenTransaction, outcome: int) -> None:
    """Ops that are kept back in memory and lost."""
    transaction.is_ending = True


def never_the_same(self: OpenTransactions, unique_id: str, digest: int | None = None) -> None:
    """Copies of halves are transactions of their own."""


def progress_of_what_is_written(self: Progress, synced_offset: int) -> int:
    """Offsets that are kept before the disk has the log."""
    return self.value


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Transactions, "append_end", end_without_op),
        (OpenTransactions, "find", never_the_same),
        (Progress, "durable_value", progress_of_what_is_written),
    ],
)
def test_a_planted_bug_is_found(
    owner: type, name: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    for seed in range(100):
        for flush_sync in (False, True):
            try:
                play(seed, flush_sync=flush_sync)
            except AssertionError:
                return
    pytest.fail("200 lives did not show it")
