"""Handlers for requests of clients about themselves and their groups.

They answer HEART_BEAT (34), UNREGISTER_CLIENT (35), GET_CONSUMER_LIST_BY_GROUP (38) and
CHECK_CLIENT_CONFIG (46).

A consumer that joins, leaves or changes its topics makes all members of its group rebalance
(NOTIFY_CONSUMER_IDS_CHANGED, 40, one-way). They are notified before the answer to the heartbeat
leaves, as recorded from RocketMQ's broker (spec/traffic, item 2), unless many changes come at once
(`notices.py`).

Each client sends the same heartbeat every thirty seconds. If it equals the last one of its
connection, and nothing that it depends on has changed, only the heartbeat time of its members is
updated.
"""

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, Protocol

from sluicemq.broker.consume.client_memory import CONSUMER, estimate_member_bytes
from sluicemq.broker.consume.clients import Consumers, Member, MemberSnapshot
from sluicemq.broker.consume.contracts import ContractError
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Announced, Postponed
from sluicemq.broker.topics import UNIT_SYS_FLAG
from sluicemq.errors import FilterError
from sluicemq.filter.subscriptions import (
    SQL92_DISABLED,
    compile_sql92,
    is_tag_kind,
    make_filter,
    preparation_jobs,
)
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import RETRY_PREFIX, GroupConfig
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.work.background import WorkItem, decode_body
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ConsumerGroupRequest, HeartbeatResponse, UnregisterClientRequest

log = logging.getLogger(__name__)

UNKNOWN_GROUP: Final = (
    "group %s of client %s does not exist and is not created automatically. Create it, or set "
    "autoCreateSubscriptionGroup=true in broker.conf."
)
LANES_FIELD = "sluiceLanes"
"""The request field of a client that asks whether the broker has lanes."""
REPEATABLE_LABEL: Final = "repeated heartbeat"
"""The label of a connection that holds its `RepeatableHeartbeat`."""
UNKNOWN_GROUPS_LOGGED_MAX = 1024
"""The most groups that the log mentions as unknown."""
FAST_PATH_GROUPS_MAX: Final = 16
"""The fast path hands heartbeats of more groups to the general path, which works in steps."""
OPAQUE_MAX: Final = 0x7FFFFFFF
"""The largest number of a request that the fast path handles."""
_FRAME_PREFIX: Final = struct.Struct(">II")
PRODUCERS_PER_STEP: Final = 256
"""The number of producer groups that are updated in one step."""


class ProducerGroups(Protocol):
    """What heartbeats use of `produce.producers.Producers`, which describes it."""

    groups: dict[str, dict[Peer, Member]]

    def record_heartbeat(self, group: str, member: Member) -> None: ...

    def unregister(self, group: str, peer: Peer) -> None: ...


@dataclass(slots=True, eq=False)
class RepeatableHeartbeat:
    """The last heartbeat of a connection, which changes nothing if it comes again.

    Only the hash of its body is kept, because there may be ten thousand connections.
    """

    body_hash: int
    fields: dict[str, str] | None
    version: int
    header_template: bytes
    """The header of the answer as JSON, with `%d` for the number of the request."""
    snapshots: list[MemberSnapshot]
    """The members of consumer groups, as the heartbeat left them."""
    producers: list[tuple[str, Member]]
    """The group and member of each producer group of the heartbeat."""

    def encode_answer(self, opaque: int) -> bytes:
        """Return the answer to the request number `opaque` as a frame."""
        header = self.header_template % opaque
        return _FRAME_PREFIX.pack(4 + len(header), len(header)) + header


@dataclass(slots=True)
class _HeartbeatOutcome:
    """What a heartbeat has changed in the consumer groups of its client."""

    snapshots: list[MemberSnapshot | None] = field(default_factory=list)
    """The members as the heartbeat left them; None where the next one must be processed again."""
    needs_full: bool = False
    """Whether the client has to send a full heartbeat, or its subscriptions have changed."""
    creates_topic: bool = False
    """Whether a retry topic was created."""
    refusal: str = ""
    """Why a group refuses the client's subscriptions; "" if none does."""

    @property
    def changed_nothing(self) -> bool:
        """Whether the heartbeat has only updated members."""
        return not (self.needs_full or self.creates_topic or self.refusal)


