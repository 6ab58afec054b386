"""The options that commands share, and how commands print their results.

A command prints tables and sentences for people. With `--json` it prints one JSON value per line
to stdout, and nothing else. Errors go to stderr; see `ending`.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar

import click
import orjson

from sluicemq.cli.ending import OptionError, describe_on_interrupt
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import (
    ConfigurationError,
    RouteNotFoundError,
    SluiceError,
    UndecodableBodyError,
)
from sluicemq.files import SYSTEM_FILES, exposure_warning, read_text
from sluicemq.hints import did_you_mean
from sluicemq.model.addresses import DEFAULT_NAME_SERVER
from sluicemq.model.positions import Position, parse_position
from sluicemq.model.system_names import is_rocketmq_system_topic
from sluicemq.net.tls import VERIFY_MODES, Tls, default_tls, tls_from_environment
from sluicemq.numbers import format_duration, other_unit, parse_duration_ms
from sluicemq.wire.codes import version_name

if TYPE_CHECKING:
    from sluicemq.client.sync.admin import Admin

F = TypeVar("F", bound=Callable[..., Any])
PROGRESS_AFTER_S: Final = 0.5
"""A progress bar appears after this time."""
TIME_MAX_MS: Final = 2**63 - 1
"""The largest time that a request can contain: the largest `long` of Java."""

# ------------------------------------------------------------------------------- options

_FILE: Final = click.Path(exists=True, dir_okay=False)
_CLIENT_OPTIONS: Final = (
    click.option(
        "-n",
        "--nameserver",
        "name_servers",
        envvar="NAMESRV_ADDR",
        default=DEFAULT_NAME_SERVER,
        show_default=True,
        help="Addresses of the name servers, as host:port;host:port.",
    ),
    click.option(
        "--access-key",
        envvar=["SLUICE_ACCESS_KEY", "ROCKETMQ_ACCESS_KEY"],
        help="Access key of the account. Without it, the keys in $ROCKETMQ_HOME/conf/tools.yml are "
        "used, as mqadmin does.",
    ),
    click.option(
        "--secret-key",
        envvar=["SLUICE_SECRET_KEY", "ROCKETMQ_SECRET_KEY"],
        help="Secret key of the account. Prefer the environment (SLUICE_SECRET_KEY) or tools.yml: "
        "other users can see the command line.",
    ),
    click.option(
        "--tls/--no-tls",
        default=None,
        help="Connect with TLS, or without it. --tls-ca, --tls-certificate and SLUICE_TLS=true "
        "also enable TLS.",
    ),
    click.option(
        "--tls-ca",
        type=_FILE,
        help="PEM file of the certificate authorities to trust. Default: those of the system.",
    ),
    click.option(
        "--tls-certificate",
        type=_FILE,
        help="PEM file of the client certificate, for servers that require one.",
    ),
    click.option("--tls-key", type=_FILE, help="PEM file of the private key of --tls-certificate."),
    click.option(
        "--tls-verify",
        type=click.Choice(list(VERIFY_MODES)),
        help="How to verify the server's certificate: full; ca checks all but the host name; none "
        "checks nothing. Default: full.",
    ),
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, one value per line."
)
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


@dataclass(frozen=True)
class Access:
    """The cluster to which a command connects, and the account with which it signs requests.

    `access_key` and `secret_key` are those of the options; see `credentials`.
    """

    name_servers: str = DEFAULT_NAME_SERVER
    access_key: str | None = None
    secret_key: str | None = None

    @property
    def credentials(self) -> tuple[str, str] | None:
        """The pair (access key, secret key) for requests; None if there is none.

        It comes from the options, or else from `$ROCKETMQ_HOME/conf/tools.yml`, the file of
        mqadmin. Raises ConfigurationError if only one of the two keys is given, or if the file is
        invalid.
        """
        if self.access_key and self.secret_key:
            return self.access_key, self.secret_key
        if self.access_key or self.secret_key:
            raise ConfigurationError(
                "only one of access key and secret key is given.",
                fix="Give both: SLUICE_ACCESS_KEY and SLUICE_SECRET_KEY.",
            )
        home = os.environ.get("ROCKETMQ_HOME")
        return _read_credentials(f"{home}/conf/tools.yml") if home else None

    def admin(self) -> "Admin":
        """Return a new blocking administration client of the cluster, for a `with` statement.

        Raises ConfigurationError for invalid addresses or credentials.
        """
        from sluicemq.client.sync.admin import Admin  # noqa: PLC0415 - not for `--help`

        return Admin(self.name_servers, credentials=self.credentials)


def _read_credentials(path: str) -> tuple[str, str] | None:
    """Return (access key, secret key) from the file `tools.yml` at `path`; None without the file.

    If other users can read the file, a warning is printed. Raises ConfigurationError if it is
    invalid.
    """
    yaml_text = read_text(SYSTEM_FILES, path)
    if yaml_text is None:
        return None
    from sluicemq.acl.loading import load_credentials  # noqa: PLC0415 - few have the file

    warning = exposure_warning(SYSTEM_FILES, path)
    if warning is not None:
        click.echo(f"sluice: warning: {warning}", err=True)
    return load_credentials(yaml_text, path)


def client_options(function: F) -> F:
    """Add the options of a command that connects to a cluster, and pass them to it as `access`.

    The TLS options are not in `access`: all clients that the command makes take them from
    `net.tls.default_tls`. If the command raises RouteNotFoundError, the error suggests the
    existing topic whose name is most similar.
    """
    return _with_access(function, _CLIENT_OPTIONS)


def server_options(function: F) -> F:
    """Add the options of `client_options` but `--nameserver`, for a command with one server."""
    return _with_access(function, _CLIENT_OPTIONS[1:])


def _with_access(function: F, client_options: Sequence[Callable[[Any], Any]]) -> F:
    """Return a command that has the options to connect, and gets them as one argument `access`.

    `client_options` are click's decorators of these options. While the command runs, its TLS
    options apply to all clients. If the command raises RouteNotFoundError, the error gets a hint
    with the most similar existing topic.
    """

    @functools.wraps(function)
    def command(*args: Any, tls: bool | None, tls_verify: str | None, **options: Any) -> Any:
        tls_files = _pop_tls_files(options)
        access = _pop_access(options)
        with default_tls(resolve_tls(tls, tls_files, tls_verify)):
            try:
                return function(*args, access=access, **options)
            except RouteNotFoundError as error:
                if hint := _suggest_topic(str(error), access, options.values()):
                    raise RouteNotFoundError(str(error), fix=hint) from None
                raise

    return combine_options(*client_options)(command)  # type: ignore[return-value]


def _pop_tls_files(options: dict[str, Any]) -> dict[str, str]:
    """Remove the options for TLS files, and return those that are given, as role -> path.

    The roles are "ca", "certificate" and "key".
    """
    tls_files = {}
    for role in ("ca", "certificate", "key"):
        if path := options.pop(f"tls_{role}"):
            tls_files[role] = path
    return tls_files


def _pop_access(options: dict[str, Any]) -> Access:
    """Remove the options that name the cluster and the account, and return them as an Access."""
    access = Access(access_key=options.pop("access_key"), secret_key=options.pop("secret_key"))
    if "name_servers" in options:  # not for a command with one server
        access = replace(access, name_servers=options.pop("name_servers"))
    return access


def _suggest_topic(error_text: str, access: Access, arguments: Iterable[object]) -> str:
    """Return a question such as "Did you mean 'flights'?" for an unknown topic, or "".

    The topic is the first of the command's `arguments` whose repr is in `error_text`. The result is
    "" if there is none, if no existing topic is similar, or if the cluster cannot be reached. A
    missing system topic is not a wrong name for another one, so there is no question then.
    """
    with suppress(SluiceError), access.admin() as admin:
        for argument in arguments:
            if isinstance(argument, str) and repr(argument) in error_text:
                is_system = is_rocketmq_system_topic(argument)
                return "" if is_system else did_you_mean(argument, admin.topics())
    return ""


def combine_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return one decorator from several of click's decorators.

    The options appear in `--help` in the order of the arguments.
    """

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def admin_options(function: F) -> F:
    """Add the client options and `--json` to a command, and pass it `admin` and `as_json`.

    `admin` is an administration client of the cluster, which is closed when the command returns.
    """

    @client_options
    @json_option
    @functools.wraps(function)
    def command(*args: Any, access: Access, **options: Any) -> Any:
        with access.admin() as admin:
            return function(*args, admin=admin, **options)

    return command  # type: ignore[return-value]


