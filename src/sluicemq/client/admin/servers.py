"""Operations on single servers: settings, counters, cleaning, replication, accounts.

Most of them take the address of one broker or name server. Offsets are positions in one queue,
times are milliseconds since 1970.
"""

from collections.abc import Mapping
from typing import Any

from sluicemq.client.admin.topics import masters_of_topic
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import NAME_SERVERS, Directory
from sluicemq.client.core.requests import SUCCESS, int_field
from sluicemq.wire import fastjson, headers
from sluicemq.wire.declare import decode_header


def _parse_settings(body: bytes | memoryview) -> dict[str, str]:
    """Parse the lines of a .properties file as servers send them, without any escaping."""
    lines = (line.partition("=") for line in bytes(body).decode().splitlines())
    return {name: setting for name, separator, setting in lines if separator and name[0] != "#"}


def broker_settings(directory: Directory, address: str) -> Conversation[dict[str, str]]:
    """Return all settings of a broker, including defaults."""
    return _parse_settings((yield from directory.call(address, requests.broker_settings())).body)


def change_broker_settings(
    directory: Directory, address: str, changes: Mapping[str, str]
) -> Conversation[None]:
    """Change settings of a broker. The broker writes them to its file."""
    yield from directory.call(address, requests.change_settings(changes))


def name_server_settings(directory: Directory, address: str) -> Conversation[dict[str, str]]:
    """Return all settings of a name server, including defaults."""
    return _parse_settings(
        (yield from directory.call(address, requests.name_server_settings())).body
    )


def change_name_server_settings(
    directory: Directory, address: str, changes: Mapping[str, str]
) -> Conversation[None]:
    """Change settings of a name server."""
    yield from directory.call(address, requests.change_settings(changes, of_name_server=True))


def put_kv_config(directory: Directory, namespace: str, key: str, value: str) -> Conversation[None]:
    """Store `value` under `key` in a namespace of the configuration of every name server."""
    for server in directory.name_servers:
        yield from directory.call(
            server, requests.put_kv(namespace=namespace, key=key, value=value)
        )


def kv_config(directory: Directory, namespace: str, key: str) -> Conversation[str]:
    """Return a value of the key-value configuration, as one name server has it.

    Raises RequestError if there is none.
    """
    answer = yield from directory.call(NAME_SERVERS, requests.get_kv(namespace=namespace, key=key))
    return (answer.fields or {}).get("value", "")


def delete_kv_config(directory: Directory, namespace: str, key: str) -> Conversation[None]:
    """Delete a value of the name servers' key-value configuration."""
    for server in directory.name_servers:
        yield from directory.call(server, requests.delete_kv(namespace=namespace, key=key))


def set_write_permission(
    directory: Directory, server: str, broker: str, *, allowed: bool
) -> Conversation[int]:
    """Allow or forbid producers to send to a broker, at one name server.

    Returns the number of topics that changed. A forbidden broker stays forbidden until it restarts
    or is allowed again. RocketMQ calls this wipeWritePerm.
    """
    if allowed:
        answer = yield from directory.call(server, requests.add_write_permission(broker=broker))
        return int_field(answer, "addTopicCount")
    answer = yield from directory.call(server, requests.wipe_write_permission(broker=broker))
    return int_field(answer, "wipeTopicCount")


def clean_up(directory: Directory, address: str, what: str) -> Conversation[None]:
    """Delete what a broker no longer needs.

    `what` is "queues" for expired consume queues, "topics" for unused topics, or "log" for expired
    files of the commit log.
    """
    yield from directory.call(address, requests.clean_up(what))


def replication_status(directory: Directory, address: str) -> Conversation[dict[str, Any]]:
    """Return what a broker reports of its slaves, or of its master (907; spec/admin.md §4)."""
    answer = yield from directory.call(address, requests.replication_status())
    status: dict[str, Any] = fastjson.loads(answer.body)
    return status


def reset_flushed_position(directory: Directory, address: str, offset: int) -> Conversation[None]:
    """Tell a slave up to which position of the log its master is flushed."""
    yield from directory.call(address, requests.reset_flushed(offset=offset))


def roll_back_pops(directory: Directory, address: str) -> Conversation[None]:
    """Make a broker deliver messages again that are popped and not acknowledged.

    It concerns the messages of which RocketMQ 5.4 keeps the state in its own store.
    """
    yield from directory.call(address, requests.roll_back_pops())


def statistic_at(
    directory: Directory, address: str, name: str, key: str
) -> Conversation[tuple[float, int]]:
    """Return a statistic of a broker as (rate per second, count in the last day).

    The rate is that of the last minute. `name` is RocketMQ's name of the statistic, and `key` is
    what is counted, such as a topic. Both numbers are 0 if the broker does not have the statistic.
    During its first day a broker reports the count of the last hour or minute instead.
    """
    answer = yield Call(address, requests.statistics(name=name, key=key))
    if answer.code != SUCCESS:
        return 0.0, 0
    statistics = fastjson.loads(answer.body)
    # The sum of a day is 0 until the broker has sampled a day. The sum of an hour likewise.
    count = (
        statistics["statsDay"]["sum"]
        or statistics["statsHour"]["sum"]
        or statistics["statsMinute"]["sum"]
        or 0
    )
    return statistics["statsMinute"]["tps"], count


def statistic(
    directory: Directory, name: str, key: str, topic: str
) -> Conversation[tuple[float, int]]:
    """Return (rate per second, count in a day) of a statistic, summed over a topic's masters.

    `name` is RocketMQ's name of the statistic, and `key` is what is counted, such as the topic. A
    broker that does not have it counts as 0.
    """
    rate = 0.0
    count = 0
    masters_by_name = yield from masters_of_topic(directory, topic)
    for address in masters_by_name.values():
        broker_rate, broker_count = yield from statistic_at(directory, address, name, key)
        rate += broker_rate
        count += broker_count
    return rate, count


def update_account(
    directory: Directory, address: str, account: headers.UpdateAccountRequest
) -> Conversation[None]:
    """Create an account of a broker, or change the given fields of one."""
    yield from directory.call(address, requests.update_account(account))


def delete_account(directory: Directory, address: str, access_key: str) -> Conversation[None]:
    """Delete an account of a broker."""
    yield from directory.call(address, requests.delete_account(access_key=access_key))


def set_white_addresses(
    directory: Directory, address: str, addresses: str, file: str | None = None
) -> Conversation[None]:
    """Set the addresses from which a broker accepts requests without a signature.

    `addresses` is a list joined by commas. `file` is the rules file to change, None for the main
    one.
    """
    command = requests.set_white_addresses(addresses=addresses, file=file)
    yield from directory.call(address, command)


def accounts(directory: Directory, address: str) -> Conversation[dict[str, Any]]:
    """Return the accounts of a broker as in plain_acl.yml, with masked secret keys."""
    answer = yield from directory.call(address, requests.accounts())
    accounts_by_section: dict[str, Any] = fastjson.loads(answer.body)
    return accounts_by_section


def account_versions(
    directory: Directory, address: str
) -> Conversation[headers.AccessVersionResponse]:
    """Return the version of the access rules that a broker uses."""
    answer = yield from directory.call(address, requests.account_versions())
    return decode_header(headers.AccessVersionResponse, answer.fields or {})
