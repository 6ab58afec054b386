"""`sluice store`: look into a store directory, ours or Java's, without a broker; repair one.

`info`, `ls`, `dump` and `verify` take no lock and write nothing: they also work beside a running
broker, on a copy, and on files that may only be read. So does `backup`, which writes elsewhere.
`repair` saves what is whole in a damaged store and lists what is lost; without --write it changes
nothing.

Exit codes: 0 done and in order, 1 findings (`verify`), damage that was not repaired, or an error, 2
wrong usage; `verify` says 2 also when the store cannot be read at all.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sluicemq.cli.ending import InputError, OptionError
from sluicemq.cli.output import (
    as_time,
    byte_progress,
    json_option,
    print_json,
    print_records,
    print_table,
    show_time,
    with_options,
)
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import SluiceError, StoreError
from sluicemq.files import lock_owner

if TYPE_CHECKING:
    from sluicemq.store.tools.checks import Findings
    from sluicemq.store.tools.dump import Selection
    from sluicemq.store.tools.layout import StoreLayout
    from sluicemq.store.tools.repair import RepairReport

F = TypeVar("F", bound=Callable[..., Any])
PARTS: Final = ("log", "queue", "index", "checkpoint", "config")
EXIT_FINDINGS: Final = 1
SHOWN_MAX: Final = 20


@click.group()
def store() -> None:
    """Look into a store directory, ours or Java's, without a broker."""


store_options = with_options(
    click.argument("directory", metavar="DIR"),
    click.option(
        "--commit-log", "commit_log_path", default="", metavar="DIR",
        help="Where the log lies (storePathCommitLog); several directories: a,b.",
    ),
    click.option(
        "--consume-queue", "consume_queue_path", default="", metavar="DIR",
        help="Where the queues lie when they are not in DIR/consumequeue.",
    ),
)  # fmt: skip
"""DIR, and where log and queues lie when they are not in it: what `opened` takes."""


@contextmanager
def opened(directory: str, **paths: Any) -> Iterator["StoreLayout"]:
    """The store in a directory. What the system refuses becomes a sentence: StoreError."""
    from sluicemq.store.tools.layout import StoreLayout  # noqa: PLC0415 - NumPy: 80 ms

    try:
        layout = StoreLayout.find(directory, **paths)
        try:
            yield layout
        finally:
            layout.close()
    except BrokenPipeError:  # `| head` has read enough
        raise
    except OSError as error:
        raise StoreError(
            f"{error.filename or directory} cannot be read: {error.strerror}.",
            fix="Check its permissions, and the disk.",
        ) from error


# ------------------------------------------------------------------------------------- info, ls


@store.command("info")
@store_options
@json_option
def info(as_json: bool, **place: str) -> None:
    """Show what the store in DIR holds, where it begins and ends, and if a broker runs on it."""
    from sluicemq.store.tools.dump import describe  # noqa: PLC0415

    with opened(**place) as layout:
        found = describe(layout) | {"locked_by": lock_owner(f"{layout.root}/lock")}
    if as_json:
        print_json(found)
        return
    log, queues, index = found["log"], found["queues"], found["index"]
    checkpoint = found["checkpoint"] or {}
    newest = max(checkpoint.get("marks", ()), key=lambda mark: mark["sequence"], default=None)
    state = "a broker runs, or it ended without an orderly stop" * found["interrupted"] or "stopped"
    problems = [
        f"{doc['file']}: {doc['problem']}" for doc in found["documents"] if "problem" in doc
    ]
    rows = {
        "state": f"in use by process {found['locked_by']}" if found["locked_by"] else state,
        "log": f"{log['files']} files of {_bytes(log['file_bytes'])}, from {log['start']:,}",
        "topics": f"{queues['topics']:,} in {queues['queues']:,} queues",
        "messages": f"{queues['messages']:,} of together {_bytes(queues['message_bytes'])}",
        "first message": show_time(found["first_time_ms"]),
        "last message": show_time(found["last_time_ms"]),
        "queue files": f"{queues['files']:,} of {_bytes(queues['file_bytes'])}",
        "queues with extension": queues["extensions"],
        "index": f"{index['files']} files, {index['entries']:,} keys",
        "checkpoint": None if checkpoint else "none",
        "checkpoint: log": show_time(checkpoint.get("log_time_ms", 0)) or None,
        "checkpoint: queues": show_time(checkpoint.get("queue_time_ms", 0)) or None,
        "mark: safe up to": newest and newest["log_offset"],
        "documents": f"{len(found['documents'])}, {len(problems)} unreadable",
    }
    shown = [(name, value) for name, value in rows.items() if value is not None]
    print_table(found["root"], ["what", ""], shown)
    for problem in problems:
        click.echo(problem)


