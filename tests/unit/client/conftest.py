"""A scripted cluster: one name server and brokers that keep messages in lists.

It answers what the client asks, in the simplest way that is right, so that the shells of the client
can be tested against any answer: `broker.script[code] = handler` overrides one request code.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from sluicemq.filter.subscriptions import make_filter, parse_subscription
from sluicemq.model.ids import encode_host, offset_message_id, parse_host, tag_code
from sluicemq.model.topic import BrokerData, GroupConfig, MessageQueue, QueueData, TopicRoute
from sluicemq.net.dispatch import Dispatcher, Peer, encode_response_to
from sluicemq.net.server import RemotingServer
from sluicemq.record.codec import decode_batch, decode_properties, encode_record
from sluicemq.wire import bodies, tables
from sluicemq.wire.frames import Command
from waiting import limit

Handler = Callable[[Command, Peer], Any]


class Never:
    """An outcome: the request is never answered."""


class FakeBroker:
    def __init__(self, cluster: "FakeCluster", name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.address = ""
        self.queues: dict[tuple[str, int], list[bytes]] = {}
        self.tags: dict[tuple[str, int], list[tuple[str | None, dict[str, str]]]] = {}
        self.first: dict[tuple[str, int], int] = {}
        self.committed: dict[tuple[str, str, int], int] = {}
        self.members: dict[str, dict[str, Peer]] = {}
        self.subscriptions: dict[str, dict[str, Any]] = {}
        self.groups_known: set[str] | None = None
        self.parked: list[tuple[Command, Peer]] = []
        self.seen: Counter[int] = Counter()
        self.log: list[tuple[int, dict[str, str]]] = []
        self.script: dict[int, Handler] = {}
        self.silence = Never()
        self.locks: dict[tuple[str, MessageQueue], str] = {}
        handlers: dict[int, Handler] = {
            10: self.send, 310: self.send, 320: self.send, 11: self.pull, 14: self.query_offset,
            15: self.commit, 29: self.by_time, 30: self.max, 31: self.min, 34: self.heartbeat,
            35: self.unregister, 38: self.consumers, 46: self.check, 17: self.create_topic,
            208: self.consume_stats, 202: self.topic_stats, 201: self.all_groups,
            215: self.delete_topic, 36: self.send_back, 41: self.lock, 42: self.unlock,
        }  # fmt: skip
        table = {code: self._counted(code, handler) for code, handler in handlers.items()}
        self.server = RemotingServer(
            Dispatcher(table, handle_outcome=self._deferred), on_disconnect=self.lost
        )

    def _counted(self, code: int, handler: Handler) -> Handler:
        def run(command: Command, peer: Peer) -> Any:
            self.seen[code] += 1
            self.log.append((code, dict(command.fields or {})))
            return self.script.get(code, handler)(command, peer)

        return run

    def _deferred(self, outcome: Any, command: Command, peer: Peer) -> None:
        if not isinstance(outcome, Never):
            raise TypeError(outcome)

    async def start(self, port: int = 0) -> None:
        await self.server.start("127.0.0.1", [port])
        self.address = f"127.0.0.1:{self.server.ports[0]}"

    def lost(self, peer: Peer) -> None:
        for group, members in self.members.items():
            gone = [client for client, known in members.items() if known is peer]
            for client in gone:
                del members[client]
                self.notify(group)

    # ------------------------------------------------------------------------ producing

    def send(self, command: Command, peer: Peer) -> Command:
        fields = command.fields or {}
        topic, queue_id = fields["b"], int(fields["e"])
        if topic not in self.cluster.topics:
            self.cluster.topics[topic] = 4
        body = bytes(command.body)
        if fields["m"] == "true":
            parts = [(flag, bytes(b), bytes(p)) for flag, b, p, _ in decode_batch(body)]
        else:
            parts = [(int(fields["h"]), body, fields["i"].encode())]
        ids: list[str] = []
        first = self.put_all(
            topic, queue_id, parts, int(fields["f"]), ids_to=ids, times=int(fields["j"])
        )
        answer = {
            "msgId": ",".join(ids),
            "queueId": str(queue_id),
            "queueOffset": str(first),
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
        }
        return Command(0, answer)

    def put_all(
        self,
        topic: str,
        queue_id: int,
        parts: list[tuple[int, bytes, bytes]],
        sys_flag: int,
        *,
        ids_to: list[str],
        times: int = 0,
    ) -> int:
        key = (topic, queue_id)
        queue = self.queues.setdefault(key, [])
        tags = self.tags.setdefault(key, [])
        base = self.first.setdefault(key, 0)
        first = base + len(queue)
        host = encode_host(parse_host(self.address))
        for flag, body, properties in parts:
            offset = base + len(queue)
            physical = 1000 * offset + queue_id
            decoded = decode_properties(properties)
            queue.append(
                encode_record(
                    topic=topic, queue_id=queue_id, queue_offset=offset, physical_offset=physical,
                    body=body, properties=properties, flag=flag, sys_flag=sys_flag,
                    born_time_ms=1, born_host=host, store_time_ms=1000 + offset, store_host=host,
                    reconsume_times=times,
                )
            )  # fmt: skip
            tags.append((decoded.get("TAGS"), decoded))
            ids_to.append(offset_message_id(host, physical))
        self.wake(key)
        return first

    def put(self, topic: str, queue_id: int, body: bytes, **properties: str) -> None:
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        self.put_all(topic, queue_id, [(0, body, text.encode())], 0, ids_to=[])

    # ------------------------------------------------------------------------ consuming

    def wake(self, key: tuple[str, int]) -> None:
        parked, self.parked = self.parked, []
        for command, peer in parked:
            fields = command.fields or {}
            if (fields["topic"], int(fields["queueId"])) == key:
                peer.write(encode_response_to(self.answer_pull(command), command))
            else:
                self.parked.append((command, peer))

    def pull(self, command: Command, peer: Peer) -> Any:
        fields = command.fields or {}
        if self.groups_known is not None and fields["consumerGroup"] not in self.groups_known:
            return Command(26, remark="subscription group not exist")
        answer = self.answer_pull(command)
        if answer.code == 19 and int(fields["sysFlag"]) & 2:
            self.parked.append((command, peer))
            return Never()
        return answer

    def answer_pull(self, command: Command) -> Command:
        fields = command.fields or {}
        key = (fields["topic"], int(fields["queueId"]))
        queue, first = self.queues.get(key, []), self.first.get(key, 0)
        offset, last = int(fields["queueOffset"]), first + len(queue)
        header = {"suggestWhichBrokerId": "0", "minOffset": str(first), "maxOffset": str(last)}
        if not first <= offset <= last:
            following = first if offset < first else last
            return Command(21, header | {"nextBeginOffset": str(following)}, remark="OFFSET_MOVED")
        if offset == last:
            return Command(19, header | {"nextBeginOffset": str(offset)}, remark="NOT_FOUND")
        accepts = self._accepts(fields)
        found, at = [], offset
        while at < last and len(found) < int(fields["maxMsgNums"]):
            if accepts(*self.tags[key][at - first]):
                found.append(queue[at - first])
            at += 1
        header["nextBeginOffset"] = str(at)
        if not found:
            return Command(20, header, remark="NO_MATCHED_MESSAGE")
        return Command(0, header, b"".join(found), remark="FOUND")

    def _accepts(self, fields: dict[str, str]) -> Callable[[str | None, dict[str, str]], bool]:
        if int(fields["sysFlag"]) & 4:
            subscription = parse_subscription(
                fields["topic"], fields["subscription"], fields["expressionType"]
            )
        else:
            known = self.subscriptions.get(fields["consumerGroup"], {})
            subscription = known.get(fields["topic"])
            if subscription is None:
                return lambda tag, properties: True
        chosen = make_filter(subscription)
        if chosen is None:
            return lambda tag, properties: True
        return lambda tag, properties: (
            chosen.by_consume_queue(tag_code(tag or "")) and chosen.by_commit_log(properties)
        )

    def query_offset(self, command: Command, peer: Peer) -> Command:
        fields = command.fields or {}
        key = (fields["consumerGroup"], fields["topic"], int(fields["queueId"]))
        offset = self.committed.get(key)
        return Command(22, {}) if offset is None else Command(0, {"offset": str(offset)})

    def commit(self, command: Command, peer: Peer) -> Command:
        fields = command.fields or {}
        key = (fields["consumerGroup"], fields["topic"], int(fields["queueId"]))
        self.committed[key] = int(fields["commitOffset"])
        return Command(0)

    def by_time(self, command: Command, peer: Peer) -> Command:
        fields = command.fields or {}
        return Command(0, {"offset": str(max(0, int(fields["timestamp"]) - 1000))})

    def max(self, command: Command, peer: Peer) -> Command:
        key = self._key(command)
        return Command(0, {"offset": str(self.first.get(key, 0) + len(self.queues.get(key, [])))})

    def min(self, command: Command, peer: Peer) -> Command:
        return Command(0, {"offset": str(self.first.get(self._key(command), 0))})

    @staticmethod
    def _key(command: Command) -> tuple[str, int]:
        fields = command.fields or {}
        return fields["topic"], int(fields["queueId"])

    def send_back(self, command: Command, peer: Peer) -> Command:
        """It says yes, and does nothing: `log` has what was asked."""
        return Command(0)

    def lock(self, command: Command, peer: Peer) -> Command:
        batch = bodies.decode_lock_batch(command.body)
        held = [
            queue
            for queue in batch.queues
            if self.locks.setdefault((batch.group, queue), batch.client_id) == batch.client_id
        ]
        return Command(0, body=bodies.encode_locked_queues(held))

    def unlock(self, command: Command, peer: Peer) -> Command:
        batch = bodies.decode_lock_batch(command.body)
        for queue in batch.queues:
            if self.locks.get((batch.group, queue)) == batch.client_id:
                del self.locks[batch.group, queue]
        return Command(0)

    # ------------------------------------------------------------------------- groups

    def heartbeat(self, command: Command, peer: Peer) -> Command:
        beat = bodies.decode_heartbeat(command.body)
        for consumer in beat.consumers:
            if self.groups_known is not None and consumer.group not in self.groups_known:
                continue
            members = self.members.setdefault(consumer.group, {})
            is_new = beat.client_id not in members
            members[beat.client_id] = peer
            self.subscriptions[consumer.group] = {
                subscription.topic: subscription for subscription in consumer.subscriptions
            }
            if is_new:
                self.notify(consumer.group)
        return Command(0, {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"})

    def unregister(self, command: Command, peer: Peer) -> Command:
        fields = command.fields or {}
        group = fields.get("consumerGroup", "")
        if self.members.get(group, {}).pop(fields["clientID"], None) is not None:
            self.notify(group)
        return Command(0)

    def notify(self, group: str) -> None:
        for peer in set(self.members.get(group, {}).values()):
            peer.send_oneway(Command(40, {"consumerGroup": group}))

    def consumers(self, command: Command, peer: Peer) -> Command:
        members = self.members.get((command.fields or {})["consumerGroup"])
        if not members:
            return Command(1, remark="no consumer for this group")
        return Command(0, {}, bodies.encode_consumer_list(sorted(members)))

    def check(self, command: Command, peer: Peer) -> Command:
        return Command(0)

    # -------------------------------------------------------------------------- admin

    def create_topic(self, command: Command, peer: Peer) -> Command:
        fields = command.fields or {}
        self.cluster.topics[fields["topic"]] = int(fields["readQueueNums"])
        return Command(0)

    def delete_topic(self, command: Command, peer: Peer) -> Command:
        self.cluster.topics.pop((command.fields or {})["topic"], None)
        return Command(0)

    def consume_stats(self, command: Command, peer: Peer) -> Command:
        group = (command.fields or {})["consumerGroup"]
        queues = {}
        for (owner, topic, queue_id), offset in self.committed.items():
            if owner == group:
                last = self.first.get((topic, queue_id), 0) + len(
                    self.queues.get((topic, queue_id), [])
                )
                queues[MessageQueue(topic, self.name, queue_id)] = bodies.QueueProgress(
                    last, offset
                )
        return Command(0, {}, bodies.encode_consume_stats(bodies.ConsumeStats(queues)))

    def topic_stats(self, command: Command, peer: Peer) -> Command:
        topic = (command.fields or {})["topic"]
        queues = {
            MessageQueue(topic, self.name, queue_id): bodies.QueueStats(
                self.first[topic, queue_id], self.first[topic, queue_id] + len(queue), 5
            )
            for (name, queue_id), queue in self.queues.items()
            if name == topic
        }
        return Command(0, {}, bodies.encode_topic_stats(bodies.TopicStats(queues)))

    def all_groups(self, command: Command, peer: Peer) -> Command:
        groups = {group: GroupConfig(group) for group in self.members}
        return Command(0, {}, tables.encode_group_table(tables.GroupTable(groups)))


class FakeCluster:
    """A name server with brokers. `topics` is name -> queues on every broker."""

    def __init__(self) -> None:
        self.topics: dict[str, int] = {}
        self.auto_create = True
        self.brokers: list[FakeBroker] = []
        self.name_server = ""
        self.seen: Counter[str] = Counter()
        self.loop: asyncio.AbstractEventLoop | None = None
        table: dict[int, Handler] = {
            105: self.route, 106: self.cluster_info, 206: self.topic_list,
            216: lambda command, peer: Command(0),
        }  # fmt: skip
        self.server = RemotingServer(Dispatcher(table))

    async def start(self, brokers: int = 1) -> None:
        await self.server.start("127.0.0.1", [0])
        self.name_server = f"127.0.0.1:{self.server.ports[0]}"
        for index in range(brokers):
            broker = FakeBroker(self, f"broker-{'abcdef'[index]}")
            await broker.start()
            self.brokers.append(broker)

    async def close(self) -> None:
        await self.server.close()
        for broker in self.brokers:
            await broker.server.close()

    @property
    def broker(self) -> FakeBroker:
        return self.brokers[0]

    def _brokers(self) -> dict[str, BrokerData]:
        return {
            broker.name: BrokerData(broker.name, "DefaultCluster", {0: broker.address})
            for broker in self.brokers
        }

    def route(self, command: Command, peer: Peer) -> Command:
        topic = (command.fields or {})["topic"]
        self.seen[topic] += 1
        queues = self.topics.get(topic)
        if topic == "TBW102" and self.auto_create:
            queues = 8
        if topic.startswith("%RETRY%"):
            queues = 1
        if queues is None:
            return Command(17, remark="No topic route info")
        route = TopicRoute(
            tuple(self._brokers().values()),
            tuple(QueueData(broker.name, queues, queues, 6) for broker in self.brokers),
        )
        return Command(0, None, bodies.encode_topic_route(route, standard=True))

    def cluster_info(self, command: Command, peer: Peer) -> Command:
        info = bodies.ClusterInfo(
            self._brokers(), {"DefaultCluster": tuple(broker.name for broker in self.brokers)}
        )
        return Command(0, None, bodies.encode_cluster_info(info))

    def topic_list(self, command: Command, peer: Peer) -> Command:
        return Command(0, None, bodies.encode_topic_list(sorted(self.topics)))


@pytest.fixture
async def fake() -> AsyncIterator[FakeCluster]:
    """One broker, in the test's own loop."""
    cluster = FakeCluster()
    await cluster.start()
    yield cluster
    await cluster.close()


@pytest.fixture
async def fake_two() -> AsyncIterator[FakeCluster]:
    """Two brokers, in the test's own loop."""
    cluster = FakeCluster()
    await cluster.start(2)
    yield cluster
    await cluster.close()


@pytest.fixture
def fake_thread() -> Iterator[FakeCluster]:
    """One broker on a thread of its own, for blocking clients."""
    cluster = FakeCluster()
    ready, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        cluster.loop = asyncio.get_running_loop()
        await cluster.start()
        ready.set()
        await stop.wait()
        await cluster.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(limit(5))
    yield cluster
    assert cluster.loop is not None
    cluster.loop.call_soon_threadsafe(stop.set)
    thread.join(limit(5))
