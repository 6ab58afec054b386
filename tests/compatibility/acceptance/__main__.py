"""RocketMQ's own test suites before our servers, and a table of the results.

    make acceptance E2E=DIR    DIR: a checkout of RocketMQ's end-to-end tests (apache/rocketmq-e2e)

Without E2E the suites of that checkout are left out, and the table says so.
"""

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from peer import clusters
from peer.toolchain import MissingTool

from acceptance.suites import SUITES, Result, Suite, compiled, start

HEAD = """# RocketMQ's own test suites before our servers

Written by `make acceptance E2E=DIR`, where DIR is a checkout of RocketMQ's end-to-end tests. Each
suite gets servers of its own, started by `sluice up` with its defaults.

| suite | tests | passed | failed | skipped by the suite | minutes |
|---|---|---|---|---|---|
"""
LEFT_OUT = "not run: it needs a checkout of RocketMQ's end-to-end tests, `make acceptance E2E=DIR`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites, write the table, and return 1 if a test has failed."""
    parser = argparse.ArgumentParser(prog="acceptance", description=__doc__)
    parser.add_argument("--e2e", type=Path, help="checkout of RocketMQ's end-to-end tests")
    parser.add_argument("--only", default="", help="run the suites whose title has this text")
    parser.add_argument(
        "--report", type=Path, help="write the table to this file, unless --only is given"
    )
    asked = parser.parse_args(arguments)
    checkout = asked.e2e.resolve() if asked.e2e else None
    if checkout is not None and not (checkout / "java").is_dir():
        parser.error(f"{checkout} has no directory java: it is no checkout of the tests")
    results: dict[str, Result | str] = {}
    for suite in (one for one in SUITES if asked.only in one.title):
        if suite.source and checkout is None:
            results[suite.title] = LEFT_OUT
        else:
            results[suite.title] = _run(suite, checkout if suite.source else None)
        print(_row(suite.title, results[suite.title]), flush=True)
    text = HEAD + "\n".join(_row(title, result) for title, result in results.items()) + "\n"
    for title, result in results.items():
        text += _details(title, result)
    if asked.report and not asked.only:
        asked.report.write_text(text)
    failed = [one for one in results.values() if isinstance(one, Result) and one.failed]
    return 1 if failed else 0


def _run(suite: Suite, checkout: Path | None) -> Result | str:
    try:
        classes = compiled(suite, checkout)
    except MissingTool as missing:
        return f"not run: {missing}"
    directory = Path(tempfile.mkdtemp(prefix="sluicemq-acceptance-"))
    began_s = time.monotonic()
    with _servers(suite, directory) as told:
        result = start(suite, classes, directory, checkout, told)
    result.seconds = time.monotonic() - began_s
    print(f"{suite.title}: the output of the tests is in {directory}/tests.log", file=sys.stderr)
    return result


@contextlib.contextmanager
def _servers(suite: Suite, directory: Path) -> Iterator[Mapping[str, str]]:
    """Start our servers; yield the system properties by which the tests find them."""
    with clusters.sluice_cluster(directory, proxy=suite.has_proxy, brokers=suite.brokers) as up:
        brokers = re.findall(r" broker=(\S+)", (directory / "sluice.log").read_text())
        names = ["broker-a", "broker-b", "broker-c"]
        yield {
            "namesrvAddr": up.name_server,
            "endPoint": up.endpoint,
            "sluicemq.nameServer": up.name_server,
            "sluicemq.brokers": ",".join(map("=".join, zip(names, brokers, strict=False))),
            "sluicemq.scratch": str(directory),
        }


def _row(title: str, result: Result | str) -> str:
    if isinstance(result, str):
        return f"| {title} | {result.splitlines()[0]} | | | | |"
    return (
        f"| {title} | {result.count} | {len(result.passed)} | {len(result.failed)}"
        f" | {len(result.skipped)} | {result.seconds / 60:.1f} |"
    )


def _details(title: str, result: Result | str) -> str:
    if isinstance(result, str) or not (result.failed or result.skipped):
        return ""
    lines = [f"- **failed** `{name}`: {why[:300]}" for name, why in result.failed.items()]
    lines += [f"- skipped `{name}`: {why[:120]}" for name, why in result.skipped.items()]
    return f"\n## {title}\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