def _bytes(size: int) -> str:
    """To three digits: `1.07 GB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


@store.command("ls")
@store_options
@click.option("-t", "--topic", help="Only the queues of this topic.")
@click.option("-s", "--summary", is_flag=True, help="One line a topic.")
@json_option
def ls(topic: str | None, summary: bool, as_json: bool, **place: str) -> None:
    """List topics and queues with their offsets, sizes and times."""
    from sluicemq.store.tools.dump import list_queues  # noqa: PLC0415

    with opened(**place) as layout:
        records = [queue._asdict() for queue in list_queues(layout, topic)]
    if summary:
        topics: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            topics.setdefault(record["topic"], []).append(record)
        records = [
            {
                "topic": name,
                "queues": len(queues),
                "messages": sum(one["messages"] for one in queues),
                "size_bytes": sum(one["size_bytes"] for one in queues),
                "first_time_ms": min(
                    filter(None, (one["first_time_ms"] for one in queues)), default=0
                ),
                "last_time_ms": max(one["last_time_ms"] for one in queues),
            }
            for name, queues in topics.items()
        ]
    columns = (
        " ".join(name for name in records[0] if not name.endswith("_time_ms")) if records else ""
    )
    times = " first_stored=first_time_ms:time last_stored=last_time_ms:time"
    empty = f"No queues of {topic}." if topic else "No queues."
    print_records(records, as_json=as_json, columns=columns + times, empty=empty)


# ------------------------------------------------------------------------------------- dump


@store.command("dump")
@store_options
@click.argument("parts", nargs=-1, type=click.Choice(PARTS), metavar="[PART]...")
@click.option("-t", "--topic", help="Only this topic.")
@click.option("-q", "--queue", "queue_id", type=click.IntRange(min=0), help="Only this queue.")
@click.option("--offsets", metavar="A:B", help="Only these queue offsets, both included; A: or :B.")
@click.option("--tags", help="Only messages with one of these tags, A||B.")
@click.option("--where", help="Only messages that match this SQL92 expression.")
@click.option("--key", help="Only messages with this key or unique key.")
@click.option(
    "--since", "time_min_ms", callback=as_time, metavar="TIME",
    help="Only stored at that time or later.",
)  # fmt: skip
@click.option(
    "--until", "time_max_ms", callback=as_time, metavar="TIME",
    help="Only stored at that time or earlier.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), help="Stop after so many lines.")
@click.option(
    "--body", type=click.Choice(["text", "base64", "none"]), default="text", show_default=True,
    help="How bodies are shown; as text those that are not UTF-8 come in base64.",
)  # fmt: skip
def dump(
    directory: str,
    commit_log_path: str,
    consume_queue_path: str,
    parts: tuple[str, ...],
    limit: int | None,
    body: str,
    **wanted: Any,
) -> None:
    """Print parts of the store as JSON lines: log (if none is named), queue, index, checkpoint,
    config.

    Damaged bytes in the log are a line of their own, and the log goes on behind them. A TIME is
    milliseconds since 1970 or a date like 2013-01-01T00:00 (local time).
    """
    selection = select(**wanted)
    from sluicemq.store.tools import dump as dumps  # noqa: PLC0415

    paths = {"commit_log_path": commit_log_path, "consume_queue_path": consume_queue_path}
    with opened(directory, **paths) as layout:
        sources: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "log": lambda: dumps.dump_log(layout, selection, body),
            "queue": lambda: dumps.dump_queues(layout, selection),
            "index": lambda: dumps.dump_index(layout, selection),
            "checkpoint": lambda: dumps.dump_checkpoint(layout),
            "config": lambda: dumps.dump_documents(layout),
        }
        chosen = parts or PARTS[:1]
        for value in islice(chain.from_iterable(sources[part]() for part in chosen), limit):
            print_json(value)


def select(
    *, offsets: str | None = None, tags: str | None = None, where: str | None = None, **given: Any
) -> "Selection":
    """The options as a selection. Raises OptionError or FilterSyntaxError."""
    from sluicemq.store.tools.dump import Selection  # noqa: PLC0415

    given["offset_min"], given["offset_max"] = parse_range(offsets)
    if tags is not None and where is not None:
        raise OptionError(
            "--tags and --where are given.", fix="Write the tags into --where: TAGS IN ('A', 'B')."
        )
    if where is not None:
        from sluicemq.filter.subscriptions import compile_complete  # noqa: PLC0415

        given["matches"] = compile_complete(where).matches
    elif tags is not None:
        from sluicemq.filter.subscriptions import parse_tags  # noqa: PLC0415

        expression, names, codes = parse_tags(tags)
        if expression != "*":  # what a unit's code may be when tags alone decide
            given["matches"] = lambda properties: properties.get("TAGS") in names
            given["tag_codes"] = codes
    return Selection(**{name: value for name, value in given.items() if value is not None})


def parse_range(text: str | None) -> tuple[int | None, int | None]:
    """`A:B`, `A:`, `:B` or `A`. Raises OptionError."""
    if text is None:
        return None, None
    low, colon, high = text.partition(":")
    if not all(part.isdecimal() or not part for part in (low, high)) or not (low or high):
        raise OptionError(
            f"--offsets {text!r} is no range.", fix="Write 10:20, 10: or :20, or one offset."
        )
    first = int(low) if low else None
    return first, (first if not colon else int(high) if high else None)


# ------------------------------------------------------------------------------------- verify


@store.command("verify")
@store_options
@json_option
@click.option("--all", "show_all", is_flag=True, help="Every finding, not the first 100 of a kind.")
@click.option("-q", "--quiet", is_flag=True, help="No notes and no progress bar.")
def verify_command(as_json: bool, show_all: bool, quiet: bool, **place: str) -> None:
    """Check every record, queue unit, index entry and small file of the store in DIR, and try
    whether a broker starts on it.

    Exit code 0 when all is in order (notes do not count), 1 with findings, 2 when it cannot be
    read.
    """
    from sluicemq.store.tools.verify import verify  # noqa: PLC0415

    try:
        with (
            opened(**place) as layout,
            byte_progress("verifying", shown=not quiet) as progress,
        ):
            result = verify(layout, progress, 1 << 60 if show_all else 100)
        findings = result.findings
        _add_start_error(findings, **place)
    except SluiceError as error:
        raise InputError(str(error)) from None
    totals = {name: findings.total(name) for name in ("error", "warning", "note")}
    for found in findings.kept:
        if quiet and found.severity == "note":
            continue
        if as_json:
            print_json(found._asdict())
        else:
            click.echo(f"{found.severity}: {found.place}: {found.text} [{found.kind}]")
    if as_json:
        print_json({
            "severity": "summary", "clean": findings.is_clean, **totals,
            "hidden": findings.hidden, "records": result.records, "units": result.units,
            "index_entries": result.entries, "log_start": result.log_start,
            "log_end": result.log_end,
        })  # fmt: skip
    else:
        for kind, count in findings.hidden.items():
            click.echo(f"... and {count:,} more of [{kind}]; --all shows them")
        verdict = f"{totals['error']:,} errors, {totals['warning']:,} warnings"
        click.echo(
            f"{result.records:,} records, {result.units:,} units, {result.entries:,} index "
            f"entries; log from {result.log_start:,} to {result.log_end:,}: "
            f"{'in order' if findings.is_clean else verdict}."
        )
    if not findings.is_clean:
        raise SystemExit(EXIT_FINDINGS)


def _add_start_error(
    findings: "Findings", directory: str, commit_log_path: str, consume_queue_path: str
) -> None:
    """Add the error with which a broker would refuse to start on this store to `findings`.

    A store that a running process holds is not tried: its files change meanwhile.
    """
    from sluicemq.broker.trial import find_start_error  # noqa: PLC0415 - the whole broker
    from sluicemq.config import StoreConfig  # noqa: PLC0415
    from sluicemq.store.tools.checks import ERROR, NOTE  # noqa: PLC0415 - NumPy: 80 ms

    if lock_owner(f"{directory}/lock"):
        text = "a broker runs on this store, so it was not tried whether one starts"
        findings.add(NOTE, "start", directory, text)
        return
    if "," in commit_log_path:
        return
    config = StoreConfig(
        directory, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
    )
    refusal = asyncio.run(find_start_error(config))
    if refusal is not None:
        findings.add(ERROR, "start", directory, f"no broker starts on this store: {refusal}")


# ------------------------------------------------------------------------------------- repair


@store.command("backup")
@store_options
@click.argument("backup", metavar="BACKUP")
@json_option
def backup_command(directory: str, backup: str, as_json: bool, **paths: Any) -> None:
    """Back up the store in DIR, on which a broker may run, into the directory BACKUP.

    Each run brings BACKUP forward by what is new, to one moment. Full files of the log are shared
    with the store where the file system can do that.
    """
    from sluicemq.store.tools.backup import back_up  # noqa: PLC0415 - NumPy: 80 ms

    with _disk_errors(), byte_progress("reading the log", shown=not as_json) as progress:
        result = back_up(directory, backup, progress=progress, **paths)
    if as_json:
        print_json({**result._asdict(), "shared_bytes": result.shared_bytes})
        return
    click.echo(
        f"{backup} holds the log from {result.start:,} to {result.end:,}, of {result.moments:,}"
        f" moments: {_bytes(result.new_bytes)} are new, {_bytes(result.copied_bytes)} copied."
    )


@store.command("restore")
@click.argument("backup", metavar="BACKUP")
@click.argument("directory", metavar="DIR")
@click.option(
    "--at", type=click.IntRange(min=0), metavar="OFFSET",
    help="Only what ends at this offset of the log or before; tables of the moment before.",
)  # fmt: skip
@click.option(
    "--delay-levels", default="", metavar="TEXT",
    help="messageDelayLevel, where it is not the default: for units of delayed messages.",
)  # fmt: skip
@json_option
def restore_command(backup: str, directory: str, as_json: bool, **options: Any) -> None:
    """Make a store in DIR, which must be empty, of what `sluice store backup` put into BACKUP."""
    from sluicemq.store.tools.backup import restore  # noqa: PLC0415 - NumPy: 80 ms

    with _disk_errors(), byte_progress("copying the log", shown=not as_json) as progress:
        result = restore(backup, directory, progress=progress, **options)
    if as_json:
        print_json({**result._asdict(), "moment": result.moment._asdict()})
        return
    click.echo(
        f"{directory} holds the log from {result.start:,} to {result.end:,}: {result.messages:,}"
        f" messages. Its tables are of {show_time(result.moment.time_ms)} (log end"
        f" {result.moment.end:,})."
        + (f" {result.timed_messages:,} timed messages wait." if result.timed_messages else "")
    )


@contextmanager
def _disk_errors() -> Iterator[None]:
    """What the system refuses becomes a sentence: StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or 'The disk'}: {error.strerror}.",
            fix="Check its permissions, and the disk; running it again begins where it has to.",
        ) from error


