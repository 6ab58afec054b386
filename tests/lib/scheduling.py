"""How pytest-xdist gives tests to the processes of `make test`.

A file is one piece of work, but for those that share the Spark session: they are all one, since
each process that has a session holds a JVM and its Python workers. Pieces that start a Java or many
processes are heavy: only as many processes as the machine has cores, and at least two, run them at
a time. Java, Spark and the official clients have timeouts of their own, of 3 to 10 s, which a
machine that starts five of them at once misses.
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
    "typing/",
)
"""Pieces that start a Java, a browser, or many processes at once."""
HEAVY_MAX: Final = max(2, CORES)
"""Processes that run heavy pieces at the same time."""


class Pieces(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives pieces of work to nodes, which are the processes that run tests.

    Heavy pieces are run by HEAVY_MAX nodes at a time. When only heavy ones are left, the other
    nodes end. (The groups of pytest-xdist itself, `xdist_group`, are not seen under pytest 9.)
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
        """Return the first piece that the node may have; None if only heavy ones are left, and
        enough other nodes run some."""
        others = sum(self._runs_heavy(other) for other in self.nodes if other is not node)
        may_be_heavy = others < HEAVY_MAX
        return next((it for it in self.workqueue if may_be_heavy or not is_heavy(it)), None)

    def _runs_heavy(self, node: Any) -> bool:
        return any(
            is_heavy(piece) and not all(tests.values())
            for piece, tests in self.assigned_work[node].items()
        )


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