def resolve_tls(enabled: bool | None, files: dict[str, str], verify: str | None) -> Tls | None:
    """Return the TLS settings of a command, None to connect without TLS.

    `enabled` is True for `--tls`, False for `--no-tls`, and None for neither. None enables TLS if
    the environment enables it, or if `files` contains "ca" or "certificate". `files` maps "ca",
    "certificate" and "key" to paths, and `verify` is one of VERIFY_MODES. They override the
    environment. Raises ConfigurationError if the environment's settings are invalid.
    """
    environment_tls = tls_from_environment()
    if enabled is None:
        has_certificates = "ca" in files or "certificate" in files
        enabled = environment_tls is not None or has_certificates
    if not enabled:
        return None
    changes: dict[str, Any] = dict(files)
    if verify is not None:
        changes["verify"] = VERIFY_MODES[verify]
    return replace(environment_tls or Tls(), **changes)


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user to confirm a change, unless `yes` (the option of `yes_option`) is set.

    Raises click.Abort if the answer is not yes, or if there is no input.
    """
    if not yes:
        click.confirm(question, abort=True, err=True)


def parse_time_ms(time: str, option: str = "", *, other_values: str = "") -> int:
    """Return a time in milliseconds since 1970.

    `time` is such a number, or a date in ISO 8601, local unless it has a time zone. A number above
    `TIME_MAX_MS` counts as that, and a date before 1970 as 0. `option` and `other_values` are only
    for the text of the error: the name of the option, and what it accepts besides a time, such as
    "first, last".

    Raises OptionError for other texts, and for a number that looks like another unit, such as
    seconds.
    """
    if time.isascii() and time.isdigit():
        return _check_milliseconds(int(time), f"{option} {time}".lstrip())
    try:
        return max(0, round(datetime.fromisoformat(time).timestamp() * 1000))
    except ValueError:
        other_values += ", " if other_values else ""
        raise OptionError(
            f"{option} {time!r} is not a time.".lstrip(),
            fix=f"Use {other_values}a Unix timestamp in milliseconds, or a date and time such as "
            "2013-01-01T00:00.",
        ) from None


def _check_milliseconds(time_ms: int, quoted: str) -> int:
    """Return `time_ms`, but at most `TIME_MAX_MS`.

    Raises OptionError if the number looks like a time in another unit. The text of the error begins
    with `quoted`.
    """
    time_ms = min(time_ms, TIME_MAX_MS)
    guess = other_unit(time_ms)
    if guess is not None:
        unit, time_in_ms = guess
        raise OptionError(
            f"{quoted} looks like {unit}, but must be a Unix timestamp in milliseconds.",
            fix=f"Write {time_in_ms}.",
        )
    return time_ms


def parse_position_or_time(position: str, option: str) -> Position | int:
    """Return the position in a queue that an option names: "first", "last", or a time.

    The time is in milliseconds since 1970. `position` is a name of an end, a duration before now
    such as "1h", or what `parse_time_ms` accepts. Raises OptionError for other texts.
    """
    end = parse_position(position)
    if end is not None:
        return end
    ago_ms = parse_ago(position)
    if ago_ms is not None:
        return max(0, ago_ms)
    other_values = "first, last, an age such as 1h (one hour ago)"
    return parse_time_ms(position, option, other_values=other_values)


def parse_ago(duration: str) -> int | None:
    """Return the time that is a duration such as "30m", "6h" or "2d" ago, or None for other text.

    The time is in milliseconds since 1970.
    """
    duration_ms = parse_duration_ms(duration)
    return None if duration_ms is None else SYSTEM_CLOCK.now_ms() - round(duration_ms)


def parse_time_option(
    _context: click.Context, option: click.Parameter, time: str | None
) -> int | None:
    """Return the value of an option, parsed with `parse_time_ms`; None stays None.

    This is click's callback. Raises OptionError.
    """
    return None if time is None else parse_time_ms(time, option.opts[0])


# -------------------------------------------------------------------------------- output


def print_json(value: Any, *, is_indented: bool = False) -> None:
    """Print a value as one line of JSON, or as several indented lines, and flush it.

    A lone surrogate, which JSON cannot contain, is printed as an escape sequence. Names that
    are not UTF-8 have such characters.
    """
    option = orjson.OPT_APPEND_NEWLINE
    if is_indented:
        option |= orjson.OPT_INDENT_2
    dumps = functools.partial(orjson.dumps, default=_to_json_type, option=option)
    try:
        line = dumps(value)
    except TypeError:
        line = dumps(_escape_surrogates(value))
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _escape_surrogates(value: Any) -> Any:
    """Return a copy of a value in which lone surrogates in texts are escape sequences.

    Dictionaries and lists are copied with all that they contain.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_surrogates(item) for item in value]
    return value


