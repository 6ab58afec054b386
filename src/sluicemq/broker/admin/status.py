"""What the tools ask about the running broker: 25 26 28 202 203 204 208 300."""

import logging
from dataclasses import dataclass, field
from typing import Final

from sluicemq.acl.loading import Source
from sluicemq.broker.admin.retention import GroupWatch
from sluicemq.broker.consume.clients import Consumers, Member, Producers
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.registration import credentials_of
from sluicemq.broker.runtime import Rates, RuntimeInfo
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topic, Topics
from sluicemq.clock import Clock
from sluicemq.config import BrokerConfig, Part, change_settings, edit_properties, settings_text
from sluicemq.errors import ConfigurationError, RequestError
from sluicemq.files import Files, edit_text, read_text
from sluicemq.model.topic import DataVersion, MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.net.tls import server_tls
from sluicemq.store.store import Store
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    ConsumerGroupRequest,
    GetBrokerConfigResponse,
    GetConsumeStatsRequest,
    GetProducerConnectionsRequest,
    TopicRequest,
)

log = logging.getLogger(__name__)

BLACK_LIST: Final = frozenset({"brokerConfigPath"})


@dataclass(slots=True, eq=False)
class Admin:
    """The request family of the tools."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    producers: Producers
    store: Store
    runtime: RuntimeInfo
    rates: Rates
    watch: GroupWatch
    files: Files
    clock: Clock
    version: DataVersion = field(init=False)

    def __post_init__(self) -> None:
        self.version = DataVersion(0, self.clock.now_ms())

    # ---------------------------------------------------------------------------- the broker

    def change_config(self, command: Command, peer: Peer) -> Command:
        """25: changes settings and writes them to the broker's file. What takes effect at the next
        start is named in the remark."""
        settings = self.settings
        try:
            change = change_settings(
                settings.in_force,
                settings.at_next_start,
                bytes(command.body).decode("utf-8", "replace"),
                BLACK_LIST,
            )
            if change.pending:
                self._check_start(change.at_next_start[Part.BROKER])
        except ConfigurationError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        path = settings.broker.config_path
        if path and change.entries:
            old = read_text(self.files, path) or ""
            edit_text(self.files, path, edit_properties(old, change.entries))
        settings.apply(change)
        self.version = DataVersion(self.version.counter + 1, self.clock.now_ms())
        names = ", ".join(change.entries) or "nothing"
        log.info("%s changed the configuration: %s", peer.remote, names)
        for warning in change.warnings:
            log.warning("%s", warning)
        waits = f"kept for the next start: {', '.join(change.pending)}" if change.pending else None
        return Command(ResponseCode.SUCCESS, remark=waits)

    def _check_start(self, config: BrokerConfig) -> None:
        """Raises ConfigurationError for what the next start would stumble over."""
        from sluicemq.net.openssl import server_contexts  # noqa: PLC0415 - needs OpenSSL

        credentials_of(config.inner_credentials)
        server_contexts(server_tls(config))
        if config.acl_enable:
            source = Source.of(self.files, config)
            source.read(source.texts())

    def config(self, command: Command, peer: Peer) -> Command:
        """26."""
        text = settings_text(self.settings.in_force, self.settings.at_next_start)
        version = tables.encode_data_version(self.version).decode()
        fields = encode_header(GetBrokerConfigResponse(version=version))
        return Command(ResponseCode.SUCCESS, fields, text.encode())

    def runtime_info(self, command: Command, peer: Peer) -> Command:
        """28."""
        return Command(ResponseCode.SUCCESS, body=bodies.encode_kv_table(self.runtime.table()))

    # --------------------------------------------------------------------- topics and groups

    def topic_stats(self, header: TopicRequest, command: Command, peer: Peer) -> Command:
        """202."""
        topic = self.topics.known(header.topic)
        queues = {}
        for queue_id in range(topic.queues):
            low, high = self.store.queue_offsets(topic.name, queue_id)
            time_ms = self.store.reader.store_time_ms(topic.name, queue_id, high - 1) if high else 0
            queue = MessageQueue(topic.name, self.settings.broker.broker_name, queue_id)
            queues[queue] = bodies.QueueStats(low, high, max(time_ms, 0))
        stats = bodies.TopicStats(queues, self.rates.rate(f"in:{topic.name}", 60))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_stats(stats))

    def consume_stats(
        self, header: GetConsumeStatsRequest, command: Command, peer: Peer
    ) -> Command:
        """208: a topic, some topics, or all on which the group has offsets."""
        names = set(filter(None, (header.topic_list or "").split(";")))
        if header.topic:
            names.add(header.topic)
        if not names:
            names = self.offsets.topics_of(header.group)
            group = self.consumers.groups.get(header.group)
            names |= set(group.watches) if group is not None else set()
        queues: dict[MessageQueue, bodies.QueueProgress] = {}
        for name in sorted(names):
            topic = self.topics.get(name)
            if topic is None:
                log.info("group %s has offsets of topic %s, which is gone", header.group, name)
                continue
            queues |= self._progress(header.group, topic)
        rate = sum(self.rates.rate(f"out:{name}@{header.group}", 60) for name in names)
        stats = bodies.ConsumeStats(queues, rate)
        return Command(ResponseCode.SUCCESS, body=bodies.encode_consume_stats(stats))

    def _progress(self, group: str, topic: Topic) -> dict[MessageQueue, bodies.QueueProgress]:
        found = {}
        for queue_id in range(topic.config.read_queues):
            end = self.store.queue_offsets(topic.name, queue_id)[1]
            known = self.offsets.committed(group, topic.name, queue_id)
            risk = self.watch.risk(topic.name, queue_id, known)
            committed = max(known, 0)
            time_ms = self.store.reader.store_time_ms(topic.name, queue_id, committed - 1)
            queue = MessageQueue(topic.name, self.settings.broker.broker_name, queue_id)
            found[queue] = bodies.QueueProgress(
                end,
                committed,
                max(time_ms, 0),
                max(committed, self.offsets.fetched(group, topic.name, queue_id)),
                *(risk or ()),
            )
        return found

    def groups_of_topic(self, header: TopicRequest, command: Command, peer: Peer) -> Command:
        """300: groups that subscribe to the topic now or have offsets of it."""
        name = header.topic
        groups = self.consumers.groups_of(name) | self.offsets.groups_of(name)
        return Command(ResponseCode.SUCCESS, body=bodies.encode_group_list(sorted(groups)))

    # -------------------------------------------------------------------------------- clients

    def consumer_connections(
        self, header: ConsumerGroupRequest, command: Command, peer: Peer
    ) -> Command:
        """203."""
        name = header.group
        group = self.consumers.groups.get(name)
        if group is None:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online"
            )
        answer = bodies.ConsumerConnections(
            tuple(_connection(member) for member in group.members.values()),
            group.consume_type,
            group.message_model,
            group.consume_from_where,
            {topic: watch.subscription for topic, watch in group.watches.items()},
        )
        return Command(ResponseCode.SUCCESS, body=bodies.encode_consumer_connections(answer))

    def producer_connections(
        self, header: GetProducerConnectionsRequest, command: Command, peer: Peer
    ) -> Command:
        """204."""
        name = header.group
        members = self.producers.groups.get(name)
        if members is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        body = bodies.encode_producer_connections(_connection(m) for m in members.values())
        return Command(ResponseCode.SUCCESS, body=body)


def _connection(member: Member) -> bodies.Connection:
    return bodies.Connection(
        member.client_id, str(member.peer.remote), member.language, member.version
    )
