"""The command: random mutants that cosmic-ray makes, and which ones no test of their area catches.

    python -m mutants.sampling [--area AREA] [--count 40] [--seed 1] [--jobs 2]

A mutant replaces an operator or a number, negates a condition or empties a loop. A survivor is
printed as a diff: it shows a hole in the tests, or it changes no behaviour. The exit code is 1 when
a mutant survives. Needs cosmic-ray, which `make mutants-sample` installs.
"""

import argparse
import ast
import difflib
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from mutants.patching import Mutant, path_of
from mutants.running import ROOT, Copies, Copy


class Area(NamedTuple):
    """The modules to mutate, and test commands; one of these has to fail for each mutant."""

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
    "group commit": Area(
        ("sluicemq.broker.group_commit",),
        (f"{_BROKER}test_group_commit.py {_BROKER}test_durability.py {_BROKER}test_send.py "
         f"{_BROKER}test_pull.py {_BROKER}test_longpoll.py",
         f"{_BROKER}replication {_BROKER}test_stop.py {_BROKER}test_full_disk.py "
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
         "sluicemq.broker.waiting.timers", "sluicemq.broker.waiting.overdue",
         "sluicemq.broker.waiting.due_table",
         "sluicemq.broker.waiting.levels", "sluicemq.broker.waiting.delivery"),
        (f"tests/unit/store/test_timer_files.py {_BROKER}test_timers.py {_BROKER}test_delaying.py "
         f"{_BROKER}test_schedule.py {_BROKER}test_level_progress.py {_BROKER}test_clock_jumps.py",
         f"{_BROKER}test_timer_damage.py {_BROKER}test_timer_roles.py "
         f"tests/unit/store/test_timer_restore.py tests/unit/store/test_offline_verify.py "
         f"{_BROKER}test_wild_integers.py {_BROKER}test_damaged_delays.py",
         "simulation.cluster --kind timed --seeds 20"),
    ),
    "election": Area(
        ("sluicemq.broker.failover.election", "sluicemq.broker.failover.replica",
         "sluicemq.broker.replication.in_sync"),
        (f"tests/unit/broker/failover {_BROKER}replication/test_in_sync.py",
         f"{_BROKER}replication tests/property/test_failover_logs.py",
         "simulation.cluster --kind replicas --seeds 60"),
    ),
}  # fmt: skip


def draw(area: str, rng: random.Random) -> Iterator[Mutant]:
    """Yield random mutants of an area, each of another line. Each replaces the whole text of its
    module; `name` is the module and the line, `reason` what cosmic-ray calls the mutation."""
    from cosmic_ray.ast import ast_nodes, get_ast  # only this command needs it
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    operators = {name: get_operator(name) for name in operator_names()}
    operators = {name: made() for name, made in operators.items() if not made.arguments()}
    texts = {module: (ROOT / path_of(module)).read_text() for module in AREAS[area].modules}
    places: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for module, text in texts.items():
        nodes = [*ast_nodes(get_ast(text))]
        for name, operator in operators.items():
            found = (start for node in nodes for start, _ in operator.mutation_positions(node))
            for occurrence, (line, _) in enumerate(found):
                places.setdefault((module, line), []).append((name, occurrence))
    lines = sorted(places)
    rng.shuffle(lines)
    for module, line in lines:
        name, occurrence = rng.choice(places[module, line])
        text, mutated = texts[module], mutate_code(texts[module], operators[name], occurrence)
        if mutated is not None and _changes_behaviour(text, mutated):
            yield Mutant(area, f"{module}:{line}", name, module, "", text, mutated, "")


def _changes_behaviour(text: str, mutated: str) -> bool:
    """Return whether a mutated module differs in more than annotations, and can be parsed."""
    try:
        changed = ast.parse(mutated)
    except SyntaxError:
        return False
    bare = _WithoutAnnotations()
    return ast.dump(bare.visit(ast.parse(text))) != ast.dump(bare.visit(changed))


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes the annotations of arguments, results and variables."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_function(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _diff(mutant: Mutant) -> str:
    """Return the lines that the mutant changes as a unified diff, without the names of files."""
    old, new = mutant.old.splitlines(), mutant.new.splitlines()
    return "\n".join([*difflib.unified_diff(old, new, lineterm="", n=2)][2:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Test a sample of each area; return the exit code: 1 if a mutant survives, or if a test fails
    without one."""
    parser = argparse.ArgumentParser(
        prog="mutants.sampling", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--area", choices=AREAS, action="append", help="all unless given")
    parser.add_argument("--count", type=int, default=40, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies side by side")
    asked = parser.parse_args(arguments)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="sluicemq-sampled-") as scratch:
        copies = Copies(Path(scratch), asked.jobs)
        areas = asked.area or [*AREAS]
        if copies.report_failures(test for area in areas for test in AREAS[area].tests):
            return 1
        for area in areas:
            sample = [*itertools.islice(draw(area, random.Random(asked.seed)), asked.count)]
            missed = copies.map(_judge, sample).count(False)
            print(f"{area}: {len(sample)} mutants, {missed} survive", flush=True)
            survivors += missed
    return 1 if survivors else 0


def _judge(copy: Copy, mutant: Mutant) -> bool:
    """Run the tests of the mutant's area, one command after the other, until one catches it. Print
    how that went, and return whether it was caught. A mutant that hangs or breaks a test's module
    counts as caught: the tests pass without it."""
    for command in AREAS[mutant.area].tests:
        verdict = copy.run(mutant._replace(caught_by=command))
        if verdict.is_caught or verdict.said:
            by = verdict.by or verdict.said.strip().rpartition("\n")[2]
            print(f"  caught {mutant.name}  {mutant.reason}  {by}", flush=True)
            return True
    print(f"SURVIVES {mutant.name}  {mutant.reason}\n{_diff(mutant)}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
