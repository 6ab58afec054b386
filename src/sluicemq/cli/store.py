"""`sluice store`: inspect, back up and repair a store directory of SluiceMQ or RocketMQ.

`info`, `ls`, `dump` and `verify` take no lock and write nothing. So they also work while a broker
runs on the store, on a copy, and on read-only files. `backup` does not change the store either.
`repair` restores all complete records of a damaged store and lists the lost ones. Without
`--write` it changes nothing.

Exit codes: 0 done and without findings, 1 findings, damage that was not repaired, or an error, 2
wrong usage. `verify` also returns 2 if it cannot read the store.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sluicemq.cli.ending import EXIT_FINDINGS, InputError, OptionError
from sluicemq.cli.output import (
    byte_progress,
    combine_options,
    format_time,
    json_option,
    parse_time_option,
    print_json,
    print_records,
    print_table,
)
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import SluiceError, StoreError
from sluicemq.files import lock_owner

if TYPE_CHECKING:
    from sluicemq.store.tools.checks import Findings
    from sluicemq.store.tools.dump import Selection
    from sluicemq.store.tools.layout import StoreLayout
    from sluicemq.store.tools.repair import RepairReport
    from sluicemq.store.tools.verify import VerifyReport

F = TypeVar("F", bound=Callable[..., Any])
PARTS: Final = ("log", "queue", "index", "checkpoint", "config")
SHOWN_MAX: Final = 20
"""The number of lines of each kind that `repair` prints without `--json`."""


@click.group()
def store() -> None:
    """Inspect, back up or repair a store directory of SluiceMQ or RocketMQ, without a broker."""


store_options = combine_options(
    click.argument("directory", metavar="DIR"),
    click.option(
        "--commit-log",
        "commit_log_path",
        default="",
        metavar="DIR",
        help="Directory of the commit log (storePathCommitLog), or several: a,b. Default: "
        "DIR/commitlog.",
    ),
    click.option(
        "--consume-queue",
        "consume_queue_path",
        default="",
        metavar="DIR",
        help="Directory of the consume queues. Default: DIR/consumequeue.",
    ),
)
"""The argument DIR and two options: the parameters of `open_store`."""


@contextmanager
def open_store(directory: str, **paths: Any) -> Iterator["StoreLayout"]:
    """Return a context manager that opens the store in a directory for reading.

    `paths` are `commit_log_path` and `consume_queue_path`; "" means the default. An OSError, also
    one inside the block, becomes a StoreError.
    """
    from sluicemq.store.tools.layout import StoreLayout  # noqa: PLC0415 - NumPy: 80 ms

    try:
        layout = StoreLayout.find(directory, **paths)
        try:
            yield layout
        finally:
            layout.close()
    except BrokenPipeError:  # the reader of the output has closed the pipe, as `head` does
        raise
    except OSError as error:
        raise StoreError(
            f"{error.filename or directory} cannot be read: {error.strerror}.",
            fix="Check its permissions and the disk.",
        ) from error


# ------------------------------------------------------------------------------------- info, ls


@store.command("info")
@store_options
@json_option
def info(as_json: bool, **paths: str) -> None:
    """Show the size, range and state of the store in DIR, and whether a broker runs on it."""
    from sluicemq.store.tools.dump import describe  # noqa: PLC0415 - NumPy: 80 ms

    with open_store(**paths) as layout:
        description = describe(layout) | {"locked_by": lock_owner(f"{layout.root}/lock")}
    if as_json:
        print_json(description)
    else:
        _print_description(description)


def _print_description(description: dict[str, Any]) -> None:
    """Print the result of `describe` as a table, and one line for each unreadable document.

    Rows whose value is unknown are left out.
    """
    log = description["log"]
    queues = description["queues"]
    index = description["index"]
    documents = description["documents"]
    unreadable_documents = [document for document in documents if "problem" in document]
    rows = {
        "state": _describe_state(description),
        "log": f"{log['files']} files of {_format_bytes(log['file_bytes'])}, from {log['start']:,}",
        "topics": f"{queues['topics']:,} in {queues['queues']:,} queues",
        "messages": f"{queues['messages']:,}, in total {_format_bytes(queues['message_bytes'])}",
        "first message": format_time(description["first_time_ms"]),
        "last message": format_time(description["last_time_ms"]),
        "queue files": f"{queues['files']:,} of {_format_bytes(queues['file_bytes'])}",
        "queues with extension": queues["extensions"],
        "index": f"{index['files']} files, {index['entries']:,} keys",
        **_list_checkpoint_rows(description["checkpoint"] or {}),
        "documents": f"{len(documents)}, {len(unreadable_documents)} unreadable",
    }
    known_rows = [(name, cell) for name, cell in rows.items() if cell is not None]
    print_table(description["root"], ["what", ""], known_rows)
    for document in unreadable_documents:
        click.echo(f"{document['file']}: {document['problem']}")


def _describe_state(description: dict[str, Any]) -> str:
    """Return the state of a store as text: in use by a process, interrupted, or stopped."""
    if description["locked_by"]:
        return f"in use by process {description['locked_by']}"
    if description["interrupted"]:
        return "a broker is running, or was not stopped in order"
    return "stopped"


def _list_checkpoint_rows(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the rows about the checkpoint, as name -> cell; a cell is None if it is unknown.

    The checkpoint is a file that says up to where the store is durable on disk. `checkpoint` is its
    content, {} without one.
    """
    newest_mark = max(checkpoint.get("marks", ()), key=lambda mark: mark["sequence"], default=None)
    return {
        "checkpoint": None if checkpoint else "none",
        "checkpoint: log": format_time(checkpoint.get("log_time_ms", 0)) or None,
        "checkpoint: queues": format_time(checkpoint.get("queue_time_ms", 0)) or None,
        "checkpoint: durable up to": newest_mark and newest_mark["log_offset"],
    }


