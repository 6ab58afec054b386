"""What `Admin` can do: one line an operation, bound by `core.talks.operation` for both shells.

Parameters, defaults and documentation stand at the Talk of each. Offsets are positions in one
queue, times are milliseconds since 1970.
"""

from typing import Final

from sluicemq.client.admin import (
    clients,
    definitions,
    explain,
    letters,
    messages,
    servers,
)
from sluicemq.client.admin import groups as group_talks
from sluicemq.client.admin import replicas as replica_talks
from sluicemq.client.admin import topics as topic_talks
from sluicemq.client.core.conversations import operation
from sluicemq.hints import with_hints


@with_hints
class AdminOperations:
    """Offsets, topics, groups, clusters; `route` is the shells'. Raises the errors of
    `sluicemq.errors`."""

    cluster_info: Final = operation(topic_talks.cluster_info)
    masters: Final = operation(topic_talks.masters)
    runtime: Final = operation(topic_talks.runtime)
    access_status: Final = operation(topic_talks.access_status)
    replicas: Final = operation(replica_talks.replicas)
    switch_master: Final = operation(replica_talks.switch_master)
    elect_master: Final = operation(replica_talks.elect_master)

    topics: Final = operation(topic_talks.topics)
    queues: Final = operation(topic_talks.queues)
    create_topic: Final = operation(topic_talks.create_topic)
    delete_topic: Final = operation(topic_talks.delete_topic)
    topic_configs: Final = operation(topic_talks.topic_configs)
    topic_stats: Final = operation(topic_talks.topic_stats)
    topic_offsets: Final = operation(topic_talks.topic_offsets)
    groups_of_topic: Final = operation(topic_talks.groups_of_topic)

    offsets: Final = operation(topic_talks.offsets)
    offset_min: Final = operation(topic_talks.offset_min)
    offset_max: Final = operation(topic_talks.offset_max)
    earliest_time: Final = operation(topic_talks.earliest_time)
    offset_by_time: Final = operation(topic_talks.offset_by_time)
    committed_offset: Final = operation(topic_talks.committed_offset)
    commit_offset: Final = operation(topic_talks.commit_offset)

    groups: Final = operation(group_talks.groups)
    create_group: Final = operation(group_talks.create_group)
    contract: Final = operation(group_talks.contract)
    change_contract: Final = operation(group_talks.change_contract)
    members: Final = operation(group_talks.members)
    progress: Final = operation(group_talks.progress)
    group: Final = operation(group_talks.group)
    consumers: Final = operation(group_talks.consumers)
    running_info: Final = operation(group_talks.running_info)
    consume_directly: Final = operation(group_talks.consume_directly)

    plan_reset: Final = operation(group_talks.plan_reset)
    reset_offsets: Final = operation(group_talks.reset_offsets)
    plan_clone: Final = operation(group_talks.plan_clone)
    clone_offsets: Final = operation(group_talks.clone_offsets)

    lag: Final = operation(group_talks.lag)
    matching: Final = operation(group_talks.matching)
    try_filter: Final = operation(explain.try_filter)

    message_by_id: Final = operation(messages.message_by_id)
    messages_by_key: Final = operation(messages.messages_by_key)
    messages_with_id: Final = operation(messages.messages_with_id)
    read_range: Final = operation(messages.read_range)
    messages_between: Final = operation(messages.messages_between)
    delayed: Final = operation(messages.delayed)
    cancel_delayed: Final = operation(messages.cancel_delayed)
    transactions: Final = operation(messages.transactions)
    resolve_transaction: Final = operation(messages.resolve_transaction)

    trace: Final = operation(messages.trace)
    explain_message: Final = operation(explain.explain_message)
    explain_group: Final = operation(explain.explain_group)
    subscriptions: Final = operation(explain.subscriptions)
    dead_letters: Final = operation(letters.dead_letters)

    known_route: Final = operation(definitions.known_route)
    put_topic: Final = operation(definitions.put_topic)
    put_topics: Final = operation(definitions.put_topics)
    topic_table: Final = operation(definitions.topic_table)
    system_topics: Final = operation(definitions.system_topics)
    put_groups: Final = operation(definitions.put_groups)
    group_table: Final = operation(definitions.group_table)
    delete_group: Final = operation(definitions.delete_group)
    set_request_mode: Final = operation(definitions.set_request_mode)

    group_connections: Final = operation(clients.group_connections)
    producer_connections: Final = operation(clients.producer_connections)
    consume_stats: Final = operation(clients.consume_stats)
    move_group: Final = operation(clients.move_group)
    consume_stats_of: Final = operation(clients.consume_stats_of)
    producers: Final = operation(clients.producers)
    offset_at: Final = operation(clients.offset_at)
    queue_units: Final = operation(clients.queue_units)

    broker_settings: Final = operation(servers.broker_settings)
    change_broker_settings: Final = operation(servers.change_broker_settings)
    name_server_settings: Final = operation(servers.name_server_settings)
    change_name_server_settings: Final = operation(servers.change_name_server_settings)
    put_value: Final = operation(servers.put_value)
    value: Final = operation(servers.value)
    delete_value: Final = operation(servers.delete_value)
    allow_writing: Final = operation(servers.allow_writing)
    clean_up: Final = operation(servers.clean_up)
    replication_status: Final = operation(servers.replication_status)
    reset_flushed: Final = operation(servers.reset_flushed)
    roll_back_pops: Final = operation(servers.roll_back_pops)
    accounts: Final = operation(servers.accounts)
    account_versions: Final = operation(servers.account_versions)
    update_account: Final = operation(servers.update_account)
    delete_account: Final = operation(servers.delete_account)
    set_white_addresses: Final = operation(servers.set_white_addresses)
    counted_at: Final = operation(servers.counted_at)
    counted: Final = operation(servers.counted)
