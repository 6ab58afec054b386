"""Draw random mutations that cosmic-ray makes, and tell which ones no test of their area catches.

    python -m mutants.sampling [--area AREA] [--count 40] [--seed 1] [--jobs 2]

The mutants of the table were thought of by somebody. These were not: an operator or a number is
replaced, a condition negated, a loop emptied. A survivor is printed as a diff; it is either a hole
in the tests or changes nothing that counts. Needs cosmic-ray, which `make mutants-sample` installs.
"""

import argparse
import ast
import difflib
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from mutants.patching import path_of
from mutants.running import ROOT, Copy, Verdict


class Area(NamedTuple):
    """Modules to mutate, and the commands of which one has to fail for each of their mutants."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


_BROKER: Final = "tests/unit/broker/"
AREAS: Final = {
    "store": Area(
        tuple(f"sluicemq.store.{name}" for name in
              ("log", "writer", "queues", "dispatch", "recover", "retain")),
        ("tests/unit/store/test_store_append.py tests/unit/store/test_store_recovery.py "
         "tests/unit/store/test_store_promises.py tests/unit/store/test_store_retention.py "
         "tests/unit/store/test_consumequeue.py tests/unit/store/test_disk_errors.py",
         "tests/unit/store --deselect tests/unit/store/test_many_queues.py",
         "simulation.crashes --world store --seeds 100"),
    ),
    "turns": Area(
        ("sluicemq.broker.turns",),
        (f"{_BROKER}test_turns.py {_BROKER}test_durability.py {_BROKER}test_send.py "
         f"{_BROKER}test_pull.py {_BROKER}test_longpoll.py",
         f"{_BROKER}replicas {_BROKER}test_stop.py {_BROKER}test_full_disk.py "
         f"{_BROKER}test_request_cost.py {_BROKER}test_send_batch.py"),
    ),
    "pop": Area(
        tuple(f"sluicemq.broker.pop.{name}" for name in
              ("acknowledge", "assignment", "checkpoints", "order", "pop", "popped")),
        (f"{_BROKER}test_pop.py {_BROKER}test_pop_acks.py {_BROKER}test_checkpoints.py "
         f"{_BROKER}test_pop_waiting.py {_BROKER}test_pop_contract.py {_BROKER}test_order.py "
         f"{_BROKER}test_assignment.py",
         "tests/property/test_pop.py tests/property/test_order.py tests/unit/acl"),
    ),
    "timers": Area(
        (*(f"sluicemq.store.timers.{name}" for name in
           ("build", "checking", "files", "overdue", "placing", "state")),
         "sluicemq.broker.waiting.timers", "sluicemq.broker.waiting.delivery"),
        (f"tests/unit/store/test_timer_files.py {_BROKER}test_timers.py {_BROKER}test_delaying.py "
         f"{_BROKER}test_schedule.py {_BROKER}test_level_progress.py {_BROKER}test_clock_jumps.py",
         f"{_BROKER}test_timer_damage.py {_BROKER}test_timer_roles.py "
         f"tests/unit/store/test_timer_restore.py tests/unit/store/test_offline_verify.py "
         f"{_BROKER}test_wild_integers.py {_BROKER}test_damaged_delays.py",
         "simulation.cluster --kind timed --seeds 20"),
    ),
    "election": Area(
        ("sluicemq.replication.election", "sluicemq.replication.replica",
         "sluicemq.broker.replicas.insync"),
        (f"tests/unit/replication {_BROKER}replicas/test_insync.py",
         f"{_BROKER}replicas tests/property/test_failover_logs.py",
         "simulation.cluster --kind replicas --seeds 60"),
    ),
}  # fmt: skip


class Mutation(NamedTuple):
    """A text that replaces a module's, and the lines that differ."""

    module: str
    line: int
    operator: str
    text: str
    diff: str


def draw(area: Area, count: int, rng: random.Random) -> Iterator[Mutation]:
    """Yield `count` random mutations of the area's modules, each line at most once."""
    from cosmic_ray.ast import ast_nodes, get_ast  # only this command needs it
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    operators = {name: get_operator(name) for name in operator_names()}
    operators = {name: made() for name, made in operators.items() if not made.arguments()}
    texts = {module: (ROOT / path_of(module)).read_text() for module in area.modules}
    places: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for module, text in texts.items():
        nodes = [*ast_nodes(get_ast(text))]
        for name, operator in operators.items():
            found = (start for node in nodes for start, _ in operator.mutation_positions(node))
            for occurrence, (line, _) in enumerate(found):
                places.setdefault((module, line), []).append((name, occurrence))
    lines = sorted(places)
    rng.shuffle(lines)
    left = count
    for module, line in lines:
        name, occurrence = rng.choice(places[module, line])
        mutated = mutate_code(texts[module], operators[name], occurrence)
        if mutated is None or not _changes_behaviour(texts[module], mutated):
            continue
        yield Mutation(module, line, name, mutated, _diff(texts[module], mutated))
        left -= 1
        if not left:
            return


def _changes_behaviour(text: str, mutated: str) -> bool:
    """Return whether more than annotations differ. A text that is no Python any more does not
    count as a mutation."""
    try:
        return ast.dump(_Bare().visit(ast.parse(text))) != ast.dump(
            _Bare().visit(ast.parse(mutated))
        )
    except SyntaxError:
        return False


class _Bare(ast.NodeTransformer):
    """Removes annotations."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _diff(text: str, mutated: str) -> str:
    lines = difflib.unified_diff(text.splitlines(), mutated.splitlines(), lineterm="", n=2)
    return "\n".join([*lines][2:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the sample and return the number of survivors, 100 at most."""
    parser = argparse.ArgumentParser(
        prog="mutants.sampling", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--area", choices=AREAS, action="append", help="all unless given")
    parser.add_argument("--count", type=int, default=40, help="mutations of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies side by side")
    asked = parser.parse_args(arguments)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="sluicemq-sampled-") as scratch:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(asked.jobs):
            copies.put(Copy(Path(scratch, str(number))))
        for name in asked.area or AREAS:
            area = AREAS[name]
            sample = [*draw(area, asked.count, random.Random(asked.seed))]
            with ThreadPoolExecutor(asked.jobs) as pool:
                caught = [*pool.map(lambda one: _judge(copies, area, one), sample)]  # noqa: B023
            survivors += caught.count(False)
            print(f"{name}: {len(sample)} mutations, {caught.count(True)} caught", flush=True)
    return min(survivors, 100)


def _judge(copies: "SimpleQueue[Copy]", area: Area, mutation: Mutation) -> bool:
    copy = copies.get()
    verdict = Verdict(False, 0.0)
    try:
        for command in area.tests:
            verdict = copy.run_text(mutation.module, mutation.text, command)
            if verdict.is_caught or verdict.said:
                break
    finally:
        copies.put(copy)
    # A mutant that makes a test hang, or cannot be imported, is noticed too.
    is_caught = verdict.is_caught or bool(verdict.said)
    by = verdict.by or verdict.said.strip().rpartition("\n")[2]
    word = "caught" if is_caught else "SURVIVES"
    print(f"{word:>8} {verdict.seconds:5.1f} s  {mutation.module}:{mutation.line} "
          f"{mutation.operator}  {by if is_caught else ''}", flush=True)  # fmt: skip
    if not is_caught:
        print(mutation.diff, flush=True)
    return is_caught


if __name__ == "__main__":
    sys.exit(main())