@store.command("repair")
@store_options
@click.option("--write", is_flag=True, help="Repair the files; without it they are only looked at.")
@click.option(
    "--log-file-bytes", type=click.IntRange(min=1), metavar="BYTES",
    help="The size of the log's files (mappedFileSizeCommitLog); found from the files as a rule.",
)  # fmt: skip
@click.option(
    "--queue-file-bytes", type=click.IntRange(min=20), metavar="BYTES",
    help="The size of the queues' files (mappedFileSizeConsumeQueue); found as a rule.",
)  # fmt: skip
@click.option(
    "--delay-levels", metavar="TEXT",
    help="messageDelayLevel, where it is not the default: for units of delayed messages.",
)  # fmt: skip
@json_option
def repair_command(directory: str, delay_levels: str | None, as_json: bool, **options: Any) -> None:
    """Save what is whole in the store in DIR, and list what is lost by topic, queue and offset.

    Holes in the log are closed so that SluiceMQ and RocketMQ read on behind them; queues are made
    to agree with the log. Stop the broker first. What is overwritten is kept in DIR/repair-TIME.
    Exit code 0 when the store is in order or was repaired, 1 when it is damaged and --write is
    not given.
    """
    from sluicemq.config.settings import DEFAULT_LEVELS, parse_delay_levels  # noqa: PLC0415
    from sluicemq.store.tools.repair import repair  # noqa: PLC0415 - NumPy: 80 ms

    moment = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).astimezone()
    with _disk_errors(), byte_progress("reading the log", shown=not as_json) as progress:
        report = repair(
            directory, stamp=f"{moment:%Y%m%d-%H%M%S}", progress=progress,
            delay_levels_ms=parse_delay_levels(delay_levels or DEFAULT_LEVELS), **options,
        )  # fmt: skip
    if as_json:
        print_json(report.to_json())
    else:
        _print_repaired(report)
    if not report.is_sound and not report.is_written:
        raise SystemExit(EXIT_FINDINGS)


