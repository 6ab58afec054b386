"""Rules of `sluice doctor` about the topic, the message and the group that it was asked about.

`group_rules` and `message_rules` contain the rules about groups and messages that `sluice explain`
applies, too.
"""

from collections.abc import Callable, Iterator
from typing import Final

from sluicemq.client.admin.diagnose.cluster_facts import (
    HOUR_MS,
    ClusterFacts,
    MessageSearch,
)
from sluicemq.client.admin.diagnose.findings import Code, Rule, Severity, Values
from sluicemq.client.admin.diagnose.group_facts import GroupFacts
from sluicemq.client.admin.diagnose.server_rules import SKEW_MS, Condition, each, wiped_brokers
from sluicemq.client.core.consuming import UNDECODABLE_NOTE
from sluicemq.hints import did_you_mean
from sluicemq.model.reachability import Reachability

RETRIES_MIN: Final = 3
"""A message with this many failed deliveries fails because of its content, not by chance."""
ANY_TYPE: Final = frozenset({"", "MIXED", "UNSPECIFIED"})
"""The values of a topic's message.type that accept messages of every type."""
_SIMILARITY: Final = 0.8
_OLD_SHARE: Final = 0.9
"""Messages that are older than this share of fileReservedTime may be deleted soon."""


# ------------------------------------------------------------------------------ the topic


def _find_servers_without_route(facts: ClusterFacts) -> Iterator[Values]:
    """Yield the name servers without a route of the topic, if another one has it."""
    for server in facts.name_servers:
        if server.has_route is False and facts.has_route:
            yield {"server": server, "topic": facts.topic}


def _make_missing_topic_condition(*, exists: bool, is_created: bool | None = None) -> Condition:
    """Return the condition that no name server has a route of the topic.

    The condition holds in one of two cases: a broker has the topic (`exists` True), or no broker
    has it (`exists` False). `is_created` limits it further to whether the first send would create
    the topic; None means no such limit.
    """

    def condition(facts: ClusterFacts) -> Iterator[Values]:
        """Yield the values of the finding's text once if the condition holds, else nothing."""
        if facts.has_route is not False or not any(broker.is_up for broker in facts.brokers):
            return
        brokers = sorted({broker.label for broker in facts.brokers if broker.topic is not None})
        if bool(brokers) != exists:
            return
        if is_created is not None and _does_first_send_create_topic(facts) != is_created:
            return
        hint = did_you_mean(facts.topic or "", facts.known_topics, cutoff=_SIMILARITY)
        yield {
            "brokers": ", ".join(brokers),
            "topic": facts.topic,
            "hint": f" {hint}" if hint else "",
        }

    return condition


def _does_first_send_create_topic(facts: ClusterFacts) -> bool:
    """Return whether the first send to a missing topic creates it.

    This is so if a name server has the template topic, and not every master has
    autoCreateTopicEnable=false.
    """
    settings = {
        broker.config.get("autoCreateTopicEnable", "true")
        for broker in facts.masters
        if broker.is_up
    }
    is_off_everywhere = settings == {"false"}
    return any(server.creates_topics for server in facts.name_servers) and not is_off_everywhere


def _find_closed_topic(facts: ClusterFacts) -> Iterator[Values]:
    if facts.has_route and not facts.is_readable and not facts.is_writable:
        yield {"topic": facts.topic}


def _find_unwritable_topic(facts: ClusterFacts) -> Iterator[Values]:
    is_drained = any(True for _ in wiped_brokers(facts))
    if facts.has_route and not facts.is_writable and not is_drained:
        yield {"topic": facts.topic}


def _find_unreadable_topic(facts: ClusterFacts) -> Iterator[Values]:
    if facts.has_route and not facts.is_readable:
        yield {"topic": facts.topic}


