"""`make bench`: our broker, pure and compiled, beside Java's and Rust's, row by row, in one run.

    python -m benchmarks [--quick] [--only TEXT]... [--java 5.5.0,5.3.3] [--no-java] [--rust]
                         [--json FILE]

What cannot run here is left out, and the reason is printed. See README.md in this folder for how to
read the table.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import cases, contenders, measure, table

from peer import drivers  # isort: skip  (contenders finds it)

SETTLE_S = 2.0


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no broker is left behind, stopped
    plan = contenders.QUICK if options.quick else contenders.FULL
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluicemq-bench-")))
        chosen = contenders.chosen(options)
        java = None if options.no_java else contenders.java_client(scratch, stack)
        servers = []
        for number, one in enumerate(chosen):
            try:
                directory = scratch / one.kind.lower() / str(number)
                servers.append(contenders.started(one, directory, java, stack))
            except RuntimeError as error:
                print(f"without {one.name}, which did not start: {str(error)[-500:]}")
        time.sleep(SETTLE_S)
        for server in servers:
            pids = server.cluster.pids.values()
            server.idle_own_mib = sum(map(measure.own_mib, pids))
            server.idle_resident_mib = sum(map(measure.rss_mib, pids))
            if server.contender.kind == table.JAVA:
                cases.heat(server, plan)
            server.rest()
        rows = run_cases(servers, plan, options.only)
    print("", *table.summary(rows), sep="\n")
    if options.json:
        found = json.dumps([row.record() for row in rows], indent=2)
        Path(options.json).write_text(found + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="short spans and a small backlog: four minutes"
    )
    parser.add_argument(
        "--only", action="append", default=[],
        help="only the rows with this in their name, and those that they need; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    contenders.add_arguments(parser)
    return parser.parse_args()


def run_cases(
    servers: list[contenders.Server], plan: contenders.Plan, only: list[str]
) -> list[table.Row]:
    columns = [server.contender.name for server in servers]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.1f}: rate a second [server CPU time each]\n")  # fmt: skip
    rows: list[table.Row] = []
    has_java = any(server.java for server in servers)
    is_client_warm = False
    for case in table.wanted(cases.CASES, only):
        if case.needs_java and not has_java:
            continue
        if case.needs_java and not is_client_warm:
            cases.heat_client(servers[0], plan)
            is_client_warm = True
        figures = {}
        for server in servers:
            if server.contender.kind in case.servers:
                figure = attempt(case, server, plan)
                if figure:
                    figures[server.contender.name] = figure
        row = table.judged(case, figures, {row.case.name: row.figures for row in rows})
        rows.append(row)
        print(*row.lines(columns), sep="\n", flush=True)
    return rows


def attempt(
    case: table.Case, server: contenders.Server, plan: contenders.Plan
) -> table.Figure | None:
    """A case that fails costs its own figure, not the others; the reason is printed."""
    try:
        with server.awake():
            return case.run(server, plan)
    except (OSError, RuntimeError, drivers.DriverFailedError) as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"  {case.name} on {server.contender.name}: {reason}", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
