"""900133: a group's contract, its lanes and whom it refused. Ours alone."""

import orjson

from sluicemq.broker import lane_file
from sluicemq.broker.clients import Consumers
from sluicemq.broker.groups import Groups
from sluicemq.errors import RequestError
from sluicemq.net.server import Handler, Peer
from sluicemq.protocol.codes import RequestCode, ResponseCode
from sluicemq.protocol.command import Command
from sluicemq.protocol.headers import GetConsumerListRequest, decode_header


class ContractAdmin:
    """The request family about contracts."""

    def __init__(self, groups: Groups, consumers: Consumers) -> None:
        self._groups = groups
        self._consumers = consumers

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.SLUICE_GROUP_LANES: self.lanes}

    def lanes(self, command: Command, peer: Peer) -> Command:
        """900133. Raises RequestError for a group that does not exist."""
        name = decode_header(GetConsumerListRequest, command.fields).group
        if name not in self._groups:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{name}] does not exist.",
            )
        contracts = self._consumers.contracts
        made = self._consumers.lanes.table.get(name)
        answer = {
            "conflicts": contracts.conflicts.get(name, 0),
            "contract": contracts.of(name),
            "forgotten": list(made.forgotten) if made is not None else [],
            "lanes": lane_file.show(made) if made is not None else [],
            "refused": {c: said.why for (g, c), said in contracts.refused.items() if g == name},
            "unmatched": made.unmatched if made is not None else 0,
        }
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(answer))