def _to_json_type(value: object) -> object:
    """Convert a value of a type that orjson does not know.

    A mapping becomes a dict, a tuple a list, and any other value its text.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value)


def print_result(record: Mapping[str, object], sentence: str, *, as_json: bool) -> None:
    """Print what a command has done: `record` as a line of JSON, or `sentence`."""
    if as_json:
        print_json(record)
    else:
        click.echo(sentence)


def record_builder(names: str) -> Callable[[object], dict[str, Any]]:
    """Return a function that copies attributes of an object to a dict, the record of `--json`.

    `names` lists the keys, separated by blanks. A key may be followed by the path of its attribute:
    `"topic broker=queue.broker"` makes {"topic": item.topic, "broker": item.queue.broker}.
    """
    getters = {}
    for name in names.split():
        key, _, attribute_path = name.partition("=")
        getters[key] = attrgetter(attribute_path or key)
    return lambda item: {key: get_attribute(item) for key, get_attribute in getters.items()}


def print_records(
    records: Sequence[Mapping[str, Any]],
    *,
    as_json: bool = False,
    columns: str = "",
    title: str = "",
    empty: str = "",
) -> None:
    """Print records as JSON lines (`as_json`) or as a table with a title.

    If there are no records, `empty` is printed to stderr instead of a table, and nothing with
    `as_json`.

    `columns` selects the fields of the table, separated by blanks; without it, the table has all
    fields of the first record. Each is `field` or `heading=field`, where _ in the heading means a
    blank. `?` before it leaves the column out if all its values are 0 or empty. A suffix formats
    the value: `:time` is a time in milliseconds since 1970, `:span` a duration in milliseconds,
    `:id` a number without commas, `:version` RocketMQ's version number. `columns` has no effect on
    JSON.
    """
    if as_json:
        for record in records:
            print_json(dict(record))
    elif records:
        table_columns = [
            column
            for column in map(_parse_column, columns.split() or records[0])
            if not column.is_optional or any(record[column.field] for record in records)
        ]
        rows = [
            [column.format_value(record[column.field]) for column in table_columns]
            for record in records
        ]
        print_table(title, [column.heading for column in table_columns], rows)
    elif empty:
        click.echo(empty, err=True)


class _Column(NamedTuple):
    """A column of a table of records: its heading, and the field whose formatted values it has.

    An optional column is left out if all values are 0 or empty.
    """

    heading: str
    field: str
    format_value: Callable[[Any], object]
    is_optional: bool


def _parse_column(column: str) -> _Column:
    """Return a column of `print_records`, written as `field`, `heading=field` or `field:format`.

    It is optional if a `?` precedes it.
    """
    name, _, format_name = column.removeprefix("?").partition(":")
    heading, _, field = name.rpartition("=")
    heading = heading.replace("_", " ") or field
    return _Column(heading, field, _CELL_FORMATS[format_name], column.startswith("?"))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. If stdout is not a terminal, it has no colour and is 160 characters wide.

    The environment variable COLUMNS sets another width. A column is aligned to the right if all its
    cells are numbers or empty. Rich formats the table. Where it would divide a word of a heading,
    because the table is too wide, each row is printed as lines of a heading and a value instead.
    """
    from rich.console import Console  # noqa: PLC0415 - 40 ms, for commands with tables only
    from rich.markup import escape  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415 - as above

    table = Table(title=title or None, title_justify="left")
    text_rows = [list(map(_format_cell, row)) for row in rows]
    for index, column in enumerate(columns):
        cells = [row[index] for row in text_rows]
        table.add_column(column, justify=_choose_alignment(cells), overflow="fold")
    for row in text_rows:
        table.add_row(*map(escape, row))

    # None means the width of the terminal.
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "0")) or 160
    console = Console(width=width, highlight=False)
    # Rich handles a closed pipe in its own way, so click prints the table.
    with console.capture() as rendered:
        console.print(table)
    rendered_table = rendered.get()
    if all(word in rendered_table for column in columns for word in column.split()):
        click.echo(rendered_table, nl=False)
    else:
        _print_rows_as_lines(title, columns, text_rows)


