"""The key index against a model of it in plain Python: any messages, any slices, any restarts."""

import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.index_model import IndexModel
from simulation.stepped import ManualClock
from sluicemq.config import StoreConfig
from sluicemq.record.codec import decode_record, encode_properties
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

EXAMPLES = int(os.environ.get("SLUICEMQ_EXAMPLES", "60"))
HOST = bytes(8)
FOREVER = (1 << 63) - 1
# "Aa" and "BB" have the same hash in Java, "AaAa", "BBBB" and "AaBB" too.
WORDS = ["Aa", "BB", "AaAa", "BBBB", "AaBB", "k1", "日本", "é", "x" * 60, "order-1"]
TOPICS = ["T", "Other", "%RETRY%group", "日本"]

messages = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(TOPICS),
        "unique": st.one_of(st.none(), st.sampled_from(WORDS)),
        "words": st.lists(st.sampled_from([*WORDS, ""]), max_size=4),
        "flag": st.sampled_from([0, 0, 0, 4, 8, 12]),
    }
)
steps = st.one_of(
    st.tuples(st.just("send"), st.lists(messages, min_size=1, max_size=40)),
    st.tuples(st.just("wait"), st.integers(0, 5000)),
    st.tuples(st.just("catch up"), st.integers(0, 3000)),
    st.tuples(st.sampled_from(["tick", "stop", "kill", "remove index"]), st.none()),
)


class Bench:
    """A store with tiny index files, and the model of what is in them."""

    def __init__(self, slots: int, entries: int) -> None:
        self.files = CrashableFiles()
        self.clock = ManualClock()
        self.config = StoreConfig(
            root="/store", commit_log_file_bytes=4096, consume_queue_file_bytes=400,
            index_slots=slots, index_entries=entries,
        )  # fmt: skip
        self.store = self.open()
        self.model = IndexModel(slots, entries)

    def open(self) -> Store:
        return Store.open(self.config, files=self.files, clock=self.clock)

    def send(self, batch: list[dict[str, Any]]) -> None:
        noted = []
        for message in batch:
            properties = {"UNIQ_KEY": message["unique"]} if message["unique"] else {}
            if any(message["words"]):
                properties["KEYS"] = " ".join(message["words"])
            place, _ = self.store.writer.append(
                message["topic"], 0, b"body", encode_properties(properties), 0, 0,
                message["flag"], 1, HOST, HOST,
            )  # fmt: skip
            noted.append(
                (place, message["topic"], self.clock.now_ms(), properties, message["flag"])
            )
        self.store.commit()
        for record in noted:
            self.model.add(*record)

    def do(self, kind: str, value: Any) -> None:
        match kind:
            case "send":
                self.send(value)
            case "wait":
                self.clock.advance(value / 1000)
            case "catch up":
                self.store.keys.catch_up(value)
            case "tick":
                self.clock.advance(11)
                if self.store.tick():
                    self.store.sync()
            case "stop" | "remove index":
                self.store.close()
                if kind == "remove index":
                    for name in self.files.names("/store/index"):
                        self.files.remove(f"/store/index/{name}")
                self.store = self.open()
            case "kill":
                self.files = self.files.kill()
                self.store = self.open()

    def index_files(self) -> list[bytes]:
        names = self.files.names("/store/index")
        return [self.files.content(f"/store/index/{name}") for name in names]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    slots=st.sampled_from([1, 3, 100]),
    entries=st.sampled_from([2, 13, 400]),
    script=st.lists(steps, max_size=12),
)
def test_the_files_are_those_of_the_model(slots: int, entries: int, script: list[Any]) -> None:
    bench = Bench(slots, entries)
    for kind, value in script:
        bench.do(kind, value)
    for (topic, key), places in bench.model.keys.items():
        found = bench.store.keys.find(topic, key, 10_000, 0, FOREVER)
        assert found is not None
        offsets = [decode_record(record).physical_offset for record in found.records]
        assert offsets == places[::-1]
    bench.store.close()
    expected = bench.model.files()
    ours = bench.index_files()
    assert [data[: len(model)] for data, model in zip(ours, expected, strict=True)] == expected


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    script=st.lists(steps, max_size=8), times=st.tuples(st.integers(0, 9000), st.integers(0, 9000))
)
def test_a_range_of_time_is_exact_to_the_millisecond(
    script: list[Any], times: tuple[int, int]
) -> None:
    bench = Bench(7, 60)
    stored: dict[int, int] = {}
    for kind, value in script:
        bench.do(kind, value)
    begin, end = (bench.clock.now_ms() - 9000 + moment for moment in sorted(times))
    for (topic, key), places in bench.model.keys.items():
        found = bench.store.keys.find(topic, key, 10_000, 0, FOREVER)
        assert found is not None
        for record in found.records:
            message = decode_record(record)
            stored[message.physical_offset] = message.store_time_ms
        wanted = [place for place in places[::-1] if begin <= stored[place] <= end]
        found = bench.store.keys.find(topic, key, 10_000, begin, end)
        assert found is not None
        assert [decode_record(record).physical_offset for record in found.records] == wanted


def test_the_model_finds_a_planted_difference() -> None:
    """The oracle itself: another order of two keys, or one entry less, is another file."""
    first, second = IndexModel(3, 9), IndexModel(3, 9)
    first.add(0, "T", 5, {"KEYS": "a b"})
    second.add(0, "T", 5, {"KEYS": "b a"})
    assert first.files() != second.files()
