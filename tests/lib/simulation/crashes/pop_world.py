"""A broker whose messages are popped, crashed at any moment; here only what consumers see counts.

    in time      a message that was popped and not acknowledged comes back no later than its
                 deadline while the broker runs, at once when it starts after it; never before
    once         and it comes back once for each time that it was popped
    done         one whose acknowledgement was answered does not come again
    nothing lost in the end every message was acknowledged, or is given away

What was answered stays after a kill, and after a power loss when it is on disk: under SYNC_FLUSH
always. A turn that is cut in the middle leaves things open: then a message may come twice, and that
of an acknowledgement without answer may come or not. A reset gives everything behind it again.
Consumers are slow (they acknowledge too late, or by old handles) and die (nobody knows their
messages any more); the clock jumps in both directions.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from simulation.crashes.disk import Disk
from simulation.crashes.plan import Kind, Violation
from simulation.popping import Held, Popper, messages_of
from simulation.stepped import ManualClock, SteppedBroker, send_fields
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import RequestError, StoreDamagedError, StoreError
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import TopicConfig, pop_retry_topic
from sluicemq.testing.files import CrashableFiles, PowerLost
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import FLAG_RESPONSE, Command, encode
from sluicemq.wire.popping import ReceiptHandle

TOPICS: Final = ("A", "B")
QUEUES: Final = (0,)
GROUPS: Final = ("G", "H")
INVISIBLE_MS: Final = (0, 300, 999, 1000, 1500, 5000, 30_000, 120_000)
CALM_S: Final = 0.2
ROUNDS_MAX: Final = 60
Copy = tuple[bytes, int]
"""A message, and how often it had come back when it was stored."""


@dataclass(slots=True)
class InFlight:
    """A copy that somebody holds; `mark` is where the log ended when that was known. While an
    answer is `awaited` nobody knows whether it is still so. `older` are the handles by which it was
    held before its time was changed: when a power loss undoes the change, the last one is valid."""

    held: Held
    mark: int
    awaited: int = 0
    older: tuple[ReceiptHandle, ...] = ()


@dataclass
class Promises:
    """What a group was told."""

    in_flight: dict[Copy, InFlight] = field(default_factory=dict)
    acknowledged: dict[bytes, int] = field(default_factory=dict)
    """With the end of the log when it was answered."""
    unsure: set[bytes] = field(default_factory=set)
    """It may come again or not."""
    doubled: set[bytes] = field(default_factory=set)
    """It may come twice."""
    copies: dict[Copy, int] = field(default_factory=dict)
    """What has come back, with its place in the log."""
    scanned: dict[str, int] = field(default_factory=dict)
    maybe: set[tuple[str, ReceiptHandle]] = field(default_factory=set)
    """Handles of pops that a power loss may have undone, or not."""

    def known(self, held: Held) -> InFlight | None:
        """If it is in flight by this very handle."""
        known = self.in_flight.get(copy_of(held))
        return known if known is not None and known.held.handle == held.handle else None


def copy_of(held: Held) -> Copy:
    return held.body, held.message.reconsume_times


class PopWorld:
    """One broker, its consumers, and what they were promised."""

    def __init__(self, rng: random.Random) -> None:
        self.store_config = StoreConfig(
            root="/store",
            commit_log_file_bytes=rng.choice((16_384, 65_536)),
            consume_queue_file_bytes=rng.choice((100, 2000)),
            timer_log_file_bytes=8192,
            flush_sync=rng.random() < 0.5,
            flush_thorough_interval_ms=rng.choice((500, 10_000)),
        )
        self.config = BrokerConfig(broker_name="broker-a", metrics_enable=False)
        self.clock = ManualClock()
        self.promises = {group: Promises() for group in GROUPS}
        self.holding: list[tuple[str, Held]] = []
        self.waiting: dict[int, Callable[[bool | None], None]] = {}
        self.serial, self.opaque = 0, 1 << 20  # those of sends are below
        self.calm_s = 0.0
        self.is_over = False
        self.disk = Disk(CrashableFiles(), self._open)
        self._open()

    def _open(self) -> None:
        broker = self.broker = SteppedBroker(
            config=self.config, store_config=self.store_config, files=self.disk.files,
            clock=self.clock,
        )  # fmt: skip
        for topic in TOPICS:
            broker.core.topics.put(TopicConfig(topic, len(QUEUES), len(QUEUES)))
        self.client = broker.connect()
        self.waiting.clear()

    def take(self, kind: str, rng: random.Random) -> str:
        """One step; then what has come back is looked at."""
        try:
            text: str = getattr(self, f"do_{kind}")(rng)
            self._believe()
            self._look()
        except PowerLost as lost:
            self._believe()
            text = f"interrupted at {lost}: {self._restart(rng)}"
        except StoreDamagedError:
            raise
        except (StoreError, OSError, RequestError) as error:
            if not self.disk.is_troubled:
                raise
            self._believe()
            text = f"refused: {error}"
        return text

    # --- answers

    def _answer(self, then: Callable[[bool | None], None]) -> None:
        """The request's answer leaves when its turn is durable: stored, or not; None: unknown."""
        self.opaque += 1
        frame = encode(Command(0, {}, b"", self.opaque, FLAG_RESPONSE))
        self.waiting[self.opaque] = then
        self.broker.core.group_commit.send_after_commit(self.client.peer, frame)

    def _believe(self) -> None:
        for opaque in list(self.client.answers):
            if (then := self.waiting.pop(opaque, None)) is None:
                continue
            code = self.client.answers.pop(opaque).code
            is_late = code == ResponseCode.FLUSH_DISK_TIMEOUT
            has_failed = code and self.broker.store._log.failure is not None
            then(None if is_late or has_failed else code == ResponseCode.SUCCESS)

    @property
    def _mark(self) -> int:
        return 0 if self.store_config.flush_sync else self.broker.store.written_offset

    # --- clients

    def do_send(self, rng: random.Random) -> str:
        topic, queue_id = rng.choice(TOPICS), rng.choice(QUEUES)
        count = rng.randrange(1, 6)
        for _ in range(count):
            self.serial += 1
            request = self.client.request(
                310, send_fields(topic, f"UNIQ_KEY\x01U{self.serial}\x02", e=queue_id),
                b"%d" % self.serial,
            )  # fmt: skip
            self.client.feed(request)
        return f"{count} to {topic}:{queue_id}"

    def do_pop(self, rng: random.Random) -> str:
        group, topic, queue_id = rng.choice(GROUPS), rng.choice(TOPICS), rng.choice(QUEUES)
        if rng.random() < 0.4:
            topic, queue_id = pop_retry_topic(group, topic, is_v2=False), 0
        popper = Popper(self.broker, group, rng.choice(INVISIBLE_MS))
        found = popper.pop(topic, queue_id, rng.randrange(1, 9))
        promises = self.promises[group]
        for held in found:
            self._check_wanted(promises, held.body)

        def popped(is_stored: bool | None) -> None:
            for held in found if is_stored else ():
                body, times = copy_of(held)
                if (body, times + 1) not in promises.copies:  # seen before the answer came
                    promises.in_flight[body, times] = InFlight(held, self._mark)
                self.holding.append((group, held))

        if found:
            self._answer(popped)
        return f"{group} gets {len(found)} of {topic}:{queue_id} for {popper.invisible_ms} ms"

    def do_ack(self, rng: random.Random) -> str:
        """Some messages of one pop, perhaps too late."""
        if not self.holding:
            return "nothing"
        group, first = rng.choice(self.holding)
        same = [
            held for name, held in self.holding
            if (name, held.topic, held.handle._replace(offset=0))
            == (group, first.topic, first.handle._replace(offset=0))
        ]  # fmt: skip
        some = rng.sample(same, rng.randrange(1, len(same) + 1))
        promises = self.promises[group]
        Popper(self.broker, group).acknowledge(*some)
        known = self._await(promises, some)

        def answered(is_stored: bool | None) -> None:
            for held in self._answered(promises, known, is_stored):
                promises.acknowledged[held.body] = self._mark
                promises.unsure.discard(held.body)
                del promises.in_flight[copy_of(held)]

        self._answer(answered)
        if rng.random() < 0.7:
            self.holding = [it for it in self.holding if not any(it[1] is one for one in some)]
        return f"{group}: {[held.body for held in some]} of {first.topic}, {len(known)} in time"

    def do_change(self, rng: random.Random) -> str:
        """Another time for one message, perhaps by an old handle."""
        if not self.holding:
            return "nothing"
        group, held = rng.choice(self.holding)
        promises, invisible_ms = self.promises[group], rng.choice(INVISIBLE_MS)
        try:
            changed = Popper(self.broker, group).change(held, invisible_ms)
        except RequestError as error:
            known = promises.known(held)
            if known and not known.awaited and held.body not in promises.doubled:
                raise Violation(f"message {held.body!r} is in flight: {error}") from error
            return f"{group}: {held.body!r} is not in flight"
        known_ones = self._await(promises, [held])

        def answered(is_stored: bool | None) -> None:
            for old in self._answered(promises, known_ones, is_stored):
                older = (*promises.in_flight[copy_of(old)].older, old.handle)
                promises.in_flight[copy_of(old)] = InFlight(changed, self._mark, older=older)
            if is_stored:
                self.holding.append((group, changed))

        self._answer(answered)
        return f"{group}: {held.body!r} for {invisible_ms} ms"

    def _await(self, promises: Promises, some: list[Held]) -> list[Held]:
        """Those that are in flight: until the answer is there, nobody knows."""
        promises.unsure |= {
            held.body for held in some if (held.topic, held.handle) in promises.maybe
        }
        known = [held for held in some if promises.known(held)]
        for held in known:
            promises.in_flight[copy_of(held)].awaited += 1
        return known

    def _answered(
        self, promises: Promises, some: list[Held], is_stored: bool | None
    ) -> Iterator[Held]:
        """Those for which it is as was asked."""
        for held in some:
            known = promises.known(held)
            if is_stored is None:
                promises.unsure.add(held.body)
                promises.in_flight.pop(copy_of(held), None)
            elif known is not None:
                known.awaited -= 1
                if is_stored:
                    yield held

    def do_die(self, rng: random.Random) -> str:
        """Nobody knows any more what a consumer held."""
        count = len(self.holding)
        self.holding = [one for one in self.holding if rng.random() < 0.5]
        return f"{count - len(self.holding)} messages"

    def do_reset(self, rng: random.Random) -> str:
        """222, back; answered when it is on disk."""
        group, topic, queue_id = rng.choice(GROUPS), rng.choice(TOPICS), rng.choice(QUEUES)
        core, promises = self.broker.core, self.promises[group]
        end = core.checkpoints.resolve_next_offset(group, topic, queue_id)
        if end <= 0:
            return "nothing to go back to"
        offset = rng.randrange(end)
        again = {message.body for message in messages_of(self.broker, topic, queue_id, offset)}
        promises.unsure |= again
        promises.doubled |= again
        core.offsets.reset(group, topic, queue_id, offset)
        # What lies before it is done, it says; else only what is known to be in flight comes back.
        synced = self.broker.store.synced_offset
        known = {body for (body, _), one in promises.in_flight.items() if one.mark <= synced}
        known |= {body for body, _ in promises.copies}
        before = messages_of(self.broker, topic, queue_id)[:offset]
        promises.unsure |= {message.body for message in before} - known
        self._save_offsets()
        if not self.disk.is_troubled:
            promises.unsure -= again
            for body in again:
                promises.acknowledged.pop(body, None)
        return f"{group} of {topic}:{queue_id} from {end} to {offset}"

    # --- what a broker does by itself

    def do_step(self, rng: random.Random) -> str:
        """The turn ends."""
        self.broker.step()
        return f"{self.broker.syncs_waiting} fsyncs wait"

    def do_fsync(self, rng: random.Random) -> str:
        """An fsync ends."""
        if self.broker.syncs_waiting:
            self._guard(self.broker.finish_sync)
        return f"{self.broker.syncs_waiting} wait"

    def do_tick(self, rng: random.Random) -> str:
        """Time passes, and whatever is due has come by then."""
        seconds = rng.choice((0.05, 0.3, 1.0, 3.0, 20.0))
        self.broker.advance(seconds)
        self._guard(self.broker.settle)
        if rng.random() < 0.5 and self.broker.store.tick():
            self._guard(self.broker.store.sync)
        self._believe()
        self._look()
        self._check_deadlines()
        return f"{seconds} s later"

    def do_jump(self, rng: random.Random) -> str:
        """Somebody sets the clock."""
        change_ms = rng.choice((-120_000, -5000, -500, 500, 5000, 3_600_000))
        self.clock._start_ms += change_ms
        return f"by {change_ms} ms"

    def do_save(self, rng: random.Random) -> str:
        """Chores: tables, and the timer's files."""
        if rng.random() < 0.3:
            self._guard(self.broker.core.delayed.save)
            return "the timer"
        self._save_offsets()
        return "offsets"

    def _save_offsets(self) -> None:
        core = self.broker.core
        if core.checkpoints.has_uncommitted_offsets:
            self._guard(self.broker.store.sync)
        for document in (
            core.offsets.document, core.offsets.resets_document, core.checkpoints.document
        ):  # fmt: skip
            self._guard(document.save)

    def _guard(self, work: Callable[[], object]) -> None:
        """An error that was injected may strike in it."""
        try:
            work()
        except (StoreError, OSError):
            if not self.disk.is_troubled:
                raise
            self.broker._syncs.clear()

    # --- what the world does

    def do_arm(self, rng: random.Random) -> str:
        return self.disk.arm(rng)

    def do_fault(self, rng: random.Random) -> str:
        return self.disk.inject(rng) if rng.random() < 0.7 else self.disk.fill(rng)

    def do_mend(self, rng: random.Random) -> str:
        self.calm_s = self.clock.monotonic_s()
        self.disk.is_troubled = self.broker.store._log.failure is not None
        return self.disk.mend()

    def do_crash(self, rng: random.Random) -> str:
        return self._restart(rng, power=True)

    def do_kill(self, rng: random.Random) -> str:
        return self._restart(rng, power=False)

    def do_stop(self, rng: random.Random) -> str:
        """In order."""
        self._guard(self.broker.close)
        self._believe()
        return self._restart(rng, power=rng.random() < 0.5)

    def _restart(self, rng: random.Random, *, power: bool | None = None) -> str:
        store = self.broker.store
        synced, has_failed = store.synced_offset, store._log.failure is not None
        self.disk.restart(rng, power=power)
        is_lossy = self.disk.power_lost or has_failed
        for promises in self.promises.values():
            self._survive(promises, synced if is_lossy else None)
        self.calm_s = self.clock.monotonic_s() - CALM_S
        self.broker.advance(0.0)
        self.broker.settle()
        self._look()
        self._check_deadlines()
        return "power loss" if is_lossy else "kill"

    def _survive(self, promises: Promises, synced: int | None) -> None:
        """What is still promised, when all behind `synced` may be gone."""
        for copy, known in list(promises.in_flight.items()):
            if known.awaited:
                promises.unsure.add(copy[0])
            if known.awaited or (synced is not None and known.mark > synced):
                handles = (known.held.handle, *known.older)
                promises.maybe |= {(known.held.topic, handle) for handle in handles}
                del promises.in_flight[copy]
        if synced is not None:
            lost = {body for body, mark in promises.acknowledged.items() if mark > synced}
            promises.unsure |= lost
            promises.doubled |= {
                body for (body, _), place in promises.copies.items() if place >= synced
            }
        found: dict[Copy, int] = {}
        for topic in TOPICS:
            retry = pop_retry_topic(self._name_of(promises), topic, is_v2=False)
            messages = messages_of(self.broker, retry)
            promises.scanned[retry] = len(messages)
            for message in messages:
                copy = message.body, message.reconsume_times
                if copy not in promises.copies:  # its turn was cut
                    promises.doubled.add(message.body)
                found[copy] = message.physical_offset
        promises.copies = found

    def _name_of(self, promises: Promises) -> str:
        return next(group for group, one in self.promises.items() if one is promises)

    # --- looking

    def _check_wanted(self, promises: Promises, body: bytes) -> None:
        if body in promises.acknowledged and body not in promises.unsure | promises.doubled:
            raise Violation(f"message {body!r} was acknowledged and is given away again")

    def _look(self) -> None:
        """What has come back since the last look."""
        for group, promises in self.promises.items():
            for topic in TOPICS:
                retry = pop_retry_topic(group, topic, is_v2=False)
                begin = promises.scanned.get(retry, 0)
                for message in messages_of(self.broker, retry, 0, begin):
                    promises.scanned[retry] = message.queue_offset + 1
                    self._returned(promises, message)
                    copy = message.body, message.reconsume_times
                    promises.copies[copy] = message.physical_offset

    def _returned(self, promises: Promises, message: StoredMessage) -> None:
        body, times = message.body, message.reconsume_times
        known = promises.in_flight.pop((body, times - 1), None)
        if body in promises.doubled:
            return
        if (body, times) in promises.copies:
            raise Violation(f"message {body!r} came back twice for the {times}. time")
        is_known = known is not None and not known.awaited
        # A turn has the time of its beginning, and the clock may have been set since. Deadlines are
        # times of the clock that is never set back.
        time_ms = max(message.store_time_ms, self.broker.core.steady_clock.now_ms())
        if known and is_known and known.held.handle.deadline_ms > time_ms:
            raise Violation(f"message {body!r} came back before {known.held.handle}")
        self._check_wanted(promises, body)

    def _check_deadlines(self) -> None:
        """Whatever is due has come back, when the broker was able to work."""
        if self.disk.is_troubled or self.clock.monotonic_s() - self.calm_s < CALM_S:
            return
        now_ms = self.broker.core.steady_clock.now_ms()
        for promises in self.promises.values():
            for (body, _), known in promises.in_flight.items():
                is_late = known.held.handle.deadline_ms <= now_ms
                if is_late and not known.awaited and body not in promises.doubled:
                    late_ms = now_ms - known.held.handle.deadline_ms
                    raise Violation(f"message {body!r} is invisible {late_ms} ms too long")

    def finish(self) -> None:
        """The power fails once more; then consumers that acknowledge everything get the rest."""
        self.disk.files.power_fails_after = None
        self._restart(random.Random(0), power=True)
        given: dict[str, set[bytes]] = {group: set() for group in GROUPS}
        quiet = 0
        for _ in range(ROUNDS_MAX):
            quiet = 0 if self._drain(given) else quiet + 1
            if quiet == 2:
                break
            self.broker.run(2 * max(INVISIBLE_MS) / 1000, step_s=max(INVISIBLE_MS) / 1000)
        else:
            raise Violation("there is no end of messages")
        for topic in TOPICS:
            for queue_id in QUEUES:
                there = {message.body for message in messages_of(self.broker, topic, queue_id)}
                for group, promises in self.promises.items():
                    lost = there - given[group] - promises.acknowledged.keys() - promises.unsure
                    if lost:
                        raise Violation(f"group {group} never gets {sorted(lost)} of {topic}")

    def _drain(self, given: dict[str, set[bytes]]) -> int:
        """Pop and acknowledge whatever there is; how many that were."""
        count = 0
        for group, promises in self.promises.items():
            popper = Popper(self.broker, group, 60_000)
            for topic in TOPICS:
                retry = pop_retry_topic(group, topic, is_v2=False)
                for name, queue_id in (*((topic, queue_id) for queue_id in QUEUES), (retry, 0)):
                    while held := popper.pop(name, queue_id):
                        for one in held:
                            self._check_wanted(promises, one.body)
                            given[group].add(one.body)
                        popper.acknowledge(*held)
                        self.broker.settle()
                        count += len(held)
        return count


POP: Final = Kind(
    "pop",
    PopWorld,
    {
        "send": 8, "pop": 12, "ack": 8, "change": 4, "die": 1, "reset": 2, "step": 8, "fsync": 6,
        "tick": 10, "jump": 1, "save": 5, "arm": 2, "fault": 1, "mend": 2, "crash": 2, "kill": 2,
        "stop": 1,
    },
)  # fmt: skip
