"""The command: so many inputs for a broker, and the verdict; exit code 1 with a finding.

A finding is kept as a file of the bytes that were sent, beside the seed and the numbers of its
batches: `--seed S --first B --inputs 64` repeats one batch.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from fuzz import connections, corpus, grpc_calls, rules
from fuzz.drive import Drive, Finding, GrpcSpeech, Process, Result, Speech

RULES_PART = 100
CONNECTIONS_PART = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when nothing was found."""
    options = _options(arguments)
    found = rules.check(Random(options.seed), options.inputs // RULES_PART)
    if found is not None:
        path = options.findings / f"plain_acl-{options.seed}.yml"
        path.write_text(found.text, "utf-8", "replace")
        _say(f"FOUND seed {options.seed}, {path}: {found.what}")
        return 1
    recorded = grpc_calls.load(options.grpc) if options.grpc else []
    wrong = recorded and connections.check(
        recorded, options.seed, options.first, options.inputs // CONNECTIONS_PART
    )
    if wrong:
        _say(f"FOUND in memory: {wrong}")
        return 1
    with tempfile.TemporaryDirectory(prefix="sluice-fuzz-") as directory:
        process = Process(Path(directory), is_guarded=options.guarded)
        try:
            speech = (
                GrpcSpeech(process, recorded, options.seed)
                if recorded
                else Speech(process, corpus.load(options.corpus), options.seed)
            )
            result = Drive(process, speech).run(options.first, options.inputs)
        finally:
            code = process.close()
    _say(describe(result, options.inputs // RULES_PART))
    for number, finding in enumerate(result.findings):
        _say(_keep(finding, options.findings, options.seed, number))
    if code != 0:
        _say(f"FOUND the broker left with {code}")
    return 1 if result.findings or code != 0 else 0


def describe(result: Result, rules_read: int) -> str:
    """A run in a few lines."""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(result.kinds.items()))
    return (
        f"{result.inputs:,} inputs in {result.seconds:.1f} s"
        f" ({result.inputs / max(result.seconds, 0.001):,.0f}/s); {rules_read:,} files of rules\n"
        f"bystander: {result.answers:,} answers, p99 {result.p99_s * 1000:.1f} ms,"
        f" longest {result.longest_s * 1000:.1f} ms\n"
        f"memory: {result.memory_before >> 20} -> {result.memory_after >> 20} MiB;"
        f" connections closed early: {result.closed}\n{kinds}"
    )


def _keep(finding: Finding, directory: Path, seed: int, number: int) -> str:
    path = directory / f"fuzz-{seed}-{number}.bin"
    path.write_bytes(b"".join(each.data for batch in finding.batches for each in batch.inputs))
    batches = ", ".join(str(batch.number) for batch in finding.batches)
    return f"FOUND seed {seed}, batches {batches or 'unknown'}, {path}: {finding.what}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Fuzz a running broker.")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--corpus", type=Path, help="a directory of recordings (*.jsonl.gz)")
    parser.add_argument("--grpc", type=Path, help="what gRPC clients wrote: fuzz the proxy's port")
    parser.add_argument("--guarded", action="store_true", help="access control is on")
    parser.add_argument(
        "--findings", type=Path, default=Path(), help="where the inputs of findings are kept"
    )
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
