"""`sluice store repair`: save what is whole in a damaged store, and list what is lost.

Without --write nothing is changed. Exit codes: 0 the store is in order (or was repaired), 1 damage
was found and nothing was written, or an error; 2 wrong usage.
"""

from typing import TYPE_CHECKING

import click

from sluicemq.cli.output import json_option, print_json, print_table
from sluicemq.cli.progress import byte_progress
from sluicemq.cli.store import store_options
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config.delays import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import StoreError

if TYPE_CHECKING:
    from sluicemq.store.tools.repair import RepairReport

EXIT_DAMAGED = 1
SHOWN_MAX = 20


@click.command("repair")
@store_options
@click.option("--write", is_flag=True, help="Repair the files; without it they are only looked at.")
@click.option(
    "--log-file-bytes",
    type=click.IntRange(min=1),
    default=None,
    metavar="BYTES",
    help="The size of the log's files (mappedFileSizeCommitLog); found from the files as a rule.",
)
@click.option(
    "--queue-file-bytes",
    type=click.IntRange(min=20),
    default=None,
    metavar="BYTES",
    help="The size of the queues' files (mappedFileSizeConsumeQueue); found as a rule.",
)
@click.option(
    "--delay-levels",
    default=None,
    metavar="TEXT",
    help="messageDelayLevel, where it is not the default: for units of delayed messages.",
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    directory: str,
    log_path: str,
    queue_path: str,
    write: bool,
    log_file_bytes: int | None,
    queue_file_bytes: int | None,
    delay_levels: str | None,
    as_json: bool,
) -> None:
    """Save what is whole in the store in DIR, and list what is lost by topic, queue and offset.

    Holes in the log are closed so that SluiceMQ and RocketMQ read on behind them; queues are made
    to agree with the log. Stop the broker first. What is overwritten is kept in DIR/repair-TIME.
    Exit code 0 when the store is in order or was repaired, 1 when it is damaged and --write is
    not given.
    """
    from sluicemq.store.tools.repair import repair  # noqa: PLC0415 - NumPy: 80 ms

    try:
        with byte_progress("reading the log", shown=not as_json) as progress:
            report = repair(
                directory, write=write, stamp=_stamp(), commit_log_path=log_path,
                consume_queue_path=queue_path, log_file_bytes=log_file_bytes,
                queue_file_bytes=queue_file_bytes, progress=progress,
                delay_levels_ms=parse_delay_levels(delay_levels or DEFAULT_LEVELS),
            )  # fmt: skip
    except OSError as error:
        raise StoreError(
            f"{error.filename or directory}: {error.strerror}.",
            cure="Check its permissions, and the disk; running the repair again goes on.",
        ) from error
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.is_sound and not report.is_written:
        context.exit(EXIT_DAMAGED)


def _stamp() -> str:
    """20261231-235959, local time."""
    from datetime import UTC, datetime  # noqa: PLC0415

    moment = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).astimezone()
    return f"{moment:%Y%m%d-%H%M%S}"


def _print(report: "RepairReport") -> None:
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
