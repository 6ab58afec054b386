"""Clients say who they are: 34 heartbeat, 35 unregister, 38 members of a group, 46 check of a
subscription.

A consumer that joins, leaves or changes its topics makes all members of its group balance anew
(40, one-way). They hear of it before the answer to the heartbeat leaves, as recorded of the real
broker (spec/traffic, item 2), unless many changes come at once (`notices`).

Each client says the same every thirty seconds: a heartbeat that is the last one of its connection
again, where nothing that it depends on has changed since, only moves the time of its members on.
"""

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

from sluicemq.broker.consume.clients import (
    Consumers,
    ContractError,
    Member,
    Producers,
    Standing,
)
from sluicemq.broker.consume.held import CONSUMER, subscribed_bytes
from sluicemq.broker.group_commit import Announced, Postponed
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import UNIT_SYS_FLAG, Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import FilterError
from sluicemq.filter.subscriptions import (
    SQL92_IS_OFF,
    compile_sql92,
    is_tag_kind,
    make_filter,
    preparation,
)
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.work.background import WorkItem, decode_body
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ConsumerGroupRequest, HeartbeatResponse, UnregisterClientRequest

log = logging.getLogger(__name__)

UNKNOWN_GROUP: Final = (
    "group %s of client %s does not exist and is not made on its own. Create it, or set "
    "autoCreateSubscriptionGroup=true in broker.conf."
)
LANES_FIELD = "sluiceLanes"
REPEATED: Final = "repeated heartbeat"
"""The label of a connection."""
UNKNOWN_MAX = 1024
QUICK_GROUPS_MAX: Final = 16
"""A heartbeat of more waits for its turn, as other requests do."""
OPAQUE_MAX: Final = 0x7FFFFFFF
_PREFIX: Final = struct.Struct(">II")
PRODUCERS_A_STEP: Final = 256


@dataclass(slots=True, eq=False)
class Repeated:
    """The last heartbeat of a connection, which would change nothing if it came again; of its
    body the hash, for there may be ten thousand."""

    body: int
    fields: dict[str, str] | None
    version: int
    start: bytes
    """Header of the answer, with a place for the number of the request."""
    consumers: list[Standing]
    producers: list[tuple[str, Member]]

    def answer_to(self, opaque: int) -> bytes:
        """The frame."""
        start = self.start % opaque
        return _PREFIX.pack(4 + len(start), len(start)) + start


