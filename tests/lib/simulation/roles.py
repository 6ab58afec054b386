"""Replicas whose roles change: disks, each with a whole broker core; one leads, the others follow.

Roles change in order (planned switches, or a pair whose files swap brokerRole), or the master is
killed. The role goes round: of two replicas A→B→A, of three A→B→C→A.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from simulation.stepped import SMALL, START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.broker.replication.state_applier import StateApplier
from sluicemq.broker.replication.state_log import ReplicatedPaths, StateLog
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.follow import LogFollower
from sluicemq.testing.files import CrashableFiles

MASTER = BrokerConfig(broker_name="broker-a", metrics_enable=False)
SLAVE = dataclasses.replace(MASTER, broker_role="SLAVE", broker_id=1)
PLACES = ReplicatedPaths({"config": "/store/config"})
_lives = itertools.count(1)


@dataclasses.dataclass
class Follower:
    """One slave: its broker, the log that it follows and the state that it takes over."""

    broker: SteppedBroker
    following: LogFollower
    applier: StateApplier


class Pair:
    """A master and its slaves, one by default; `leader` is the disk of the one that leads."""

    def __init__(self, *, count: int = 2, config: StoreConfig = SMALL, **options: Any) -> None:
        self.clock = ManualClock()
        self.disks = [CrashableFiles() for _ in range(count)]
        self.leader = 0
        self.config = dataclasses.replace(config, **options)
        self.start()

    def start(self) -> None:
        """Start all, in the roles of now."""
        self.master = self._broker(self.disks[self.leader], MASTER)
        if "T" not in self.master.core.topics.table:
            self.master.core.topics.put(TopicConfig("T", 4, 4))
            self.master.core.topics.document.save()
        self.followers: list[Follower] = []
        for number, disk in enumerate(self.disks):
            if number != self.leader:
                broker = self._broker(disk, SLAVE)
                following = broker.store.start_following()
                applier = StateApplier(disk, PLACES, broker.store.begin_queue)
                self.followers.append(Follower(broker, following, applier))
        self.state_log = StateLog(PLACES, run_id=str(next(_lives)))
        self.state_log.log_end = lambda: self.master.store.written_offset
        self.follow()

    def _broker(self, disk: CrashableFiles, config: BrokerConfig) -> SteppedBroker:
        return SteppedBroker(files=disk, clock=self.clock, config=config, store_config=self.config)

    def follow(self, *, has_state: bool = True) -> None:
        """The slaves catch up, with the master's log and with its state."""
        master = self.master.store
        for follower in self.followers:
            following = follower.following
            at = following.end
            if following.is_empty:
                at = max(master.log_start, at)
            while at < master.written_offset and (data := master.view_log(at, 5000)):
                following.append(at, data)
                following.dispatch()
                at += len(data)
        if has_state:
            self.follow_state()

    def follow_state(self) -> None:
        """The slaves have the master's files; also what it wrote while it closed."""
        found = self.state_log.make_snapshot(self.master.files)
        for follower in self.followers:
            follower.applier.enqueue(self.state_log.run_id, found)
            follower.applier.apply(follower.following.end)

    def switch(self) -> None:
        """Hand the role to the next replica, in order."""
        self.follow()
        self.master.close()
        self.follow_state()
        for follower in self.followers:
            follower.broker.store.close()
        self._next()

    def fail_over(self) -> None:
        """Kill the master; the next replica has its log, and the state of a moment ago. The killed
        one comes back as a slave."""
        self.follow(has_state=False)
        for follower in self.followers:
            follower.broker.store.tick()
            follower.broker.store.sync()
        self._next()

    def _next(self) -> None:
        self.disks = [disk.kill() for disk in self.disks]
        self.leader = (self.leader + 1) % len(self.disks)
        self.start()

    def send(self, due_ms: int, **more: str) -> Any:
        """Send a message that is due `due_ms` after the beginning."""
        properties = {"UNIQ_KEY": f"A{due_ms}", "TIMER_DELIVER_MS": str(START_MS + due_ms), **more}
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        answer = self.master.connect().call(310, send_fields(properties=text), b"%d" % due_ms)
        assert answer.code == 0, answer.remark
        return answer

    def run(self, seconds: float, *, saves_s: float = 1.0) -> None:
        """Time passes on the master; it saves its timers now and then, and the slaves follow."""
        left_s = seconds
        while left_s > 0:
            step_s = min(saves_s, left_s)
            self.master.run(step_s, step_s=0.1)
            left_s -= step_s
            if step_s == saves_s:
                for step in self.master.core.delayed.timers.save():
                    step()
            self.follow()

    def bodies(self) -> list[int]:
        """Return the numbers of the messages that are delivered."""
        result = self.master.store.reader.read("T", 0, 0, 100_000, 1 << 26)
        return [int(message.body) for message in decode_records(b"".join(result.data))]

    @property
    def now_ms(self) -> int:
        """The time since the beginning (ms)."""
        return self.clock.now_ms() - START_MS


CHANGES: dict[str, Callable[[Pair], None]] = {"switched": Pair.switch, "killed": Pair.fail_over}
