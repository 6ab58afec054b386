"""Seeded histories of a group whose members subscribe to different things, on a whole cluster over
a network that fails; and bugs that a seed has to find.

`python -m simulation.cluster --kind split --seeds 1000` runs more; here are a few, or as many
as SLUICEMQ_SEEDS says.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simulation.cluster.__main__ import main, run_range
from simulation.cluster.runs import LENGTH, SPLIT, error_of
from simulation.silence import silence
from sluicemq.broker.consume.clients import ConsumerGroup
from sluicemq.broker.consume.filters import CompiledSubscription
from sluicemq.broker.consume.pull_checks import PullChecks, PullContext
from sluicemq.broker.lanes import group as lanes
from sluicemq.broker.lanes import group_table
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lane_queue import LaneQueue, create_spans
from sluicemq.broker.lanes.rules import compute_sole_rule
from thorough import seeds

SEEDS = seeds(4, 8)
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silence():
        yield


def test_a_split_group_loses_and_doubles_nothing_over_a_network_that_fails() -> None:
    failure = run_range(0, SEEDS, "split")
    assert failure is None, str(failure)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (327, [33, 35, 38, 43, 44, 45, 46]),  # a queue taken while the subscription changes
        (327, [0, 2, 7, 15, 16, 30, 31, 33, 34, 35, 38, 43, 44, 48]),  # refused, and taken again
        (402, [2, 8, 25, 30, 31, 33, 34, 35]),  # a pull between two changes
        (775, [5, 8, 9, 13, 14, 15, 17, 18, 19, 20]),  # who read for another lane once; a restart
    ],
)
def test_what_seeds_have_found_stays_mended(seed: int, steps: list[int]) -> None:
    assert error_of(seed, steps, kind=SPLIT) is None


# --- planted bugs


def every_lane_gets_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_rules(
        topic: str, live: list[str], idle: list[str], known: Any = None
    ) -> dict[str, Any]:
        return {key: compute_sole_rule(topic, key) for key in (*live, *idle)}

    for module in (lanes, group_table):
        monkeypatch.setattr(module, "compute_rules", compute_rules)


def what_a_lane_left_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over(lanes: GroupLanes, lane: Any, queue: tuple[str, int], takers: Any = None) -> bool:
        lane.queues[queue].commit(lanes.storage.get_end_offset(queue))
        return True

    monkeypatch.setattr(GroupLanes, "_hand_over", hand_over)


def a_new_lane_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reassign_rules(self: GroupLanes) -> None: ...

    monkeypatch.setattr(GroupLanes, "reassign_rules", reassign_rules)


def a_lane_begins_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    create_lane = GroupLanes._create_lane

    def create_lane_at_zero(self: GroupLanes, key: str) -> Lane:
        lane = create_lane(self, key)
        for queue in lane.queues:
            lane.queues[queue] = LaneQueue(
                0, 0, create_spans(0, compute_sole_rule(queue[0], key)), read_end=0
            )
        return lane

    monkeypatch.setattr(GroupLanes, "_create_lane", create_lane_at_zero)


def strangers_read_by_the_filter_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    of_member = PullChecks._find_member_subscription

    def watch(
        self: PullChecks, reading: PullContext, group: ConsumerGroup
    ) -> CompiledSubscription | None:
        is_known = group.find_member(reading.peer, reading.fields) is not None
        return of_member(self, reading, group) if is_known else None

    monkeypatch.setattr(PullChecks, "_find_member_subscription", watch)


PLANTED: list[tuple[Plant, int]] = [
    (every_lane_gets_what_it_wants, 1),
    (what_a_lane_left_is_nobodys, 1),
    (a_new_lane_gets_nothing, 2),
    (a_lane_begins_at_zero, 1),
    (strangers_read_by_the_filter_of_others, 5),
]
NEARBY = 20


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("plant", "seed"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_of_lanes_is_found(
    plant: Plant, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    steps = list(range(LENGTH))
    for more in range(NEARBY):
        if error_of(seed + more, steps, kind=SPLIT) is not None:
            print(f"found by seed {seed + more}")
            return
    pytest.fail(f"the planted bug is not found in {NEARBY} seeds")


def test_the_command_takes_the_kind_of_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "split", "--seeds", "2", "--first", "0", "--jobs", "1"]) == 0
    assert "2 seeds of the split: all went well" in capsys.readouterr().out
