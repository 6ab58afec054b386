"""How pytest-xdist gives tests to the processes of `make test`.

A file is one piece of work, but for those that share the Spark session: they are all one, since
each process that has a session holds a JVM and its Python workers. Pieces that start a Java or many
processes are heavy: only as many processes as the machine has cores, and at least two, run them at
a time, and two more when nothing else is left. Java, Spark and the official clients have timeouts
of their own, of 3 to 10 s, which a machine that starts five of them at once misses.
"""

from pathlib import Path
from typing import Any, Final

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from waiting import CORES

OWN_PROCESSES: Final = {
    "test_spark_demo.py", "test_spark_standalone.py", "test_spark_no_java.py",
    "test_spark_notebook.py", "test_spark_restarts.py", "test_spark_outage.py",
}  # fmt: skip
"""Files that start Spark in a process of its own, or need none."""
HEAVY: Final = (
    "spark",
    "compatibility/",
    "integration/spark/",
    "integration/test_quickstart.py",
    "integration/test_tutorial.py",
    "integration/test_histories.py",
    "integration/test_spark_",
    "integration/console/test_console_in_chromium.py",
    "house/test_readme.py",
    "typing/",
)
"""Pieces that start a Java, a browser, or many processes at once."""
LONGEST: Final = (
    "spark",
    "compatibility/test_clients.py",
    "compatibility/test_delivery.py",
    "compatibility/test_proxy_java_broker.py",
    "compatibility/test_store_exchange.py",
    "compatibility/test_tls.py",
    "compatibility/test_replicas.py",
    "integration/test_spark_outage.py",
    "integration/test_spark_restarts.py",
    "compatibility/test_consuming.py",
    "integration/console/test_console_in_chromium.py",
    "compatibility/test_contract.py",
    "compatibility/test_popping.py",
    "compatibility/test_timer_exchange.py",
    "integration/test_quickstart.py",
    "compatibility/test_operations.py",
    "integration/test_histories.py",
    "compatibility/test_mqadmin_compared.py",
    "compatibility/test_recreated_topics.py",
    "integration/spark/test_spark_standalone.py",
)
"""Heavy pieces that take minutes: they begin first, so that none is left over at the end."""
HEAVY_MAX: Final = max(2, CORES)
"""Processes that run heavy pieces at the same time."""
HEAVY_ALONE_MAX: Final = HEAVY_MAX + 2
"""The same, when there are no other pieces: Java and Spark wait for most of their time."""


class Pieces(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives pieces of work to nodes, which are the processes that run tests.

    HEAVY_MAX nodes run heavy pieces from the beginning, the others run the rest. When only heavy
    ones are left, HEAVY_ALONE_MAX nodes run them, and the others end. (The groups of pytest-xdist
    itself, `xdist_group`, are not seen under pytest 9.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid.partition("::")[0].removeprefix("tests/"))

    def _assign_work_unit(self, node: Any) -> None:
        piece = self._next_for(node)
        if piece is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(piece, last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: Any) -> str | None:
        """Return the piece that the node is to run next; None if only heavy ones are left, and
        enough other nodes run some."""
        heavy: list[str] = sorted(filter(is_heavy, self.workqueue), key=_rank)
        others_left: Any = (piece for piece in self.workqueue if not is_heavy(piece))
        light: str | None = next(others_left, None)
        others = sum(self._runs_heavy(other) for other in self.nodes if other is not node)
        if heavy and others < (HEAVY_ALONE_MAX if light is None else HEAVY_MAX):
            return heavy[0]
        return light

    def _runs_heavy(self, node: Any) -> bool:
        return any(
            is_heavy(piece) and not all(tests.values())
            for piece, tests in self.assigned_work[node].items()
        )


def _rank(piece: str) -> int:
    return LONGEST.index(piece) if piece in LONGEST else len(LONGEST)


def is_heavy(piece: str) -> bool:
    """Return whether a piece of work is one of HEAVY."""
    return piece.startswith(HEAVY)


def piece_of(path: str) -> str:
    """The piece of work that a file belongs to; paths are below tests/."""
    name = Path(path).name
    is_named = path.startswith(("integration/", "compatibility/")) and (
        "spark" in path or name in {"test_pipelines_on_both.py", "test_archive_on_both.py"}
    )
    return "spark" if is_named and name not in OWN_PROCESSES else path
