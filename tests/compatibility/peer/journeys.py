"""The journey of a store: brokers of both kinds open it in turn, add to it, and end, by an orderly
stop or by kill -9.

What a broker holds is looked at with the real client and tools, once when it is up and once before
it ends. The journey only records (`Stage`); what has to hold is for the tests to say.
"""

import hashlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer.clusters import SOURCE
from peer.drivers import Driver, Event
from peer.stores import KILL, SMALL_FILES, House, auditor, await_text, house
from waiting import limit, wait_for

TOPIC, QUEUES = "Texchange", 8
MANY, MANY_QUEUES = "Tmany", 24
ODD, ODD_QUEUES = "Todd", 4
LONG = "%RETRY%" + "g" * 190
GROUP = "Gexchange"
# Of 5.x, made by the real broker: their files are its own, and only it is asked for them.
FOREIGN = {"Tcompact": "cleanup.policy=COMPACTION", "Tbatch": "queue.type=BatchCQ"}
FOREIGN_COUNT = 30
"""Messages that each of them gets."""
FOREIGN_WAIT_S = 60
ODDITIES = Path(__file__).parent / "oddities.py"

Key = tuple[str, int, int]
"""Topic, queue, queue offset."""

# What both kinds of broker write, each in its own way; everything else must stay as it is found.
SHARED = re.compile(
    r"((commitlog|consumequeue|index)/.*|checkpoint|abort(\.bak)?|lock"
    r"|config/(topics|subscriptionGroup|consumerOffset|delayOffset|consumerFilter)\.json(\.bak)?"
    r"|timerlog/.*|timerwheel(\.\d+)?|config/(timercheck|timermetrics)(\.bak)?"
    r"|columns/.*|config/sluice.*|replica\.json|timerwheel\.identity|config/.*\.identity)"
    r"(\.tmp)?"  # what a killed broker was writing
)


@dataclass
class Look:
    """What client and tools say of a broker, by key."""

    queues: dict[tuple[str, int], Event] = field(default_factory=dict)
    messages: dict[Key, Event] = field(default_factory=dict)
    topics: dict[str, Event] = field(default_factory=dict)
    groups: dict[str, Event] = field(default_factory=dict)
    offsets: dict[tuple[str, int], Event] = field(default_factory=dict)


@dataclass
class Stage:
    """One broker's life in the store, and what is there afterwards."""

    kind: str
    stop: signal.Signals
    found: dict[str, str]
    """The key index: offset ids by key, as found at the start."""
    viewed: dict[str, Event]
    """Messages by their offset id, at the start."""
    first: Look
    sent: list[Event]
    last: Look
    foreign: list[Event]
    """What is in the topics that only the real broker can have, at the end; see FOREIGN."""
    changed: list[str]
    """The files that are not shared and that our broker has changed, made or removed."""
    offline: set[tuple[str, int, int, str]]
    """Topic, queue, offset and offset id of all that our reader finds in the stopped store."""
    verified: str
    """What `sluice store verify` finds in it; empty when nothing."""


@dataclass
class Journey:
    """All stages, in order, and what mqadmin printed on the way."""

    release: str
    stages: list[Stage] = field(default_factory=list)
    printed: dict[str, str] = field(default_factory=dict)

    def sent_before(self, number: int) -> list[Event]:
        return [event for stage in self.stages[:number] for event in stage.sent]