def _print_rows_as_lines(
    title: str, columns: Sequence[str], text_rows: Sequence[Sequence[str]]
) -> None:
    """Print the title and, for each row, a line for each heading with its value.

    Headings of empty cells are left out. A blank line separates two rows.
    """
    blocks = []
    width = max(map(len, columns), default=0)
    for row in text_rows:
        cells = [cell for cell in zip(columns, row, strict=True) if cell[1]]
        blocks.append("".join(f"{heading:<{width}}  {text}\n" for heading, text in cells))
    click.echo("\n".join(([f"{title}\n"] if title else []) + blocks))


def _choose_alignment(cells: Sequence[str]) -> Literal["left", "right"]:
    """Return "right" if all cells are numbers or empty, else "left"; "left" without cells."""
    has_only_numbers = all(not cell or _is_number(cell) for cell in cells)
    return "right" if cells and has_only_numbers else "left"


def _is_number(cell_text: str) -> bool:
    """Return whether a cell contains digits, with a minus sign or commas, and nothing else."""
    return cell_text.replace(",", "").replace("-", "", 1).isdigit()


def _format_cell(value: object) -> str:
    """Return the text of a table cell.

    None becomes "", True "yes", 1234 "1,234", and a list its items joined by commas.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def format_time(time_ms: int) -> str:
    """Return a time in milliseconds since 1970 as local time; "" for 0 and below."""
    if time_ms <= 0:
        return ""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).astimezone()
    return moment.isoformat(sep=" ", timespec="milliseconds")[:23]


def format_span(time_ms: int | None) -> str:
    """Return a duration in milliseconds as text; "" for None, which means unknown."""
    return "" if time_ms is None else format_duration(time_ms)


_CELL_FORMATS: Final[Mapping[str, Callable[[Any], object]]] = {
    "": lambda value: value,
    "time": format_time,
    "span": format_span,
    "id": lambda value: None if value is None else str(value),
    "version": version_name,
}


class WithBody(Protocol):
    """A message with a body that may be undecodable."""

    @property
    def body_or_raw(self) -> bytes: ...

    @property
    def body_error(self) -> UndecodableBodyError | None: ...


def format_body(message: WithBody, bytes_max: int) -> str:
    """Return the first `bytes_max` bytes of a body as text, with "…" if there are more.

    Bytes that are not UTF-8 become escape sequences. A body that cannot be decompressed is shown as
    it is stored, after the reason in brackets.
    """
    body = message.body_or_raw
    error = message.body_error
    body_text = body[:bytes_max].decode("utf-8", "backslashreplace")
    if len(body) > bytes_max:
        body_text += "…"
    if error is not None:
        return f"[undecodable: {error.reason}] {body_text}"
    return body_text


def body_record(message: WithBody) -> dict[str, str]:
    """Return a body for `--json`: {"body": text}, or {"body_hex": digits} if it is not UTF-8.

    For a body that cannot be decoded, these are the stored bytes, and "body_error" is the error.
    """
    body = message.body_or_raw
    error = message.body_error
    error_record = {} if error is None else {"body_error": str(error)}
    try:
        return {"body": body.decode()} | error_record
    except UnicodeDecodeError:
        return {"body_hex": body.hex()} | error_record


@contextmanager
def byte_progress(
    label: str, *, shown: bool = True, clock: Clock = SYSTEM_CLOCK
) -> Iterator[Callable[[int, int], None]]:
    """Return a context manager whose value is a function that reports progress on stderr.

    The function takes (bytes done, bytes in total). After `PROGRESS_AFTER_S` seconds it shows a bar
    called `label`, with the rate and the time left. There is no bar if `shown` is False or stderr
    is not a terminal. After Ctrl-C, the last numbers are printed.
    """
    progress = _ByteProgress(label, clock, is_shown=shown and sys.stderr.isatty())
    describe_on_interrupt(progress.describe)
    try:
        yield progress.report
    finally:
        progress.stop()


class _ByteProgress:
    """The progress of work on bytes, with a bar on stderr if the work takes long."""

    def __init__(self, label: str, clock: Clock, *, is_shown: bool) -> None:
        """Start to measure the time of work that is called `label`.

        The bar appears after `PROGRESS_AFTER_S` seconds, unless `is_shown` is False.
        """
        self._label = label
        self._clock = clock
        self._is_shown = is_shown
        self._start_s = clock.monotonic_s()
        self._bytes_done = 0
        self._bytes_total = 0
        self._bar: Any = None
        self._task: Any = None  # the id by which Rich's bar knows the work

    def describe(self) -> str:
        """Return the numbers of the last report as a sentence."""
        return f"{self._label}: {self._bytes_done:,} of {self._bytes_total:,} bytes."

    def report(self, bytes_done: int, bytes_total: int) -> None:
        """Update the bar: `bytes_done` of `bytes_total` bytes are done.

        The bar appears when the work has taken long enough. The numbers are also remembered for
        `describe`.
        """
        self._bytes_done = bytes_done
        self._bytes_total = bytes_total
        if self._bar is None:
            is_too_early = self._clock.monotonic_s() - self._start_s < PROGRESS_AFTER_S
            if not self._is_shown or is_too_early:
                return
            self._start_bar()
        self._bar.update(self._task, completed=bytes_done, total=bytes_total)

    def _start_bar(self) -> None:
        """Show the bar, with the total number of bytes of the last report."""
        # This imports Rich, which is slow, so it is done only for long work.
        columns = ("DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn")
        self._bar = make_progress_bar(*columns)
        self._task = self._bar.add_task(self._label, total=self._bytes_total)
        self._bar.start()

    def stop(self) -> None:
        """Remove the bar, if it is shown."""
        if self._bar is not None:
            self._bar.stop()


def make_progress_bar(*columns: str) -> Any:
    """Return a bar on stderr that disappears when the work ends.

    `columns` are names of classes in `rich.progress`, which show further numbers after the bar.
    """
    from rich import progress  # noqa: PLC0415 - 40 ms, for long work only
    from rich.console import Console  # noqa: PLC0415 - as above

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *(getattr(progress, name)() for name in columns),
        console=Console(stderr=True),
        transient=True,
    )
