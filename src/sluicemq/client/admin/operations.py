"""The operations of `Admin`: one line for each, bound to both shells by `conversations.operation`.

The parameters, defaults and documentation of an operation are those of its function. Offsets are
positions in one queue, times are milliseconds since 1970.
"""

from typing import Final

from sluicemq.client.admin import (
    clients,
    definitions,
    explain,
    filter_trials,
    group_offsets,
    group_report,
    messages,
    servers,
    traces,
)
from sluicemq.client.admin import dead_letters as dead_letter_operations
from sluicemq.client.admin import groups as group_operations
from sluicemq.client.admin import replicas as replica_operations
from sluicemq.client.admin import subscriptions as subscription_operations
from sluicemq.client.admin import topics as topic_operations
from sluicemq.client.core.conversations import operation
from sluicemq.hints import with_hints


@with_hints
class AdminOperations:
    """Operations on clusters, brokers, topics, groups, offsets and messages.

    They raise the errors of `sluicemq.errors`. The shells add `route`.
    """

    cluster_info: Final = operation(topic_operations.cluster_info)
    masters: Final = operation(topic_operations.masters)
    runtime: Final = operation(topic_operations.runtime)
    access_status: Final = operation(topic_operations.access_status)
    replicas: Final = operation(replica_operations.replicas)
    switch_master: Final = operation(replica_operations.switch_master)
    elect_master: Final = operation(replica_operations.elect_master)

    topics: Final = operation(topic_operations.topics)
    queues: Final = operation(topic_operations.queues)
    create_topic: Final = operation(topic_operations.create_topic)
    delete_topic: Final = operation(topic_operations.delete_topic)
    topic_configs: Final = operation(topic_operations.topic_configs)
    topic_stats: Final = operation(topic_operations.topic_stats)
    topic_offsets: Final = operation(topic_operations.topic_offsets)
    groups_of_topic: Final = operation(topic_operations.groups_of_topic)

    offsets: Final = operation(topic_operations.offsets)
    offset_min: Final = operation(topic_operations.offset_min)
    offset_max: Final = operation(topic_operations.offset_max)
    earliest_time: Final = operation(topic_operations.earliest_time)
    offset_by_time: Final = operation(topic_operations.offset_by_time)
    committed_offset: Final = operation(topic_operations.committed_offset)
    commit_offset: Final = operation(topic_operations.commit_offset)

    groups: Final = operation(group_operations.groups)
    create_group: Final = operation(group_operations.create_group)
    contract: Final = operation(group_operations.contract)
    change_contract: Final = operation(group_operations.change_contract)
    members: Final = operation(group_operations.members)
    progress: Final = operation(group_operations.progress)
    group: Final = operation(group_report.group)
    consumers: Final = operation(group_operations.consumers)
    running_info: Final = operation(group_operations.running_info)
    consume_directly: Final = operation(group_operations.consume_directly)

    plan_reset: Final = operation(group_offsets.plan_reset)
    reset_offsets: Final = operation(group_offsets.reset_offsets)
    plan_clone: Final = operation(group_offsets.plan_clone)
    clone_offsets: Final = operation(group_offsets.clone_offsets)

    lag: Final = operation(group_operations.lag)
    matching: Final = operation(group_operations.matching)
    try_filter: Final = operation(filter_trials.try_filter)

    message_by_id: Final = operation(messages.message_by_id)
    messages_by_key: Final = operation(messages.messages_by_key)
    messages_with_id: Final = operation(messages.messages_with_id)
    read_range: Final = operation(messages.read_range)
    messages_between: Final = operation(messages.messages_between)
    delayed: Final = operation(messages.delayed)
    cancel_delayed: Final = operation(messages.cancel_delayed)
    transactions: Final = operation(messages.transactions)
    resolve_transaction: Final = operation(messages.resolve_transaction)

    trace: Final = operation(traces.trace)
    explain_message: Final = operation(explain.explain_message)
    explain_group: Final = operation(explain.explain_group)
    subscriptions: Final = operation(subscription_operations.subscriptions)
    dead_letters: Final = operation(dead_letter_operations.dead_letters)
    dead_letter_judge: Final = operation(dead_letter_operations.dead_letter_judge)

    current_route: Final = operation(definitions.current_route)
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
    request_offset_reset: Final = operation(clients.request_offset_reset)
    consume_stats_at: Final = operation(clients.consume_stats_at)
    producers: Final = operation(clients.producers)
    offset_by_time_at: Final = operation(clients.offset_by_time_at)
    queue_units: Final = operation(clients.queue_units)

    broker_settings: Final = operation(servers.broker_settings)
    change_broker_settings: Final = operation(servers.change_broker_settings)
    name_server_settings: Final = operation(servers.name_server_settings)
    change_name_server_settings: Final = operation(servers.change_name_server_settings)
    put_kv_config: Final = operation(servers.put_kv_config)
    kv_config: Final = operation(servers.kv_config)
    delete_kv_config: Final = operation(servers.delete_kv_config)
    set_write_permission: Final = operation(servers.set_write_permission)
    clean_up: Final = operation(servers.clean_up)
    replication_status: Final = operation(servers.replication_status)
    reset_flushed_position: Final = operation(servers.reset_flushed_position)
    roll_back_pops: Final = operation(servers.roll_back_pops)
    accounts: Final = operation(servers.accounts)
    account_versions: Final = operation(servers.account_versions)
    update_account: Final = operation(servers.update_account)
    delete_account: Final = operation(servers.delete_account)
    set_white_addresses: Final = operation(servers.set_white_addresses)
    statistic_at: Final = operation(servers.statistic_at)
    statistic: Final = operation(servers.statistic)
