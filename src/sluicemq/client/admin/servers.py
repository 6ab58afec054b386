"""What brokers and name servers are set to, what they count, and what they can be told to do."""

from collections.abc import Mapping
from typing import Any

from sluicemq.client.admin.topics import masters_of_topic
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import NAME_SERVERS, Directory
from sluicemq.client.core.requests import SUCCESS, int_field
from sluicemq.wire import fastjson, headers
from sluicemq.wire.declare import decode_header


def _settings(body: bytes | memoryview) -> dict[str, str]:
    """Lines of a .properties file as servers write them: nothing in them is escaped."""
    lines = (line.partition("=") for line in bytes(body).decode().splitlines())
    return {key: value for key, separator, value in lines if separator and key[0] != "#"}


def broker_settings(directory: Directory, address: str) -> Conversation[dict[str, str]]:
    """All settings of a broker, with those that nobody has set."""
    return _settings((yield from directory.call(address, requests.broker_settings())).body)


def change_broker_settings(
    directory: Directory, address: str, changes: Mapping[str, str]
) -> Conversation[None]:
    """Changes settings of a broker, which writes them into its file."""
    yield from directory.call(address, requests.change_settings(changes))


def name_server_settings(directory: Directory, address: str) -> Conversation[dict[str, str]]:
    """All settings of a name server."""
    return _settings((yield from directory.call(address, requests.name_server_settings())).body)


def change_name_server_settings(
    directory: Directory, address: str, changes: Mapping[str, str]
) -> Conversation[None]:
    """Changes settings of a name server."""
    yield from directory.call(address, requests.change_settings(changes, of_name_server=True))


def put_value(directory: Directory, namespace: str, key: str, value: str) -> Conversation[None]:
    """Keeps a value at every name server."""
    for server in directory.name_servers:
        yield from directory.call(
            server, requests.put_kv(namespace=namespace, key=key, value=value)
        )


def value(directory: Directory, namespace: str, key: str) -> Conversation[str]:
    """What a name server keeps. Raises RequestError when there is nothing."""
    answer = yield from directory.call(NAME_SERVERS, requests.get_kv(namespace=namespace, key=key))
    return (answer.fields or {}).get("value", "")


def delete_value(directory: Directory, namespace: str, key: str) -> Conversation[None]:
    """Forgets a value at every name server."""
    for server in directory.name_servers:
        yield from directory.call(server, requests.delete_kv(namespace=namespace, key=key))


def allow_writing(
    directory: Directory, server: str, broker: str, *, allowed: bool
) -> Conversation[int]:
    """Whether producers may choose a broker, by the word of one name server; the number of topics
    that it is about. Until the broker starts anew, or is allowed again."""
    if allowed:
        answer = yield from directory.call(server, requests.add_write_permission(broker=broker))
        return int_field(answer, "addTopicCount")
    answer = yield from directory.call(server, requests.wipe_write_permission(broker=broker))
    return int_field(answer, "wipeTopicCount")


def clean_up(directory: Directory, address: str, what: str) -> Conversation[None]:
    """Deletes what nobody needs: expired `queues`, unused `topics`, expired files of the `log`."""
    yield from directory.call(address, requests.clean_up(what))


def replication_status(directory: Directory, address: str) -> Conversation[dict[str, Any]]:
    """What a broker says of its slaves, or of its master (spec/admin.md §4, 907)."""
    answer = yield from directory.call(address, requests.replication_status())
    found: dict[str, Any] = fastjson.loads(answer.body)
    return found


def reset_flushed(directory: Directory, address: str, offset: int) -> Conversation[None]:
    """Tells a slave how far its master is flushed."""
    yield from directory.call(address, requests.reset_flushed(offset=offset))


def roll_back_pops(directory: Directory, address: str) -> Conversation[None]:
    """Has a broker bring back what is popped and not acknowledged, from where RocketMQ 5.4 keeps
    it."""
    yield from directory.call(address, requests.roll_back_pops())


def counted_at(
    directory: Directory, address: str, name: str, key: str
) -> Conversation[tuple[float, int]]:
    """(How many a second in the last minute, how many in the last day) of a count of a broker; 0
    of one that it does not know (spec/admin.md §4, 315)."""
    answer = yield Call(address, requests.statistics(name=name, key=key))
    if answer.code != SUCCESS:
        return 0.0, 0
    found = fastjson.loads(answer.body)
    sums = (found[span]["sum"] for span in ("statsDay", "statsHour", "statsMinute"))
    return found["statsMinute"]["tps"], next(filter(None, sums), 0)


def counted(
    directory: Directory, name: str, key: str, topic: str
) -> Conversation[tuple[float, int]]:
    """The same over the masters of a topic."""
    rate, count = 0.0, 0
    for address in (yield from masters_of_topic(directory, topic)).values():
        own_rate, own_count = yield from counted_at(directory, address, name, key)
        rate, count = rate + own_rate, count + own_count
    return rate, count


def update_account(
    directory: Directory, address: str, account: headers.UpdateAccountRequest
) -> Conversation[None]:
    """Creates an account of a broker, or changes what is given."""
    yield from directory.call(address, requests.update_account(account))


def delete_account(directory: Directory, address: str, access_key: str) -> Conversation[None]:
    """Deletes an account of a broker."""
    yield from directory.call(address, requests.delete_account(access_key=access_key))


def set_white_addresses(
    directory: Directory, address: str, addresses: str, file: str | None = None
) -> Conversation[None]:
    """Who is let in without a signature: addresses joined by commas, in the main file of a broker
    or in the one that is named."""
    command = requests.set_white_addresses(addresses=addresses, file=file)
    yield from directory.call(address, command)


def accounts(directory: Directory, address: str) -> Conversation[dict[str, Any]]:
    """The accounts of a broker, by the names of plain_acl.yml, their secrets masked."""
    answer = yield from directory.call(address, requests.accounts())
    found: dict[str, Any] = fastjson.loads(answer.body)
    return found


def account_versions(
    directory: Directory, address: str
) -> Conversation[headers.AccessVersionResponse]:
    """Which edition of its rules a broker has in force."""
    answer = yield from directory.call(address, requests.account_versions())
    return decode_header(headers.AccessVersionResponse, answer.fields or {})
