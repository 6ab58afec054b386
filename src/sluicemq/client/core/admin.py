"""What `Admin` can do: one line an operation, bound by `core.talks.operation` for both shells.

Parameters, defaults and documentation stand at the Talk of each. Offsets are positions in one
queue, times are milliseconds since 1970.
"""

from sluicemq.client.core.directory import Directory
from sluicemq.client.core.operations import (
    clients,
    definitions,
    explain,
    letters,
    messages,
    servers,
)
from sluicemq.client.core.operations import groups as group_talks
from sluicemq.client.core.operations import replicas as replica_talks
from sluicemq.client.core.operations import topics as topic_talks
from sluicemq.client.core.talks import operation


class AdminOperations:
    """Routes, offsets, topics, groups, clusters. Raises the errors of `sluicemq.errors`."""

    route = operation(Directory.route)

    cluster_info = operation(topic_talks.cluster_info)
    masters = operation(topic_talks.masters)
    runtime = operation(topic_talks.runtime)
    access_status = operation(topic_talks.access_status)
    replicas = operation(replica_talks.replicas)
    switch_master = operation(replica_talks.switch_master)
    elect_master = operation(replica_talks.elect_master)

    topics = operation(topic_talks.topics)
    queues = operation(topic_talks.queues)
    create_topic = operation(topic_talks.create_topic)
    delete_topic = operation(topic_talks.delete_topic)
    topic_configs = operation(topic_talks.topic_configs)
    topic_stats = operation(topic_talks.topic_stats)
    topic_offsets = operation(topic_talks.topic_offsets)
    groups_of_topic = operation(topic_talks.groups_of_topic)

    offsets = operation(topic_talks.offsets)
    offset_min = operation(topic_talks.offset_min)
    offset_max = operation(topic_talks.offset_max)
    earliest_time = operation(topic_talks.earliest_time)
    offset_by_time = operation(topic_talks.offset_by_time)
    committed_offset = operation(topic_talks.committed_offset)
    commit_offset = operation(topic_talks.commit_offset)

    groups = operation(group_talks.groups)
    create_group = operation(group_talks.create_group)
    contract = operation(group_talks.contract)
    change_contract = operation(group_talks.change_contract)
    members = operation(group_talks.members)
    progress = operation(group_talks.progress)
    group = operation(group_talks.group)
    consumers = operation(group_talks.consumers)
    running_info = operation(group_talks.running_info)
    consume_directly = operation(group_talks.consume_directly)

    plan_reset = operation(group_talks.plan_reset)
    reset_offsets = operation(group_talks.reset_offsets)
    plan_clone = operation(group_talks.plan_clone)
    clone_offsets = operation(group_talks.clone_offsets)

    lag = operation(group_talks.lag)
    matching = operation(group_talks.matching)
    try_filter = operation(explain.try_filter)

    message_by_id = operation(messages.message_by_id)
    messages_by_key = operation(messages.messages_by_key)
    messages_with_id = operation(messages.messages_with_id)
    read_range = operation(messages.read_range)
    messages_between = operation(messages.messages_between)
    delayed = operation(messages.delayed)
    cancel_delayed = operation(messages.cancel_delayed)
    transactions = operation(messages.transactions)
    resolve_transaction = operation(messages.resolve_transaction)

    trace = operation(messages.trace)
    explain_message = operation(explain.explain_message)
    explain_group = operation(explain.explain_group)
    subscriptions = operation(explain.subscriptions)
    dead_letters = operation(letters.dead_letters)

    known_route = operation(definitions.known_route)
    put_topic = operation(definitions.put_topic)
    put_topics = operation(definitions.put_topics)
    topic_table = operation(definitions.topic_table)
    system_topics = operation(definitions.system_topics)
    put_groups = operation(definitions.put_groups)
    group_table = operation(definitions.group_table)
    delete_group = operation(definitions.delete_group)
    set_request_mode = operation(definitions.set_request_mode)

    group_connections = operation(clients.group_connections)
    producer_connections = operation(clients.producer_connections)
    consume_stats = operation(clients.consume_stats)
    move_group = operation(clients.move_group)
    consume_stats_of = operation(clients.consume_stats_of)
    producers = operation(clients.producers)
    offset_at = operation(clients.offset_at)
    queue_units = operation(clients.queue_units)

    broker_settings = operation(servers.broker_settings)
    change_broker_settings = operation(servers.change_broker_settings)
    name_server_settings = operation(servers.name_server_settings)
    change_name_server_settings = operation(servers.change_name_server_settings)
    put_value = operation(servers.put_value)
    value = operation(servers.value)
    delete_value = operation(servers.delete_value)
    allow_writing = operation(servers.allow_writing)
    clean_up = operation(servers.clean_up)
    replication_status = operation(servers.replication_status)
    reset_flushed = operation(servers.reset_flushed)
    roll_back_pops = operation(servers.roll_back_pops)
    accounts = operation(servers.accounts)
    account_versions = operation(servers.account_versions)
    update_account = operation(servers.update_account)
    delete_account = operation(servers.delete_account)
    set_white_addresses = operation(servers.set_white_addresses)
    counted_at = operation(servers.counted_at)
    counted = operation(servers.counted)
