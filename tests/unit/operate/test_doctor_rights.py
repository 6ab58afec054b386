"""What doctor asks of whom to learn of rights: nothing that changes a broker."""

from types import SimpleNamespace
from typing import Any

from sluicemq.client.admin.diagnose.cluster_facts import BrokerFacts
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.model.reachability import Reachability
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.operate.doctor import Walk
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

KNOWS, KNOWS_NOT = "10.0.0.1:10911", "10.0.0.2:10911"


class Asked:
    """Two masters that have the topic; the first one has the group."""

    credentials, clock = ("key", "secret"), SYSTEM_CLOCK

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def groups(self) -> dict[str, GroupConfig]:
        return {"G": GroupConfig("G")}

    def group_table(self, address: str) -> Any:
        return SimpleNamespace(groups=self.groups() if address == KNOWS else {})

    def call(self, address: str, command: Command) -> Command:
        self.asked.append((address, command.code))
        return Command(1, remark="no such queue")


def test_only_a_broker_that_has_the_group_is_asked_with_it() -> None:
    admin: Any = Asked()
    seen = [
        BrokerFacts(address, Reachability.RESPONDS, name=name, topic=TopicConfig("T"))
        for name, address in (("a", KNOWS), ("b", KNOWS_NOT))
    ]
    walk = Walk(admin, "T")
    walk.check_permissions("T", "G", seen)
    pulls = [at for at, code in admin.asked if code == RequestCode.PULL_MESSAGE]
    assert pulls == [KNOWS]
    assert {at for at, _ in admin.asked} == {KNOWS, KNOWS_NOT}, "sending is tried at both"
    assert not walk.denied