class Traveller:
    """Takes a store through its stages."""

    def __init__(self, place: House, eye: Driver) -> None:
        self._place = place
        self._eye = eye
        self._topics = [TOPIC, MANY, ODD]
        self.journey = Journey(place.release)

    def call(self, command: str, **options: object) -> list[Event]:
        return self._eye.call(command, ns=self._place.name_server, **options)

    def mqadmin(self, *words: str) -> str:
        return str(self.call("admin", words="\n".join(words))[0]["text"])

    def oddities(self, *words: str) -> None:
        """Records that no client of ours or theirs would send this way; see oddities.py."""
        settings = [f"{key}={value}" for key, value in (SMALL_FILES | self._place.settings).items()]
        command = [sys.executable, str(ODDITIES), str(self._place.store), *words, *settings]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit(60),
            env={"PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        assert result.returncode in (0, -KILL), result.stderr
        if "long" in words:
            self._topics.append(LONG)

    def stage(self, kind: str, stop: signal.Signals, *, adds: bool, restores: bool = False) -> None:
        """Start a broker of this kind, look, maybe add and look again, end it. `restores`: what the
        next one gets is a backup that was made while this one ran."""
        journey, number = self.journey, len(self.journey.stages)
        before = foreign_files(self._place.store)
        opened = self._place.sluice if kind == "sluice" else self._place.java
        with opened(stop):
            if number == 0:
                self._create()
            found, viewed = self._query(journey.sent_before(number))
            first = self.look()
            if kind == "java" and any(found.values()):  # else mqadmin ends its whole process
                self._print(f"{number} ", next(key for key, ids in found.items() if ids))
            sent = self._add(number) if adds else []
            last = self.look() if adds else first
            foreign = self._foreign(number) if kind == "java" else []
            if adds and stop == KILL:
                self._await_offsets(number)
            if restores:
                sluice_store("backup", self._place.store, self._place.directory / "backup")
        store = self._place.store
        after = before if kind == "java" else foreign_files(store)
        changed = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        offline, verified = read_offline(store), verify(store)
        journey.stages.append(
            Stage(kind, stop, found, viewed, first, sent, last, foreign, changed, offline, verified)
        )
        if restores:
            shutil.rmtree(store)
            sluice_store("restore", self._place.directory / "backup", store)

    def _create(self) -> None:
        counts = {TOPIC: QUEUES, MANY: MANY_QUEUES, ODD: ODD_QUEUES, f"%RETRY%{GROUP}": 2, LONG: 1}
        topics = [f"{topic}:{counts[topic]}" for topic in (*self._topics, f"%RETRY%{GROUP}")]
        self.call("create", broker=self._place.broker, topics=",".join(topics), group=GROUP)

    def look(self) -> Look:
        look = Look()
        for event in self.call("audit", topics=",".join(self._topics)):
            place = (event["topic"], event["queue"])
            if event["event"] == "queue":
                look.queues[place] = event
            else:
                look.messages[(*place, event["offset"])] = event
        tables = self.call("tables", broker=self._place.broker, group=GROUP, topic=TOPIC)
        for event in tables:
            if event["event"] == "topic":
                look.topics[event["name"]] = event
            elif event["event"] == "group":
                look.groups[event["name"]] = event
            else:
                look.offsets[event["topic"], event["queue"]] = event
        return look

    def _query(self, sent: Sequence[Event]) -> tuple[dict[str, str], dict[str, Event]]:
        """Some of what was sent, by its key, by its unique id, by its offset id."""
        some = [event for event in sent if event["topic"] == TOPIC][::9]
        events = self.call(
            "query", topic=TOPIC,
            keys=",".join(["nosuch", *(event["keys"].split()[0] for event in some)]),
            # Java stores the id of a batch, not their own, in its messages.
            uniques=",".join(event["id"] for event in some if not event["batch"]),
            ids=",".join(event["offset_id"] for event in some),
        )  # fmt: skip
        found = {event["key"]: event["ids"] for event in events if event["event"] == "found"}
        viewed = {event["offset_id"]: event for event in events if event["event"] == "viewed"}
        return found, viewed

    def _print(self, prefix: str, key: str) -> None:
        """What an operator would ask mqadmin."""
        last = self.journey.stages[-1].sent[0]
        topic = () if self.journey.release.startswith("4.") else ("-t", TOPIC)
        for words in (
            ("queryMsgByKey", "-t", TOPIC, "-k", key),
            ("queryMsgById", *topic, "-i", last["offset_id"]),
            ("consumerProgress", "-g", GROUP),
        ):
            self.journey.printed[prefix + words[0]] = self.mqadmin(*words)

    def _add(self, number: int) -> list[Event]:
        prefix = f"s{number}"
        sent = self.call(
            "send", topic=TOPIC, queues=QUEUES, plain=60, large=4, batches=2, size=1000,
            prefix=prefix,
        )  # fmt: skip
        sent += self.call(
            "send", topic=MANY, queues=MANY_QUEUES, plain=48, size=200, prefix=f"m{number}"
        )
        offsets = ",".join(f"{queue}:{3 * number + queue + 1}" for queue in range(QUEUES // 2))
        self.call("commit", topic=TOPIC, group=GROUP, offsets=offsets)
        return sent

    def _foreign(self, number: int) -> list[Event]:
        if self.journey.release.startswith("4."):
            return []
        if number == 1:
            for topic, attribute in FOREIGN.items():
                self.mqadmin(
                    "updateTopic", "-b", self._place.broker, "-t", topic, "-r", "1", "-w", "1",
                    "-a", f"+{attribute}",
                )  # fmt: skip
                self.call("send", topic=topic, queues=1, batches=3, size=100, prefix="f")
        events: list[Event] = []

        def are_there() -> bool:
            """What is stored is not readable at once, of compaction least of all."""
            events[:] = self.call("audit", topics=",".join(FOREIGN))
            found = sum(event["event"] == "message" for event in events)
            return found >= FOREIGN_COUNT * len(FOREIGN)

        wait_for(are_there, FOREIGN_WAIT_S)
        return events

    def _await_offsets(self, number: int) -> None:
        """Consumer offsets go to disk by a timer."""
        wanted = rf'"{TOPIC}@{GROUP}":\s*{{[^}}]*"?3"?:\s*{3 * number + 4}\b'
        await_text(self._place.store / "config" / "consumerOffset.json", wanted)


def foreign_files(store: Path) -> dict[str, str]:
    """The digests of the files that only one kind of broker knows."""
    names = {path.relative_to(store).as_posix(): path for path in store.rglob("*")}
    return {
        name: hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else ""
        for name, path in names.items()
        if path.is_file() and not SHARED.fullmatch(name)
    }


def read_offline(store: Path) -> set[tuple[str, int, int, str]]:
    from sluicemq.model.ids import encode_host, offset_message_id
    from sluicemq.record.codec import decode_records
    from sluicemq.store.readonly import StoreReader

    reader = StoreReader.open(str(store))
    found = set()
    for topic, queue in reader.queues():
        low, high = reader.queue_offsets(topic, queue)
        while low < high:
            result = reader.read(topic, queue, low, 1000, 1 << 24)
            for message in decode_records(b"".join(result.data)):
                name = offset_message_id(encode_host(message.store_host), message.physical_offset)
                found.add((topic, queue, message.queue_offset, name))
            low = result.next_offset
    reader.close()
    return found


def sluice_store(*words: str | Path) -> None:
    command = [sys.executable, "-m", "sluicemq", "store", *map(str, words)]
    subprocess.run(command, check=True, timeout=limit(60), env={"PYTHONPATH": str(SOURCE)})


def verify(store: Path) -> str:
    command = [sys.executable, "-m", "sluicemq", "store", "verify", "--quiet", str(store)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=limit(60),
        env={"PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    return result.stdout + result.stderr if result.returncode else ""


def travel(
    directory: Path, release: str, plan: Sequence[tuple[str, signal.Signals]], **settings: str
) -> Journey:
    """The whole journey: `plan` says kind of broker and kind of end of each stage. What a `saved`
    broker of ours leaves is a backup."""
    directory.mkdir()
    with house(directory, release, **settings) as place:
        eye = auditor(directory, release)
        try:
            traveller = Traveller(place, eye)
            traveller.oddities("" if release.startswith("4.") else "long", str(int(plan[0][1])))
            for number, (kind, stop) in enumerate(plan):
                traveller.stage(
                    kind.replace("saved", "sluice"), stop, adds=number < len(plan) - 1,
                    restores=kind == "saved",
                )  # fmt: skip
            return traveller.journey
        finally:
            eye.close()