def _find_gone_ordered_brokers(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker", "topic"} for each broker of the order configuration without a route.

    These dictionaries have the values of the finding's text.
    """
    if facts.route:
        routed = {broker_data.broker for broker_data in facts.route.brokers}
        for name in sorted(facts.ordered_brokers - routed):
            yield {"broker": name, "topic": facts.topic}


def _find_wrong_type(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"topic", "expected", "sent"} if the topic expects another type than producers send.

    The types are values of the topic's attribute message.type, such as "FIFO". A topic without this
    attribute accepts every type. The dictionary has the values of the finding's text.
    """
    if not facts.type:
        return
    configs = [broker.topic for broker in facts.brokers if broker.topic]
    accepted_types = {config.attributes.get("message.type", "") for config in configs}
    for expected in sorted(accepted_types - ANY_TYPE):
        if expected != facts.type.upper():
            yield {"topic": facts.topic, "expected": expected, "sent": facts.type}


TOPIC_RULES: Final = (
    Rule(
        Code.TOPIC_AT_OTHER_NAME_SERVER,
        _find_servers_without_route,
        "The name server {server.address} has no route of {topic}, but another one has.",
        "Let brokers register with all name servers: namesrvAddr = a:9876;b:9876. After a restart "
        "of a name server, wait 30 s.",
    ),
    Rule(
        Code.TOPIC_NOT_REGISTERED,
        _make_missing_topic_condition(exists=True),
        "{brokers} has the topic {topic}, but no name server has its route.",
        "Wait 30 s for the registration. If it does not succeed, the log of the broker has the "
        "reason, or its namesrvAddr names other name servers.",
    ),
    Rule(
        Code.TOPIC_NOT_SENT_TO,
        _make_missing_topic_condition(exists=False, is_created=True),
        "Topic {topic} does not exist yet. It is created on the first send, never by a consumer."
        "{hint}",
        'Send a message to it, or create it with "sluice topic create {topic}".',
    ),
    Rule(
        Code.TOPIC_MISSING,
        _make_missing_topic_condition(exists=False, is_created=False),
        "Topic {topic} does not exist, and no broker creates topics automatically "
        "(autoCreateTopicEnable).{hint}",
        'Create it with "sluice topic create {topic}".',
    ),
    Rule(
        Code.TOPIC_CLOSED,
        _find_closed_topic,
        "Topic {topic} can be neither read nor written: it has no permission.",
        'Run "mqadmin updateTopicPerm -t {topic} -p 6".',
    ),
    Rule(
        Code.TOPIC_NOT_WRITABLE,
        _find_unwritable_topic,
        "No queue of {topic} can be written: the topic, or its brokers, are read-only.",
        'Run "mqadmin updateTopicPerm -t {topic} -p 6", or set brokerPermission = 6.',
    ),
    Rule(
        Code.TOPIC_NOT_READABLE,
        _find_unreadable_topic,
        "No queue of {topic} can be read: the topic, or its brokers, are write-only.",
        'Run "mqadmin updateTopicPerm -t {topic} -p 6", or set brokerPermission = 6.',
    ),
    Rule(
        Code.ORDER_NAMES_GONE_BROKER,
        _find_gone_ordered_brokers,
        "The order configuration of {topic} names the broker {broker}, which is not in its route, "
        "so sends to the queues of that broker fail.",
        "Start the broker, or remove it with mqadmin updateOrderConf.",
    ),
    Rule(
        Code.WRONG_TYPE,
        _find_wrong_type,
        "{topic} accepts messages of type {expected}, but producers send messages of type {sent}.",
        "Send to a topic of that type, or change message.type (mqadmin updateTopic -a).",
    ),
)


# ---------------------------------------------------------------------------- the message


def _make_message_condition(condition: Callable[[MessageSearch], bool]) -> Condition:
    """Return a condition on `ClusterFacts` from a condition on the searched message.

    It yields {"message": …} once if `condition` is True for the message. It yields nothing if the
    user did not ask about a message.
    """

    def holds_for_message(facts: ClusterFacts) -> Iterator[Values]:
        if facts.message is not None and condition(facts.message):
            yield {"message": facts.message}

    return holds_for_message


def _is_undecodable(message: MessageSearch) -> bool:
    return message.stored is not None and message.stored.body_error is not None


MESSAGE_RULES: Final = (
    Rule(
        Code.MESSAGE_DELAYED,
        _make_message_condition(lambda message: message.waiting == "delayed"),
        "The message {message.message_id} is delayed and has not been delivered yet.",
        'Wait until it is due. On SluiceMQ brokers, "sluice delay list" shows the time.',
    ),
    Rule(
        Code.MESSAGE_HALF,
        _make_message_condition(lambda message: message.waiting == "half"),
        "The message {message.message_id} is the prepared message of a transaction that was not "
        "committed.",
        'Commit it in the producer. See the open transactions with "sluice transaction list".',
    ),
    Rule(
        Code.MESSAGE_EXPIRED,
        _make_message_condition(lambda message: message.is_expired),
        "The message {message.message_id} is older than the messages that the brokers keep, so it "
        "was deleted.",
        "To keep later messages for longer, raise fileReservedTime if there is enough disk space.",
    ),
    Rule(
        Code.MESSAGE_UNKNOWN,
        _make_message_condition(lambda message: message.is_unknown),
        "No broker has a message {message.message_id}.",
        "Check the id and the cluster. The send may have failed.",
    ),
    Rule(
        Code.MESSAGE_UNDECODABLE,
        _make_message_condition(_is_undecodable),
        "The body of the message {message.message_id} cannot be decoded: "
        "{message.stored.body_error.reason}.",
        "{message.stored.body_error.fix}",
    ),
)


# ------------------------------------------------------------------ the group and its members


def _make_group_condition(condition: Callable[[GroupFacts], Iterator[Values]]) -> Condition:
    """Return a condition on the facts about the group, which never holds without a group."""
    return lambda facts: iter(()) if facts.group is None else condition(facts.group)


def _find_skewed_clients(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"client", "ahead_s"} for each client whose clock is ahead of the brokers' clocks.

    A client is a member of the group or the producer of the message. A clock that is behind cannot
    be told from an idle client, so it is not reported. The dictionary has the values of the
    finding's text.
    """
    for member in facts.group.members if facts.group else ():
        if member.clock_ahead_ms > SKEW_MS:
            yield {"client": member.client_id, "ahead_s": member.clock_ahead_ms / 1000}
    # A message that was born after it was stored comes from a producer whose clock is ahead.
    stored = facts.message and facts.message.stored
    if stored:
        ahead_ms = stored.born_time_ms - stored.store_time_ms
        if ahead_ms > SKEW_MS:
            yield {"client": f"the producer at {stored.born_host}", "ahead_s": ahead_ms / 1000}


def _find_mixed_models(group: GroupFacts) -> Iterator[Values]:
    """Yield {"group", "models"} if members use both CLUSTERING and BROADCASTING in one group.

    The dictionary has the values of the finding's text.
    """
    reported = {member.message_model for member in group.members if member.message_model}
    models = sorted(reported | group.message_models)
    if len(models) > 1:
        yield {"group": group.name, "models": " and ".join(models).lower()}


def _find_pulls_of_popped_topics(group: GroupFacts) -> Iterator[Values]:
    """Yield {"client_id", "topic", "group"} for each member that pulls a topic which others pop.

    Pulling and popping the same queues delivers messages twice. The dictionary has the values of
    the finding's text.
    """
    for member in group.members:
        pulled = {queue.topic for queue in member.info.queues} if member.info else set()
        for topic in sorted(pulled & group.popped_topics):
            yield {"client_id": member.client_id, "topic": topic, "group": group.name}


def _find_undecodable_bodies(group: GroupFacts) -> Iterator[Values]:
    """Yield the count and the newest error for each member and topic with undecodable bodies.

    A member reports them as a note "count; newest error" for each topic. The dictionary has the
    values of the finding's text.
    """
    for member in group.members:
        if member.info is None:
            continue
        for name, note in member.info.notes.items():
            if name.startswith(UNDECODABLE_NOTE):
                count, _, newest = note.partition("; ")
                yield {
                    "client_id": member.client_id,
                    "count": count,
                    "topic": name.removeprefix(UNDECODABLE_NOTE),
                    "newest": newest,
                }


def _find_poisoned_messages(group: GroupFacts) -> Iterator[Values]:
    for message_id, times in group.failed_messages.items():
        if times >= RETRIES_MIN:
            yield {"message_id": message_id, "times": times, "group": group.name}


def _find_blocked_queues(group: GroupFacts) -> Iterator[Values]:
    """Yield {"client_id", "queue", "offset"} for each queue that a failing message blocks.

    The member consumes in order, so it retries the first message of the queue until it succeeds.
    The dictionary has the values of the finding's text.
    """
    lag_by_queue = {lag.queue: lag for lag in group.application_lags if lag.lag}
    for member in group.members:
        if member.info is None:
            continue
        for queue in member.info.queues:
            lag = lag_by_queue.get(queue)
            if lag is not None and queue.topic in member.failing_topics:
                yield {"client_id": member.client_id, "queue": queue, "offset": lag.committed}


def _find_lost_messages(group: GroupFacts) -> Iterator[Values]:
    return each("lag", (lag for lag in group.application_lags if lag.lost))


def _find_expiring_messages(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"queue", "count", "left_h"} for each queue whose unread messages will be deleted next.

    Only SluiceMQ brokers count these messages. `left_h` is the time until then in hours, 0.0 if it
    is unknown. The dictionary has the values of the finding's text.
    """
    if facts.group is None:
        return
    for lag in facts.group.application_lags:
        if lag.messages_at_risk:
            left_h = 0.0
            if lag.loss_time_ms:
                left_h = max(0.0, (lag.loss_time_ms - facts.now_ms) / HOUR_MS)
            yield {"queue": lag.queue, "count": lag.messages_at_risk, "left_h": left_h}


def _find_maybe_expiring_messages(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"queue", "count", "age_h"} for each queue whose unread messages may be deleted soon.

    RocketMQ brokers do not count such messages, so this is a guess: the message that the group read
    last is nearly as old as fileReservedTime. The unread messages may be much younger if the topic
    has few messages. The dictionary has the values of the finding's text.
    """
    retention_h_by_broker = {
        broker.name: broker.number("fileReservedTime", 0)
        for broker in facts.masters
        if "sluiceVersion" not in broker.runtime
    }
    if facts.group is None:
        return
    for progress in facts.group.progress:
        retention_h = retention_h_by_broker.get(progress.queue.broker, 0)
        if progress.last_time_ms <= 0 or retention_h <= 0 or not progress.lag:
            continue
        age_h = (facts.now_ms - progress.last_time_ms) / HOUR_MS
        if age_h > _OLD_SHARE * retention_h:
            yield {"queue": progress.queue, "count": progress.lag, "age_h": age_h}


def _find_mute_members(group: GroupFacts) -> Iterator[Values]:
    """Yield {"client_id"} for each member that does not answer brokers, if the group has a lag.

    The dictionary has the values of the finding's text.
    """
    if any(lag.lag for lag in group.application_lags):
        for member in group.members:
            if member.is_mute:
                yield {"client_id": member.client_id}


def _find_unmatched_filters(group: GroupFacts) -> Iterator[Values]:
    """Yield {"filter", "conditions"} for each filter that matched no message when it was tried.

    `conditions` names the comparisons that were true for no message, or is "". The dictionary has
    the values of the finding's text.
    """
    for trial in group.filters:
        if trial.rows and not trial.matched:
            conditions = ""
            if trial.never_true:
                conditions = f": {'; '.join(trial.never_true)} is true for none"
            yield {"filter": trial, "conditions": conditions}


def _find_new_dead_letters(facts: ClusterFacts) -> Iterator[Values]:
    group = facts.group
    if group and group.dead_letter_count and facts.now_ms - group.dead_letter_time_ms < HOUR_MS:
        yield {"group": group.name, "count": group.dead_letter_count}


GROUP_RULES: Final = (
    Rule(
        Code.CLIENT_CLOCK_SKEW,
        _find_skewed_clients,
        "The clock of {client} is at least {ahead_s:.0f} s ahead.",
        "Synchronize it with a time server. Its time decides which messages are due, and which "
        "members look stuck.",
    ),
    Rule(
        Code.MODELS_MIXED,
        _make_group_condition(_find_mixed_models),
        "Members of {group} consume with the message models {models}, but a broker keeps only that "
        "of the last heartbeat.",
        "Give the broadcasting members a group of their own.",
    ),
    Rule(
        Code.POP_AND_PULL,
        _make_group_condition(_find_pulls_of_popped_topics),
        "{client_id} pulls {topic}, which other members of {group} pop, so messages are delivered "
        "twice.",
        "Let all members pop or all pull: use mqadmin setConsumeMode, or a group for each.",
    ),
    Rule(
        Code.BODIES_UNDECODABLE,
        _make_group_condition(_find_undecodable_bodies),
        "{client_id} cannot decode the bodies of {count} messages of {topic}. The newest error: "
        "{newest}",
        "Follow the advice of that error. Until then, on_undecodable decides what happens to such "
        "messages.",
    ),
    Rule(
        Code.MESSAGE_POISONED,
        _make_group_condition(_find_poisoned_messages),
        "The message {message_id} has failed {times} times in {group}, and will be delivered "
        "again.",
        'Fix the handler, or let it store such messages elsewhere. See "sluice explain message '
        '{message_id}".',
    ),
    Rule(
        Code.QUEUE_BLOCKED,
        _make_group_condition(_find_blocked_queues),
        "{client_id} fails repeatedly on offset {offset} of {queue.topic} queue {queue.queue_id} "
        "on {queue.broker}, so later messages of the queue wait.",
        'Fix the handler, or limit maxReconsumeTimes. Skip the message with "sluice group reset".',
    ),
    Rule(
        Code.RETENTION_LOST,
        _make_group_condition(_find_lost_messages),
        "{lag.lost:,} messages of {lag.queue.topic} queue {lag.queue.queue_id} on "
        "{lag.queue.broker} were deleted before {lag.group} consumed them.",
        "Raise fileReservedTime, or consume faster. The deleted messages cannot be restored.",
    ),
    Rule(
        Code.RETENTION_NEAR,
        _find_expiring_messages,
        "{count:,} unread messages of {queue.topic} queue {queue.queue_id} on {queue.broker} will "
        "be deleted in about {left_h:.1f} h.",
        "Consume faster with more queues and members, or raise fileReservedTime now.",
    ),
    Rule(
        Code.RETENTION_MAYBE_NEAR,
        _find_maybe_expiring_messages,
        "The message that was read last of {queue.topic} queue {queue.queue_id} on {queue.broker} "
        "is {age_h:.1f} h old. If the {count:,} unread messages are as old, they will be deleted "
        "soon.",
        "Check how old the first unread message is. If it is that old, consume faster.",
        Severity.NOTE,
    ),
    Rule(
        Code.MEMBER_MUTE,
        _make_group_condition(_find_mute_members),
        "{client_id} is connected but does not respond, and messages wait.",
        "Look at its machine and restart it: the process hangs or is stopped.",
    ),
    Rule(
        Code.FILTER_MATCHES_NOTHING,
        _make_group_condition(_find_unmatched_filters),
        "The filter {filter.expression} matches none of the last {filter.rows:,} messages of "
        "{filter.topic}{conditions}.",
        'Try another filter with "sluice filter test", which shows the properties of the messages.',
    ),
    Rule(
        Code.DEAD_LETTERS,
        _find_new_dead_letters,
        "Messages of {group} became dead letters within the last hour: %DLQ%{group} has {count:,}.",
        "Look at them (consume %DLQ%{group}, or use the dead-letters pipeline) and fix the "
        "handler.",
    ),
)


# -------------------------------------------------------------------------------- last


def _find_unreachable_vip_ports(facts: ClusterFacts) -> Iterator[Values]:
    """Yield {"broker"} for each broker that responds on its usual port but not on its VIP port.

    The dictionary has the values of the finding's text.
    """
    for broker in facts.brokers:
        is_unreachable = broker.vip_reach not in (None, Reachability.RESPONDS)
        if broker.is_up and broker.name and is_unreachable:
            yield {"broker": broker}


LAST_RULES: Final = (
    Rule(
        Code.VIP_PORT,
        _find_unreachable_vip_ports,
        "The VIP port of {broker.name}, two below {broker.address}, cannot be reached.",
        "Only clients with vipChannelEnabled (the default of Java before 4.5.1) use it. Publish "
        "it, too, or set com.rocketmq.sendMessageWithVIPChannel=false.",
        Severity.NOTE,
    ),
)