@dataclass(slots=True, eq=False)
class Heartbeats:
    """The request family of clients about themselves."""

    settings: Settings
    topics: Topics
    groups: Groups
    consumers: Consumers
    producers: Producers
    clock: Clock
    unknown: set[str] = field(default_factory=set)
    """Groups that the log has named."""

    def heartbeat(self, command: Command, peer: Peer) -> bytes | Postponed:
        """34. The answer's version lets old clients use SQL92 (spec/remoting.md §4)."""
        last: Repeated | None = peer.attributes.get(REPEATED)
        if last is not None and self._repeats(
            last, command.fields, command.version, command.body, peer
        ):
            return last.answer_to(command.opaque)
        return Postponed(self._take_in(command, peer))

    def heartbeat_again(self, header: dict[str, Any], body: bytes, peer: Peer) -> bool | bytes:
        """34. HOT: the last one of its connection once more; False for all else."""
        last: Repeated | None = peer.attributes.get(REPEATED)
        opaque, flag = header.get("opaque"), header.get("flag")
        if (
            last is None
            or flag != 0
            or opaque.__class__ is not int
            or not 0 <= opaque <= OPAQUE_MAX
            or len(last.consumers) + len(last.producers) > QUICK_GROUPS_MAX
            or not self._repeats(last, header.get("extFields"), header.get("version"), body, peer)
        ):
            return False
        return last.answer_to(opaque)

    def _take_in(self, command: Command, peer: Peer) -> WorkItem[Command | Announced]:
        """Group by group: a heartbeat may bring thousands, each with expressions to compile."""
        data, sizes = yield from decode_body(_sized, command.body)
        member = partial(
            Member,
            data.client_id,
            peer,
            command.language,
            command.version,
            self.clock.monotonic_s(),
        )
        standings: list[Standing | None] = []
        changed, creates, refusal = False, False, ""
        for consumer, size in zip(data.consumers, sizes, strict=True):
            yield from self._compile(consumer.subscriptions)
            config = self.groups.get_or_create(consumer.group)
            if config is None:
                # It gets nothing and no error: at least the log says why.
                if consumer.group not in self.unknown and len(self.unknown) < UNKNOWN_MAX:
                    self.unknown.add(consumer.group)
                    log.warning(UNKNOWN_GROUP, consumer.group, data.client_id)
                continue
            retry_topic = RETRY_PREFIX + consumer.group
            if retry_topic not in self.topics and config.retry_queues > 0:
                creates = True
                self.topics.ensure(
                    retry_topic, config.retry_queues, UNIT_SYS_FLAG if consumer.unit_mode else 0
                )
            if data.without_subscriptions:
                short = self.consumers.short_heartbeat
                known = short(consumer.group, member(), data.fingerprint)
            else:
                self.consumers.held.take(peer, (CONSUMER, consumer.group), size)
                made = yield from self.consumers.making(consumer)
                try:
                    known = self.consumers.heartbeat(consumer, member(), data.fingerprint, made)
                except ContractError as error:
                    refusal, known = str(error), False
            changed = changed or known
            standings.append(self.consumers.standing(consumer.group, peer))
        yield from self._join(data.producer_groups, member)
        response = HeartbeatResponse(
            supports_v2=True,
            subscription_changed=changed if data.fingerprint else True,
            lanes=True if command.fields and LANES_FIELD in command.fields else None,
        )
        answer = Command(ResponseCode.SUCCESS, encode_header(response))
        producers = [
            (it, self.producers.groups.get(it, {}).get(peer)) for it in data.producer_groups
        ]
        peer.attributes.pop(REPEATED, None)
        if not (changed or creates or refusal):
            self._remember(command, peer, response, standings, producers)
        if refusal:  # Java logs it with each heartbeat; our client raises it
            answer = Command(ResponseCode.NO_PERMISSION, remark=refusal)
        return Announced(answer) if creates else answer

    def _join(self, groups: Sequence[str], member: Callable[[], Member]) -> WorkItem[None]:
        """Make the client a member of these producer groups."""
        for count, group in enumerate(groups, 1):
            self.producers.heartbeat(group, member())
            if count % PRODUCERS_A_STEP == 0:
                yield None

    def _remember(
        self,
        command: Command,
        peer: Peer,
        answer: HeartbeatResponse,
        standings: Sequence[Standing | None],
        producers: Sequence[tuple[str, Member | None]],
    ) -> None:
        """That nothing has to be done when this one comes again, if that is sure."""
        members = [(group, member) for group, member in producers if member is not None]
        found = [standing for standing in standings if standing is not None]
        if (len(found), len(members)) == (len(standings), len(producers)):
            peer.attributes[REPEATED] = Repeated(
                hash(bytes(command.body)), command.fields, command.version, _start(answer), found,
                members,
            )  # fmt: skip

    def _repeats(
        self, last: Repeated, fields: Any, version: Any, body: bytes | memoryview, peer: Peer
    ) -> bool:
        """Is it the last one again, with nothing to do but to note the time? HOT."""
        if last.fields != fields or last.version != version or last.body != hash(bytes(body)):
            return False
        for standing in last.consumers:
            name = standing.group.name
            is_missing = RETRY_PREFIX + name not in self.topics and standing.config.retry_queues > 0
            if is_missing or self.consumers.standing(name, peer) != standing:
                return False
        for group, member in last.producers:
            if self.producers.groups.get(group, {}).get(peer) is not member:
                return False
        now_s = self.clock.monotonic_s()
        for standing in last.consumers:
            standing.member.seen_s = now_s
        for group, member in last.producers:
            member.seen_s = now_s
            self.producers.heartbeat(group, member)
        return True

    def _compile(self, subscriptions: Iterable[Subscription]) -> WorkItem[None]:
        """What takes long, before it is asked for."""
        yield None
        for subscription in subscriptions:
            yield from preparation(subscription.expression, subscription.kind)
            if subscription.kind == SQL92:
                with suppress(FilterError):
                    compile_sql92(subscription.expression)
                yield None

    def unregister(self, header: UnregisterClientRequest, command: Command, peer: Peer) -> Command:
        """35."""
        if header.producer_group:
            self.producers.unregister(header.producer_group, peer)
        if header.consumer_group:
            self.consumers.unregister(header.consumer_group, peer, header.client_id)
        return Command(ResponseCode.SUCCESS, {})

    def list_members(self, header: ConsumerGroupRequest, command: Command, peer: Peer) -> Command:
        """38."""
        client_ids = self.consumers.sharing(header.group, peer, command.fields)
        if not client_ids:
            return Command(
                ResponseCode.SYSTEM_ERROR, {}, remark=f"no consumer for this group, {header.group}"
            )
        return Command(ResponseCode.SUCCESS, {}, bodies.encode_consumer_list(client_ids))

    def check(self, command: Command, peer: Peer) -> Postponed:
        """46: would a subscription work here? Java clients ask for SQL92 ones before they start."""
        asked = bodies.decode_check_client_config(command.body)
        by_sql92 = self.settings.broker.enable_property_filter

        def steps() -> WorkItem[Command]:
            subscription = asked.subscription
            if subscription is None:
                return Command(ResponseCode.SUCCESS)
            if not is_tag_kind(subscription.kind) and not by_sql92:
                return Command(ResponseCode.SYSTEM_ERROR, remark=SQL92_IS_OFF)
            yield from self._compile([subscription])
            try:
                make_filter(subscription)
                self.consumers.check(asked.group, asked.client_id, subscription, peer)
            except FilterError as error:
                return Command(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
            except ContractError as error:
                return Command(ResponseCode.NO_PERMISSION, remark=str(error))
            return Command(ResponseCode.SUCCESS)

        return Postponed(steps())


def _sized(body: bytes | memoryview) -> tuple[bodies.Heartbeat, list[int]]:
    """Decode a heartbeat. Return it, and how many bytes a member of each of its groups takes."""
    data = bodies.decode_heartbeat(body)
    return data, [subscribed_bytes(consumer.subscriptions) for consumer in data.consumers]


@cache
def _start(response: HeartbeatResponse) -> bytes:
    request = Command(0, opaque=OPAQUE_MAX)
    frame = encode_response_to(Command(ResponseCode.SUCCESS, encode_header(response)), request)
    return frame[_PREFIX.size :].replace(b"%d" % OPAQUE_MAX, b"%d")