class HeartbeatHandlers(BrokerComponent):
    """Request handlers for clients and members of groups.

    They answer HEART_BEAT (34), UNREGISTER_CLIENT (35), GET_CONSUMER_LIST_BY_GROUP (38) and
    CHECK_CLIENT_CONFIG (46).
    """

    def __init__(
        self, context: BrokerContext, *, consumers: Consumers, producers: "ProducerGroups"
    ) -> None:
        """Create the handlers. `consumers` and `producers` are the tables of members."""
        super().__init__(context)
        self.consumers = consumers
        self.producers = producers
        self.logged_unknown_groups: set[str] = set()
        """Groups that the log has mentioned as unknown."""

    def heartbeat(self, command: Command, peer: Peer) -> bytes | Postponed:
        """Answer HEART_BEAT (34), by which a client becomes or remains a member of its groups.

        If the heartbeat repeats the last one of its connection, only the heartbeat times of the
        members are updated, and the encoded answer is returned. Otherwise a Postponed is returned,
        which processes the heartbeat in steps. The version in the answer lets old clients use SQL92
        (spec/remoting.md §4).
        """
        repeatable: RepeatableHeartbeat | None = peer.attributes.get(REPEATABLE_LABEL)
        if repeatable is not None and self._renew_if_repeated(
            repeatable, command.fields, command.version, command.body, peer
        ):
            return repeatable.encode_answer(command.opaque)
        return Postponed(self._process_heartbeat(command, peer))

    def heartbeat_fast_path(self, header: dict[str, Any], body: bytes, peer: Peer) -> bool | bytes:
        """Answer a HEART_BEAT (34) that repeats the last one of its connection.

        `header` is the decoded JSON header of the request. Return the encoded answer, or False if
        the general handler must process the request. Called for each heartbeat: keep it cheap.
        """
        repeatable: RepeatableHeartbeat | None = peer.attributes.get(REPEATABLE_LABEL)
        opaque = header.get("opaque")
        flag = header.get("flag")
        if (
            repeatable is None
            or flag != 0
            or opaque.__class__ is not int
            or not 0 <= opaque <= OPAQUE_MAX
            or len(repeatable.snapshots) + len(repeatable.producers) > FAST_PATH_GROUPS_MAX
            or not self._renew_if_repeated(
                repeatable, header.get("extFields"), header.get("version"), body, peer
            )
        ):
            return False
        return repeatable.encode_answer(opaque)

    def _process_heartbeat(self, command: Command, peer: Peer) -> WorkItem[Command | Announced]:
        """Process a heartbeat: make the client a member of its groups, and return the answer.

        Missing groups and retry topics are created if that is allowed. Other missing groups are
        skipped, and a warning is logged. If a group refuses the client's subscriptions, the answer
        is an error, but the client is a member of its other groups. If a retry topic was created,
        an Announced is returned: the answer is sent when the topic is registered. If the heartbeat
        has changed nothing, it is kept, to recognize its repetitions.

        This is a generator that works in steps, because a heartbeat may name thousands of groups.
        Raises RequestError if the client would use too much memory.
        """
        heartbeat, member_sizes = yield from decode_body(_decode_with_sizes, command.body)
        new_member = partial(
            Member,
            client_id=heartbeat.client_id,
            peer=peer,
            language=command.language,
            version=command.version,
            heartbeat_s=self.clock.monotonic_s(),
        )
        outcome = yield from self._update_groups(heartbeat, member_sizes, new_member)
        yield from self._add_producer(heartbeat.producer_groups, new_member)

        accepts_lanes = command.fields is not None and LANES_FIELD in command.fields
        response = HeartbeatResponse(
            supports_v2=True,
            subscription_changed=outcome.needs_full if heartbeat.fingerprint else True,
            lanes=True if accepts_lanes else None,
        )
        peer.attributes.pop(REPEATABLE_LABEL, None)
        if outcome.changed_nothing:
            producers = [
                (group, self.producers.groups.get(group, {}).get(peer))
                for group in heartbeat.producer_groups
            ]
            self._save_repeatable(command, peer, response, outcome.snapshots, producers)

        if outcome.refusal:
            # A Java client logs this with each heartbeat; SluiceMQ's client raises an error.
            answer = Command(ResponseCode.NO_PERMISSION, remark=outcome.refusal)
        else:
            answer = Command(ResponseCode.SUCCESS, encode_header(response))
        return Announced(answer) if outcome.creates_topic else answer

    def _update_groups(
        self,
        heartbeat: bodies.Heartbeat,
        member_sizes: Sequence[int],
        new_member: Callable[[], Member],
    ) -> WorkItem["_HeartbeatOutcome"]:
        """Make a client a member of its consumer groups, in steps, and return what has changed.

        `member_sizes` are the estimated bytes of memory of the member in each group. `new_member()`
        returns a new Member for the client. Raises RequestError if the client would use too much
        memory.
        """
        outcome = _HeartbeatOutcome()
        for consumer, member_bytes in zip(heartbeat.consumers, member_sizes, strict=True):
            yield from self._precompile_filters(consumer.subscriptions)
            config = self.groups.get_or_create(consumer.group)
            if config is None:
                self._log_unknown_group(consumer.group, heartbeat.client_id)
                continue
            if self._create_retry_topic(consumer, config):
                outcome.creates_topic = True

            member = new_member()
            try:
                needs_full = yield from self._record_member(
                    heartbeat, consumer, member, member_bytes
                )
            except ContractError as error:
                outcome.refusal = str(error)
            else:
                outcome.needs_full = outcome.needs_full or needs_full
            snapshot = self.consumers.snapshot_member(consumer.group, member.peer)
            outcome.snapshots.append(snapshot)
        return outcome

    def _create_retry_topic(self, consumer: bodies.ConsumerData, config: GroupConfig) -> bool:
        """Create the retry topic of a group that has retries, unless it exists.

        Return whether it was created.
        """
        retry_topic = RETRY_PREFIX + consumer.group
        if retry_topic in self.topics or config.retry_queues <= 0:
            return False
        sys_flag = UNIT_SYS_FLAG if consumer.unit_mode else 0
        self.topics.ensure(retry_topic, config.retry_queues, sys_flag)
        return True

    def _record_member(
        self,
        heartbeat: bodies.Heartbeat,
        consumer: bodies.ConsumerData,
        member: Member,
        member_bytes: int,
    ) -> WorkItem[bool]:
        """Add or update a member of one group, in steps.

        `consumer` is the part of the heartbeat about this group. `member_bytes` is the estimated
        memory of the member. Return whether the client has to send a heartbeat with subscriptions.
        Raises RequestError if it would use too much memory, and ContractError if the group refuses
        its subscriptions.
        """
        if heartbeat.without_subscriptions:
            return self.consumers.record_short_heartbeat(
                consumer.group, member, heartbeat.fingerprint
            )
        self.consumers.memory.reserve(member.peer, (CONSUMER, consumer.group), member_bytes)
        subscribed = yield from self.consumers.prepare_subscriptions(consumer)
        return self.consumers.record_heartbeat(consumer, member, heartbeat.fingerprint, subscribed)

    def _log_unknown_group(self, group: str, client_id: str) -> None:
        """Log once that a group does not exist, for the first UNKNOWN_GROUPS_LOGGED_MAX groups.

        The client gets no messages and no error, so the log has to say the reason.
        """
        is_log_full = len(self.logged_unknown_groups) >= UNKNOWN_GROUPS_LOGGED_MAX
        if group not in self.logged_unknown_groups and not is_log_full:
            self.logged_unknown_groups.add(group)
            log.warning(UNKNOWN_GROUP, group, client_id)

    def _add_producer(
        self, groups: Sequence[str], new_member: Callable[[], Member]
    ) -> WorkItem[None]:
        """Make the client a member of these producer groups, PRODUCERS_PER_STEP in one step.

        `new_member()` returns the client as a new member.
        """
        for count, group in enumerate(groups, 1):
            self.producers.record_heartbeat(group, new_member())
            if count % PRODUCERS_PER_STEP == 0:
                yield None

    def _save_repeatable(
        self,
        command: Command,
        peer: Peer,
        answer: HeartbeatResponse,
        snapshots: Sequence[MemberSnapshot | None],
        producers: Sequence[tuple[str, Member | None]],
    ) -> None:
        """Keep a heartbeat and its `answer`, to recognize and answer its repetitions quickly.

        It is kept at the connection `peer`. `snapshots` are the consumers and `producers` the
        producers that the client is after the heartbeat. If one of them is None, it does not exist
        or its next heartbeat must be processed in full, and nothing is kept.
        """
        known_producers = [(group, member) for group, member in producers if member is not None]
        known_snapshots = [snapshot for snapshot in snapshots if snapshot is not None]
        if len(known_producers) < len(producers) or len(known_snapshots) < len(snapshots):
            return
        peer.attributes[REPEATABLE_LABEL] = RepeatableHeartbeat(
            body_hash=hash(bytes(command.body)),
            fields=command.fields,
            version=command.version,
            header_template=_make_header_template(answer),
            snapshots=known_snapshots,
            producers=known_producers,
        )

    def _renew_if_repeated(
        self,
        repeatable: RepeatableHeartbeat,
        fields: Any,
        version: Any,
        body: bytes | memoryview,
        peer: Peer,
    ) -> bool:
        """Update the heartbeat times of a client if its heartbeat repeats `repeatable`.

        Return whether it does. Return False, with nothing updated, if the fields, the version or
        the body differ. Also return False if the heartbeat might have another effect now, because a
        member, its group or a retry topic has changed. Called for each heartbeat: keep it cheap.
        """
        if (
            repeatable.fields != fields
            or repeatable.version != version
            or repeatable.body_hash != hash(bytes(body))
        ):
            return False
        for snapshot in repeatable.snapshots:
            group_name = snapshot.group.name
            lacks_retry_topic = (
                RETRY_PREFIX + group_name not in self.topics and snapshot.config.retry_queues > 0
            )
            if lacks_retry_topic or self.consumers.snapshot_member(group_name, peer) != snapshot:
                return False
        for group, member in repeatable.producers:
            if self.producers.groups.get(group, {}).get(peer) is not member:
                return False

        now_s = self.clock.monotonic_s()
        for snapshot in repeatable.snapshots:
            snapshot.member.heartbeat_s = now_s
        for group, member in repeatable.producers:
            member.heartbeat_s = now_s
            self.producers.record_heartbeat(group, member)
        return True

    def _precompile_filters(self, subscriptions: Iterable[Subscription]) -> WorkItem[None]:
        """Compile filters in steps, so that they are in the caches when they are needed at once.

        Invalid expressions are ignored. This is a generator: it yields functions for another
        thread, and None where other work may run.
        """
        yield None
        for subscription in subscriptions:
            yield from preparation_jobs(subscription.expression, subscription.kind)
            if subscription.kind == SQL92:
                with suppress(FilterError):
                    compile_sql92(subscription.expression)
                yield None

    def unregister(self, header: UnregisterClientRequest, command: Command, peer: Peer) -> Command:
        """Answer UNREGISTER_CLIENT (35): remove a client from a producer and a consumer group.

        The header names one of the groups, or both.
        """
        if header.producer_group:
            self.producers.unregister(header.producer_group, peer)
        if header.consumer_group:
            self.consumers.unregister(header.consumer_group, peer, header.client_id)
        return Command(ResponseCode.SUCCESS, {})

    def list_members(self, header: ConsumerGroupRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_CONSUMER_LIST_BY_GROUP (38) with the ids of the clients that share the queues.

        In a group with lanes, these are the clients in the lane of the requesting client. The
        answer is SYSTEM_ERROR if there are none.
        """
        client_ids = self.consumers.client_ids_sharing_queues(header.group, peer, command.fields)
        if not client_ids:
            return Command(
                ResponseCode.SYSTEM_ERROR, {}, remark=f"no consumer for this group, {header.group}"
            )
        return Command(ResponseCode.SUCCESS, {}, bodies.encode_consumer_list(client_ids))

    def check_subscription(self, command: Command, peer: Peer) -> Postponed:
        """Answer CHECK_CLIENT_CONFIG (46), which asks whether a subscription would be accepted.

        Java clients send it for SQL92 subscriptions before they start. The code of the answer is
        SUCCESS, or the error that a heartbeat with the subscription would cause.
        """
        asked = bodies.decode_check_client_config(command.body)
        is_sql92_enabled = self.settings.broker.enable_property_filter

        def steps() -> WorkItem[Command]:
            """Compile the expression in steps, and return the answer."""
            subscription = asked.subscription
            if subscription is None:
                return Command(ResponseCode.SUCCESS)
            if not is_tag_kind(subscription.kind) and not is_sql92_enabled:
                return Command(ResponseCode.SYSTEM_ERROR, remark=SQL92_DISABLED)
            yield from self._precompile_filters([subscription])
            try:
                make_filter(subscription)
                self.consumers.check_subscription(asked.group, asked.client_id, subscription, peer)
            except FilterError as error:
                return Command(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
            except ContractError as error:
                return Command(ResponseCode.NO_PERMISSION, remark=str(error))
            return Command(ResponseCode.SUCCESS)

        return Postponed(steps())


def _decode_with_sizes(body: bytes | memoryview) -> tuple[bodies.Heartbeat, list[int]]:
    """Decode a heartbeat. Return it and the estimated bytes of a member of each of its groups."""
    heartbeat = bodies.decode_heartbeat(body)
    sizes = [estimate_member_bytes(consumer.subscriptions) for consumer in heartbeat.consumers]
    return heartbeat, sizes


@cache
def _make_header_template(response: HeartbeatResponse) -> bytes:
    """Return the JSON header of the answer `response`, with `%d` for the number of the request."""
    request = Command(0, opaque=OPAQUE_MAX)
    frame = encode_response_to(Command(ResponseCode.SUCCESS, encode_header(response)), request)
    return frame[_FRAME_PREFIX.size :].replace(b"%d" % OPAQUE_MAX, b"%d")
