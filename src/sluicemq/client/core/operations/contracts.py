"""The contract of a consumer group: read it, set it. Conversations as in `operations`.

A RocketMQ broker has no contracts (`show` gives nothing for it) and refuses the attribute.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import orjson

from sluicemq.client.core import requests
from sluicemq.client.core.answers import GROUP_NOT_EXIST, SUCCESS, request_error
from sluicemq.client.core.operations.topics import Ask, Talk, masters
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import CONTRACT, CONTRACTS
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode


@dataclass(frozen=True, slots=True)
class GroupContract:
    """A group's contract at one broker. `lanes` from the oldest on, as 900133 says them;
    `unmatched` messages that no lane wants; `refused` client id -> why; `forgotten` subscriptions
    that left and had to be given up, as 900133 says them."""

    broker: str
    contract: str
    lanes: tuple[dict[str, Any], ...] = ()
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    unmatched: int = 0
    forgotten: tuple[dict[str, Any], ...] = ()


def show(group: str) -> Talk[list[GroupContract]]:
    """By broker; brokers without contracts, or without the group, are left out."""
    found = []
    for broker, address in (yield from masters()).items():
        answer = yield Ask(address, requests.group_lanes(group), must_succeed=False)
        if answer.code in {GROUP_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}:
            continue
        if answer.code != SUCCESS:
            raise request_error(answer, address)
        said = orjson.loads(bytes(answer.body))
        found.append(
            GroupContract(
                broker,
                said["contract"],
                tuple(said["lanes"]),
                said["refused"],
                said["unmatched"],
                tuple(said.get("forgotten", ())),
            )
        )
    return found


def change(group: str, contract: str) -> Talk[list[str]]:
    """Sets it on every master that knows the group; returns their names. Raises
    ConfigurationError, RequestError."""
    if contract not in CONTRACTS:
        raise ConfigurationError(
            f"{contract!r} is not a contract.", cure=f"Use one of {', '.join(CONTRACTS)}."
        )
    found = []
    for broker, address in (yield from masters()).items():
        answer = yield Ask(address, requests.all_groups())
        config = bodies.decode_group_table(answer.body).groups.get(group)
        if config is not None:
            changed = dataclasses.replace(config, attributes={f"+{CONTRACT}": contract})
            yield Ask(address, requests.update_group(changed))
            found.append(broker)
    if not found:
        raise ConfigurationError(
            f"no broker knows the group {group!r}.", cure=f"sluice group create {group}"
        )
    return sorted(found)
