"""`make bench`: our broker beside the real one, case by case, in one run.

    python -m benchmarks [--quick] [--only WORD] [--json FILE] [--no-java]

Without Java, Maven or the jars the real broker's column stays empty and the cases of the Java
client are left out; the reason is printed. See README.md in this folder for how to read the table.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [*(str(ROOT / name) for name in ("tests/compatibility", "tests/lib", "src"))]

from peer import clusters, drivers, toolchain  # noqa: E402

from benchmarks import cases, measure  # noqa: E402

# The heap of the real broker's own figures (1 GiB to 2 GiB); what a user would give it on a small
# machine.
REAL_HEAP = ("-Xms1g", "-Xmx2g", "-XX:MaxDirectMemorySize=1g", "-XX:+UseG1GC")
CLIENT_HEAP = ("-Xms256m", "-Xmx1g", "-XX:+UseG1GC")
SETTLE_S = 2.0


def main() -> int:
    options = arguments()
    plan = cases.QUICK if options.quick else cases.FULL
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluicemq-bench-")))
        java = None if options.no_java else java_client(scratch, stack)
        ours = start("SluiceMQ", scratch / "ours", java, stack)
        theirs = start("RocketMQ 5.3.3", scratch / "theirs", java, stack) if java else None
        time.sleep(SETTLE_S)
        for server in filter(None, (ours, theirs)):
            server.idle_rss_mib = sum(map(measure.rss_mib, server.memory_pids))
        if theirs:
            cases.heat(theirs, plan)
        rows = run_cases(ours, theirs, plan, options.only)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="short spans and a small backlog: under two minutes"
    )
    parser.add_argument(
        "--only", default="", help="only the cases whose name has this in it (and the backlog)"
    )
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    parser.add_argument(
        "--no-java", action="store_true", help="leave the real broker and the Java client out"
    )
    return parser.parse_args()


def java_client(scratch: Path, stack: contextlib.ExitStack) -> drivers.Driver | None:
    """The Java load driver, or None with the reason printed."""
    try:
        toolchain.jars("server-5.3.3")
        source = ROOT / "benchmarks" / "java" / "Load.java"
        driver = drivers.java_driver("client-5.3.3", scratch, source=source, flags=CLIENT_HEAP)
    except toolchain.MissingTool as missing:
        print(f"without the real broker: {missing}\n")
        return None
    stack.callback(driver.close)
    return driver


def start(
    name: str, directory: Path, java: drivers.Driver | None, stack: contextlib.ExitStack
) -> cases.Server:
    directory.mkdir()
    if name == "SluiceMQ":
        # Once before it counts: the first start of a fresh checkout writes the byte code of every
        # module.
        (directory / "first").mkdir()
        with clusters.sluice_cluster(directory / "first"):
            pass
        running = stack.enter_context(clusters.sluice_cluster(directory))
    else:
        # Two commit log files of the default size, as in production.
        running = stack.enter_context(
            clusters.rocketmq_cluster(
                directory, heap=REAL_HEAP, mappedFileSizeCommitLog=str(1 << 30)
            )
        )
    return cases.Server(
        name=name,
        name_server=running.name_server,
        broker=running.broker,
        pid=running.pids["broker"],
        memory_pids=tuple(running.pids.values()),
        ready_s=running.ready_s,
        java=java,
    )


def run_cases(
    ours: cases.Server, theirs: cases.Server | None, plan: cases.Plan, only: str
) -> list[dict[str, str]]:
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.1f}: rate a second [server CPU time each]\n")  # fmt: skip
    print_row("case", ours.name, theirs.name if theirs else "", "ratio", "aim")
    rows = []
    is_client_warm = False
    for case in cases.wanted(only):
        if case.needs_java and ours.java is None:
            continue
        if case.needs_java and not is_client_warm:
            cases.heat_client(filter(None, (ours, theirs)), plan)
            is_client_warm = True
        our_figure = attempt(case, ours, plan)
        their_figure = attempt(case, theirs, plan) if theirs else None
        ratio = case.ratio(our_figure, their_figure) if our_figure else ""
        print_row(case.name, text(our_figure), text(their_figure), ratio, case.target)
        rows.append(
            {
                "case": case.name,
                "ours": text(our_figure),
                "theirs": text(their_figure),
                "ratio": ratio,
                "aim": case.target,
            }
        )
    return rows


def attempt(case: cases.Case, server: cases.Server, plan: cases.Plan) -> cases.Figure | None:
    """A case that fails costs its own figure, not the others; the reason is printed."""
    try:
        return case.run(server, plan)
    except (OSError, RuntimeError, drivers.DriverFailedError) as error:
        print(f"  {case.name} on {server.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def text(figure: cases.Figure | None) -> str:
    return str(figure) if figure else "-"


def print_row(*cells: str) -> None:
    widths = (41, 27, 27, 18, 0)
    print(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