def _format_bytes(bytes_count: int) -> str:
    """Return a size with three digits and a decimal unit, such as "1.07 GB"."""
    size = float(bytes_count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


@store.command("ls")
@store_options
@click.option("-t", "--topic", help="List only the queues of this topic.")
@click.option("-s", "--summary", is_flag=True, help="Print one line for each topic.")
@json_option
def ls(topic: str | None, summary: bool, as_json: bool, **paths: str) -> None:
    """List the queues of the store in DIR with their offsets, sizes and times."""
    from sluicemq.store.tools.dump import list_queues  # noqa: PLC0415 - NumPy: 80 ms

    with open_store(**paths) as layout:
        records = [queue._asdict() for queue in list_queues(layout, topic)]
    if summary:
        records = _summarize_topics(records)
    fields = records[0] if records else ()
    columns = [field for field in fields if not field.endswith("_time_ms")]
    columns += ["first_stored=first_time_ms:time", "last_stored=last_time_ms:time"]
    empty = f"No queues of {topic}." if topic else "No queues."
    print_records(records, as_json=as_json, columns=" ".join(columns), empty=empty)


def _summarize_topics(queue_records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record for each topic: sums over its queues, and its first and last time.

    Times are in milliseconds since 1970, 0 for a topic without messages.
    """
    queues_by_topic: dict[str, list[dict[str, Any]]] = {}
    for queue in queue_records:
        queues_by_topic.setdefault(queue["topic"], []).append(queue)

    topic_records = []
    for topic, queues in queues_by_topic.items():
        # The time of a queue without messages is 0.
        first_times_ms = [queue["first_time_ms"] for queue in queues if queue["first_time_ms"]]
        topic_records.append(
            {
                "topic": topic,
                "queues": len(queues),
                "messages": sum(queue["messages"] for queue in queues),
                "size_bytes": sum(queue["size_bytes"] for queue in queues),
                "first_time_ms": min(first_times_ms, default=0),
                "last_time_ms": max(queue["last_time_ms"] for queue in queues),
            }
        )
    return topic_records


# ------------------------------------------------------------------------------------- dump


@store.command("dump")
@store_options
@click.argument("parts", nargs=-1, type=click.Choice(PARTS), metavar="[PART]...")
@click.option("-t", "--topic", help="Print only this topic.")
@click.option(
    "-q", "--queue", "queue_id", type=click.IntRange(min=0), help="Print only this queue id."
)
@click.option(
    "--offsets",
    metavar="A:B",
    help="Print only these queue offsets, both included. A: and :B are allowed.",
)
@click.option("--tags", help="Print only messages with one of these tags, such as A||B.")
@click.option("--where", help="Print only messages that match this SQL92 expression.")
@click.option("--key", help="Print only messages with this key or message id.")
@click.option(
    "--since",
    "time_min_ms",
    callback=parse_time_option,
    metavar="TIME",
    help="Print only messages stored at or after this time.",
)
@click.option(
    "--until",
    "time_max_ms",
    callback=parse_time_option,
    metavar="TIME",
    help="Print only messages stored at or before this time.",
)
@click.option(
    "--limit", type=click.IntRange(min=0), help="Maximum number of lines. Default: no limit."
)
@click.option(
    "--body",
    type=click.Choice(["text", "base64", "none"]),
    default="text",
    show_default=True,
    help="How bodies are printed. With text, a body that is not UTF-8 is printed in base64.",
)
def dump(
    directory: str,
    commit_log_path: str,
    consume_queue_path: str,
    parts: tuple[str, ...],
    limit: int | None,
    body: str,
    **filters: Any,
) -> None:
    """Print parts of the store in DIR as JSON lines.

    PART is log (the default), queue, index, checkpoint or config. Damaged bytes of the log are
    printed as a line of their own, followed by the records after them. A TIME is a Unix
    timestamp in milliseconds, or a date such as 2013-01-01T00:00 (local time).
    """
    selection = make_selection(**filters)
    from sluicemq.store.tools import dump as dumps  # noqa: PLC0415 - NumPy: 80 ms

    paths = {"commit_log_path": commit_log_path, "consume_queue_path": consume_queue_path}
    with open_store(directory, **paths) as layout:
        sources: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "log": lambda: dumps.dump_log(layout, selection, body),
            "queue": lambda: dumps.dump_queues(layout, selection),
            "index": lambda: dumps.dump_index(layout, selection),
            "checkpoint": lambda: dumps.dump_checkpoint(layout),
            "config": lambda: dumps.dump_documents(layout),
        }
        records = chain.from_iterable(sources[part]() for part in parts or PARTS[:1])
        for record in islice(records, limit):
            print_json(record)


def make_selection(
    *,
    offsets: str | None = None,
    tags: str | None = None,
    where: str | None = None,
    **criteria: Any,
) -> "Selection":
    """Return the selection of messages that the options of `dump` describe.

    `offsets` is a range such as "10:20", `tags` a tag expression, and `where` an SQL92 expression.
    `criteria` are other fields of `Selection`. None never limits the selection. Raises OptionError
    for an invalid range, or if both `tags` and `where` are given, and FilterSyntaxError for an
    invalid expression.
    """
    from sluicemq.store.tools.dump import Selection  # noqa: PLC0415 - NumPy: 80 ms

    criteria["offset_min"], criteria["offset_max"] = parse_range(offsets)
    if tags is not None and where is not None:
        raise OptionError(
            "--tags and --where cannot be combined.",
            fix="Write the tags into --where: TAGS IN ('A', 'B').",
        )
    if where is not None:
        from sluicemq.filter.subscriptions import compile_complete  # noqa: PLC0415 - imports lark

        criteria["matches"] = compile_complete(where).matches
    elif tags is not None:
        criteria |= _parse_tag_criteria(tags)
    given_criteria = {
        field: criterion for field, criterion in criteria.items() if criterion is not None
    }
    return Selection(**given_criteria)


def _parse_tag_criteria(tags: str) -> dict[str, Any]:
    """Return the fields of a `Selection` that select messages by tags; {} for "*"."""
    from sluicemq.filter.subscriptions import parse_tags  # noqa: PLC0415 - imports lark

    expression, tag_names, tag_codes = parse_tags(tags)
    if expression == "*":
        return {}
    return {
        "matches": lambda properties: properties.get("TAGS") in tag_names,
        # Units whose tag code is another one are skipped without reading their records.
        "tag_codes": tag_codes,
    }


def parse_range(offsets: str | None) -> tuple[int | None, int | None]:
    """Return (first offset, last offset), both inclusive, of a text "A:B", "A:", ":B" or "A".

    None in the result means no limit, and None as `offsets` gives (None, None). Raises OptionError
    for other texts.
    """
    if offsets is None:
        return None, None
    low, colon, high = offsets.partition(":")
    is_range = bool(low or high) and all(not limit or limit.isdecimal() for limit in (low, high))
    if not is_range:
        raise OptionError(
            f"--offsets {offsets!r} is not a range.", fix="Write 10:20, 10: or :20, or one offset."
        )
    first_offset = int(low) if low else None
    if not colon:
        return first_offset, first_offset
    last_offset = int(high) if high else None
    return first_offset, last_offset


# ------------------------------------------------------------------------------------- verify


@store.command("verify")
@store_options
@json_option
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Print all findings, not only the first 100 of each kind.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print neither notes nor a progress bar.")
def verify_command(as_json: bool, show_all: bool, quiet: bool, **paths: str) -> None:
    """Verify the store in DIR: all records, queue units, index entries and small files.

    Also check that a broker can start on it. Exit code 0 without findings (notes do not
    count), 1 with findings, 2 if the store cannot be read.
    """
    from sluicemq.store.tools.verify import verify  # noqa: PLC0415 - NumPy: 80 ms

    try:
        with (
            open_store(**paths) as layout,
            byte_progress("verifying", shown=not quiet) as progress,
        ):
            listed_max = 1 << 60 if show_all else 100
            verification = verify(layout, progress, listed_max)
        findings = verification.findings
        _add_start_error(findings, **paths)
    except SluiceError as error:
        raise InputError(str(error)) from None

    for finding in findings.listed:
        if quiet and finding.severity == "note":
            continue
        if as_json:
            print_json(finding._asdict())
        else:
            click.echo(f"{finding.severity}: {finding.place}: {finding.text} [{finding.kind}]")
    if as_json:
        print_json(_make_verification_record(verification))
    else:
        _print_verification(verification)
    if not findings.is_clean:
        raise SystemExit(EXIT_FINDINGS)


def _make_verification_record(verification: "VerifyReport") -> dict[str, Any]:
    """Return the last line of `store verify --json`: what was verified, and how many findings."""
    findings = verification.findings
    return {
        "severity": "summary",
        "clean": findings.is_clean,
        **{severity: findings.total(severity) for severity in ("error", "warning", "note")},
        "hidden": findings.unlisted_by_kind,
        "records": verification.records,
        "units": verification.units,
        "index_entries": verification.entries,
        "log_start": verification.log_start,
        "log_end": verification.log_end,
    }


def _print_verification(verification: "VerifyReport") -> None:
    """Print how many findings were not listed, and sum up what was verified and found."""
    findings = verification.findings
    for finding_kind, count in findings.unlisted_by_kind.items():
        click.echo(f"... and {count:,} more of [{finding_kind}]; --all shows them")
    verdict = "no errors"
    if not findings.is_clean:
        verdict = f"{findings.total('error'):,} errors, {findings.total('warning'):,} warnings"
    click.echo(
        f"{verification.records:,} records, {verification.units:,} units, "
        f"{verification.entries:,} index entries; "
        f"log from {verification.log_start:,} to {verification.log_end:,}: {verdict}."
    )


def _add_start_error(
    findings: "Findings", directory: str, commit_log_path: str, consume_queue_path: str
) -> None:
    """Try to start a broker on this store without changing it, and add its error to `findings`.

    A start is not tried if a process has locked the store, which gives a note, or if the log is in
    several directories.
    """
    from sluicemq.broker.trial import find_start_error  # noqa: PLC0415 - the whole broker
    from sluicemq.config import StoreConfig  # noqa: PLC0415 - as above
    from sluicemq.store.tools.checks import ERROR, NOTE  # noqa: PLC0415 - NumPy: 80 ms

    if lock_owner(f"{directory}/lock"):
        reason = "a broker runs on this store, so a start was not tried"
        findings.add(NOTE, "start", directory, reason)
        return
    is_log_divided = "," in commit_log_path
    if is_log_divided:
        return
    config = StoreConfig(
        directory, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
    )
    start_error = asyncio.run(find_start_error(config))
    if start_error is not None:
        reason = f"a broker cannot start on this store: {start_error}"
        findings.add(ERROR, "start", directory, reason)


# ------------------------------------------------------------------------------------- repair


@store.command("backup")
@store_options
@click.argument("backup", metavar="BACKUP")
@json_option
def backup_command(directory: str, backup: str, as_json: bool, **paths: Any) -> None:
    """Back up the store in DIR, on which a broker may run, to the directory BACKUP.

    Another run adds what is new. BACKUP contains the state of one moment. Complete files of the log
    share their blocks with the store if the file system supports that.
    """
    from sluicemq.store.tools.backup import back_up  # noqa: PLC0415 - NumPy: 80 ms

    with _translate_disk_errors(), byte_progress("reading the log", shown=not as_json) as progress:
        summary = back_up(directory, backup, progress=progress, **paths)
    if as_json:
        print_json({**summary._asdict(), "shared_bytes": summary.shared_bytes})
        return
    click.echo(
        f"{backup} contains the log from {summary.start:,} to {summary.end:,}, of "
        f"{summary.moments:,} moments: {_format_bytes(summary.new_bytes)} are new, "
        f"{_format_bytes(summary.copied_bytes)} were copied."
    )


@store.command("restore")
@click.argument("backup", metavar="BACKUP")
@click.argument("directory", metavar="DIR")
@click.option(
    "--at",
    type=click.IntRange(min=0),
    metavar="OFFSET",
    help="Restore only records that end at or before this position of the log, and the documents "
    "of the last moment before it. Default: everything.",
)
@click.option(
    "--delay-levels",
    default="",
    metavar="TEXT",
    help="messageDelayLevel of the broker, for the consume queues of delayed messages. Default: "
    "that of RocketMQ.",
)
@json_option
def restore_command(backup: str, directory: str, as_json: bool, **options: Any) -> None:
    """Restore BACKUP, which `sluice store backup` has written, to the empty directory DIR."""
    from sluicemq.store.tools.backup import restore  # noqa: PLC0415 - NumPy: 80 ms

    with _translate_disk_errors(), byte_progress("copying the log", shown=not as_json) as progress:
        summary = restore(backup, directory, progress=progress, **options)
    if as_json:
        print_json({**summary._asdict(), "moment": summary.moment._asdict()})
        return
    sentences = (
        f"{directory} contains the log from {summary.start:,} to {summary.end:,}: "
        f"{summary.messages:,} messages. Its documents are of "
        f"{format_time(summary.moment.time_ms)} (log end {summary.moment.end:,})."
    )
    if summary.timed_messages:
        sentences += f" {summary.timed_messages:,} timed messages are not delivered yet."
    click.echo(sentences)


@contextmanager
def _translate_disk_errors() -> Iterator[None]:
    """Return a context manager that turns an OSError into a StoreError.

    Its fix says that the command can be run again, so it is for commands that continue their work.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or 'The disk'}: {error.strerror}.",
            fix="Check its permissions and the disk, then run the command again. It continues.",
        ) from error


