"""The route table against a model that is as simple as the rules allow.

The model keeps one flat set of facts (broker, id) -> address and (topic, broker) -> queues and
answers by looking through all of it; the table keeps maps of maps and cleans them up as it goes.
Brokers here are masters and slaves of one kind (no acting masters), in one cluster each.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.model.topic import DataVersion, QueueData, TopicConfig
from sluicemq.nameserver.routes import Registration, RouteTable, run_all_slices

BROKERS = ("a", "b", "c")
TOPICS = ("T", "U", "V")
CLUSTERS = {"a": "one", "b": "one", "c": "two"}
TIMEOUT_MS = 100


@dataclass
class Model:
    addresses: dict[tuple[str, int], str] = field(default_factory=dict)
    queues: dict[tuple[str, str], QueueData] = field(default_factory=dict)
    alive: dict[str, tuple[str, int, DataVersion, int]] = field(default_factory=dict)
    """address -> broker, last registration, edition, connection"""

    def register(
        self, broker: str, broker_id: int, address: str, topics: dict[str, int],
        version: DataVersion, now_ms: int, connection: int,
    ) -> None:  # fmt: skip
        first = (broker, broker_id) not in self.addresses
        for key in [k for k, a in self.addresses.items() if k[0] == broker and a == address]:
            del self.addresses[key]
        self.addresses[broker, broker_id] = address
        changed = first or address not in self.alive or self.alive[address][2] != version
        if broker_id == 0:
            for topic, queues in topics.items():
                if changed or (topic, broker) not in self.queues:
                    self.queues[topic, broker] = QueueData(broker, queues, queues, 6)
        self.alive[address] = (broker, now_ms, version, connection)

    def unregister(self, broker: str, address: str) -> None:
        self.alive.pop(address, None)
        for key in [k for k, a in self.addresses.items() if k[0] == broker and a == address]:
            del self.addresses[key]
        if not any(name == broker for name, _id in self.addresses):
            for key in [k for k in self.queues if k[1] == broker]:
                del self.queues[key]

    def expire(self, now_ms: int) -> None:
        for address, (broker, seen_ms, _version, _connection) in list(self.alive.items()):
            if seen_ms + TIMEOUT_MS < now_ms:
                self.unregister(broker, address)

    def connection_lost(self, lost: int) -> None:
        for address, (broker, _seen, _version, connection) in list(self.alive.items()):
            if connection == lost:
                self.unregister(broker, address)

    def delete_topic(self, topic: str, cluster: str | None) -> None:
        for key in [k for k in self.queues if k[0] == topic]:
            if cluster is None or CLUSTERS[key[1]] == cluster:
                del self.queues[key]

    def route(self, topic: str) -> dict[str, tuple[QueueData, dict[int, str]]]:
        return {
            broker: (
                queues,
                {i: address for (name, i), address in self.addresses.items() if name == broker},
            )
            for (name, broker), queues in self.queues.items()
            if name == topic
        }


brokers = st.sampled_from(BROKERS)
ids = st.integers(0, 2)
topics = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 3))
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("register"), brokers, ids, st.integers(0, 2), topics, st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.tuples(st.just("unregister"), brokers, st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(1, 150)),
        st.tuples(st.just("lost"), st.integers(0, 2)),
        st.tuples(
            st.just("delete"), st.sampled_from(TOPICS), st.sampled_from([None, "one", "two"])
        ),
    ),
    max_size=30,
)  # fmt: skip


def expired(table: RouteTable, now_ms: int) -> list[Registration]:
    gone = table.find_expired(now_ms)
    run_all_slices(table.unregister_lost(gone))
    return gone


def lost(table: RouteTable, connection: object) -> list[Registration]:
    gone = table.registered_by(connection)
    run_all_slices(table.unregister_lost(gone))
    return gone


def address_of(broker: str, number: int) -> str:
    return f"{broker}-{number}:1"


def apply(step: tuple[object, ...], table: RouteTable, model: Model, now_ms: int) -> int:
    match step:
        case (
            "register",
            str(broker),
            int(broker_id),
            int(number),
            dict(named),
            int(edition),
            int(c),
        ):
            address, version = address_of(broker, number), DataVersion(edition, 1)
            configs = {name: TopicConfig(name, count, count) for name, count in named.items()}
            table.register(
                Registration(
                    cluster=CLUSTERS[broker], broker=broker, broker_id=broker_id, address=address,
                    timeout_ms=TIMEOUT_MS, topics=configs, version=version,
                    connection=CONNECTIONS[c],
                ),
                now_ms,
            )  # fmt: skip
            model.register(broker, broker_id, address, named, version, now_ms, c)
        case ("unregister", str(broker), int(number)):
            table.unregister(CLUSTERS[broker], broker, address_of(broker, number))
            model.unregister(broker, address_of(broker, number))
        case ("wait", int(wait_ms)):
            now_ms += wait_ms
            expired(table, now_ms)
            model.expire(now_ms)
        case ("lost", int(connection)):
            lost(table, CONNECTIONS[connection])
            model.connection_lost(connection)
        case ("delete", str(topic), cluster):
            table.delete_topic(topic, cluster)  # type: ignore[arg-type]
            model.delete_topic(topic, cluster)  # type: ignore[arg-type]
    return now_ms


CONNECTIONS = [object() for _ in range(3)]


@settings(max_examples=100, deadline=None)
@given(steps)
def test_the_table_says_what_the_model_says(taken: list[tuple[object, ...]]) -> None:
    table, model, now_ms = RouteTable(), Model(), 0
    for step in taken:
        now_ms = apply(step, table, model, now_ms)
        for topic in TOPICS:
            route, expected = table.find_route(topic), model.route(topic)
            found = {} if route is None else {
                data.broker: (queue, dict(data.addresses))
                for data, queue in zip(route.brokers, route.queues, strict=True)
            }  # fmt: skip
            assert found == expected
        assert set(table.list_topics()) == {topic for topic, _broker in model.queues}
        known = {broker for broker, _id in model.addresses}
        assert {data.broker for data in table.list_brokers()} == known
        assert table.list_clusters() == {
            cluster: sorted(b for b in known if CLUSTERS[b] == cluster)
            for cluster in sorted({CLUSTERS[b] for b in known})
        }
