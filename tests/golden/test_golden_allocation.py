"""Shares as the real Java client 5.3.3 computes them (tests/compatibility/java/Shares.java).

`allocation/cases.jsonl`: strategy with its settings, queues by broker, members, and for each member
the indexes of its queues in the sorted list.
"""

import json
from pathlib import Path

import pytest

from sluicemq.client.core.balance import strategy
from sluicemq.model.topic import MessageQueue, Strategy

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "allocation" / "cases.jsonl").read_text().splitlines()
]


def made(text: str) -> Strategy:
    name, *rest = text.split()
    if name == "machine_room":
        return strategy(name, rooms=rest)
    if name == "machine_room_nearby":
        return strategy(name, inner=made(" ".join(rest)))
    return strategy(name, virtual_nodes=int(rest[0])) if rest else strategy(name)


@pytest.mark.parametrize("text", sorted({case["strategy"] for case in CASES}))
def test_shares_are_those_of_the_java_client(text: str) -> None:
    cases = [case for case in CASES if case["strategy"] == text]
    assert len(cases) == 40
    chosen = made(text)
    for case in cases:
        queues = [
            MessageQueue(case["topic"], broker, queue_id)
            for broker, count in sorted(case["queues"].items())
            for queue_id in range(count)
        ]
        for member, wanted in zip(case["members"], case["shares"], strict=True):
            own = chosen(member, queues, case["members"])
            assert [queues.index(queue) for queue in own] == wanted, (text, member)
