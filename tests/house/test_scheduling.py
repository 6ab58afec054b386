"""Which tests the processes of `make test` get."""

from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling import HEAVY_ALONE_MAX, HEAVY_MAX, LONGEST, Pieces, is_heavy, piece_of

LIGHT = [f"unit/test_{n}.py" for n in range(6)]
HARD = ["compatibility/test_a.py", "integration/spark/test_b.py", "integration/test_quickstart.py"]


class Node:
    """A process of pytest-xdist that runs what it is given, when it is told to."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="node")
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def can_run(self) -> bool:
        """xdist runs a test when it knows the next one, or that there is none."""
        return len(self.given) > 1 or (self.shutting_down and bool(self.given))


@given(st.data())
def test_every_test_runs_once_and_few_processes_run_heavy_ones(
    pytestconfig: pytest.Config, data: st.DataObject
) -> None:
    paths = data.draw(st.permutations(LIGHT + HARD))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(paths), max_size=len(paths)))
    tests = [f"tests/{path}::t{n}" for path, size in zip(paths, sizes, strict=True)
             for n in range(size)]  # fmt: skip
    nodes: list[Any] = [Node() for _ in range(data.draw(st.integers(1, 5)))]
    scheduler = Pieces.__new__(Pieces)
    _prepare(scheduler, pytestconfig, len(nodes))
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    done: Counter[str] = Counter()
    while running := [node for node in nodes if node.can_run]:
        busy = {id(node) for node in nodes if any(_is_heavy(tests[it]) for it in node.given[:1])}
        assert len(busy) <= HEAVY_ALONE_MAX
        if not all(map(is_heavy, scheduler.workqueue)):
            assert len(busy) <= HEAVY_MAX
        node = data.draw(st.sampled_from(running))
        index = node.given.pop(0)
        done[tests[index]] += 1
        scheduler.mark_test_complete(node, index)
    assert done == Counter(tests)
    assert scheduler.tests_finished


def test_the_pieces_that_begin_first_exist_and_are_heavy() -> None:
    tests = Path(__file__).parents[1]
    assert [it for it in LONGEST if it != "spark" and not (tests / it).is_file()] == []
    assert all(map(is_heavy, LONGEST))


def _prepare(scheduler: Pieces, config: pytest.Config, count: int) -> None:
    """What the constructor does, whose number of nodes is an option of the run."""

    scheduler.numnodes, scheduler.collection, scheduler.config = count, None, config
    scheduler.workqueue, scheduler.assigned_work = OrderedDict(), {}
    scheduler.registered_collections, scheduler.log = {}, lambda *_: None  # type: ignore[assignment]


def _is_heavy(test: str) -> bool:
    return is_heavy(piece_of(test.partition("::")[0].removeprefix("tests/")))