def _print_repaired(report: "RepairReport") -> None:
    if report.is_sound:
        click.echo(f"The store is in order: {report.records:,} records up to {report.log_end:,}.")
        _print_tail(report)
        return
    for text in report.bad_files[:SHOWN_MAX]:
        click.echo(text)
    if report.damaged:
        print_table(
            "Damaged", ("file", "from", "to", "bytes", "messages", "what"),
            [
                (d.file, d.start, d.end, d.end - d.start, d.messages_lost, d.reason)
                for d in report.damaged[:SHOWN_MAX]
            ],
        )  # fmt: skip
    if report.lost:
        print_table(
            "Lost", ("topic", "queue", "first offset", "last offset", "messages"),
            [(r.topic, r.queue_id, r.first, r.last, r.messages) for r in report.lost[:SHOWN_MAX]],
        )  # fmt: skip
    if max(len(report.damaged), len(report.lost), len(report.bad_files)) > SHOWN_MAX:
        click.echo(f"Only the first {SHOWN_MAX} of each are shown: --json prints all.")
    _print_summary(report)


def _print_summary(report: "RepairReport") -> None:
    units = f"{report.wrong_units:,} queue entries do not agree with the log"
    if report.mended:
        units += f", {report.mended:,} records have a wrong queue offset, which can be mended"
    if report.missing_queues:
        units += f", {report.missing_queues:,} queues are missing"
    click.echo(f"{report.records:,} records are whole, {report.messages_lost:,} are lost; {units}.")
    _print_tail(report)
    if not report.is_written:
        click.echo("Nothing was changed: --write repairs it.")
        return
    click.echo(
        f"Repaired: {report.bytes_changed:,} bytes changed. What was there before is in"
        f" {report.backup}."
    )
    if report.not_placed:
        count = sum(r.messages for r in report.not_placed)
        click.echo(f"For {count:,} lost messages there was no room for a place holder.")


def _print_tail(report: "RepairReport") -> None:
    if report.tail_bytes:
        click.echo(
            f"The {report.tail_bytes:,} bytes behind the last record were never safely on disk:"
            " the next start cuts them off."
        )