@store.command("repair")
@store_options
@click.option("--write", is_flag=True, help="Repair the files. Without it, only report the damage.")
@click.option(
    "--log-file-bytes",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Size of the files of the commit log, in bytes (mappedFileSizeCommitLog). Default: "
    "that of the existing files.",
)
@click.option(
    "--queue-file-bytes",
    type=click.IntRange(min=20),
    metavar="BYTES",
    help="Size of the files of the consume queues, in bytes (mappedFileSizeConsumeQueue). "
    "Default: that of the existing files.",
)
@click.option(
    "--delay-levels",
    metavar="TEXT",
    help="messageDelayLevel of the broker, for the consume queues of delayed messages. Default: "
    "that of RocketMQ.",
)
@json_option
def repair_command(directory: str, delay_levels: str | None, as_json: bool, **options: Any) -> None:
    """Repair the store in DIR, and list the lost messages by topic, queue and offset.

    Damaged parts of the log are replaced so that SluiceMQ and RocketMQ read the records after
    them, and the consume queues are made consistent with the log. Stop the broker first.
    Overwritten bytes are saved to DIR/repair-TIME. Exit code 0 if the store is undamaged or was
    repaired, 1 if it is damaged and --write is not given.
    """
    from sluicemq.config.settings import DEFAULT_LEVELS, parse_delay_levels  # noqa: PLC0415 - rarely used
    from sluicemq.store.tools.repair import repair  # noqa: PLC0415 - NumPy: 80 ms

    moment = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).astimezone()
    with _translate_disk_errors(), byte_progress("reading the log", shown=not as_json) as progress:
        report = repair(
            directory,
            stamp=f"{moment:%Y%m%d-%H%M%S}",
            progress=progress,
            delay_levels_ms=parse_delay_levels(delay_levels or DEFAULT_LEVELS),
            **options,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print_repair(report)
    if not report.is_sound and not report.is_written:
        raise SystemExit(EXIT_FINDINGS)


def _print_repair(report: "RepairReport") -> None:
    """Print the damage of a store, the lost messages, and what was or can be repaired.

    At most `SHOWN_MAX` lines of each kind are printed. For an undamaged store, one line says so.
    """
    if report.is_sound:
        click.echo(f"The store is undamaged: {report.records:,} records up to {report.log_end:,}.")
        _print_tail(report)
        return
    for problem in report.bad_files[:SHOWN_MAX]:
        click.echo(problem)
    if report.damaged:
        _print_damage(report)
    if report.lost:
        _print_losses(report)
    longest = max(len(report.damaged), len(report.lost), len(report.bad_files))
    if longest > SHOWN_MAX:
        click.echo(f"Only the first {SHOWN_MAX} of each are shown. --json prints all.")
    _print_summary(report)


def _print_damage(report: "RepairReport") -> None:
    """Print a table of the first damaged parts of the log."""
    rows = [
        (gap.file, gap.start, gap.end, gap.end - gap.start, gap.messages_lost, gap.reason)
        for gap in report.damaged[:SHOWN_MAX]
    ]
    print_table("Damaged", ("file", "from", "to", "bytes", "messages", "what"), rows)


def _print_losses(report: "RepairReport") -> None:
    """Print a table of the first lost messages, as ranges of offsets of a queue."""
    rows = [
        (loss.topic, loss.queue_id, loss.first, loss.last, loss.messages)
        for loss in report.lost[:SHOWN_MAX]
    ]
    print_table("Lost", ("topic", "queue", "first offset", "last offset", "messages"), rows)


def _print_summary(report: "RepairReport") -> None:
    """Print the counts of a repair, and whether the files were changed."""
    queue_damage = f"{report.wrong_units:,} queue entries do not agree with the log"
    misplaced_count = report.mended
    if misplaced_count:
        queue_damage += (
            f", {misplaced_count:,} records have a wrong queue offset, which can be repaired"
        )
    if report.missing_queues:
        queue_damage += f", {report.missing_queues:,} queues are missing"
    click.echo(
        f"{report.records:,} records are complete, {report.messages_lost:,} are lost; "
        f"{queue_damage}."
    )
    _print_tail(report)
    if not report.is_written:
        click.echo("Nothing was changed. Repair the store with --write.")
        return
    click.echo(
        f"Repaired: {report.bytes_changed:,} bytes changed. The overwritten bytes are in "
        f"{report.backup}."
    )
    if report.not_placed:
        count = sum(loss.messages for loss in report.not_placed)
        click.echo(f"For {count:,} lost messages there was no room for a placeholder.")


def _print_tail(report: "RepairReport") -> None:
    """Print how many bytes after the last record the next start will remove; nothing if none."""
    if report.tail_bytes:
        click.echo(
            f"The {report.tail_bytes:,} bytes after the last record were never durable. The next "
            "start of a broker removes them."
        )
