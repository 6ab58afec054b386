"""How commands speak: tables for people, JSON lines for scripts; the options that they share.

With --json a command prints one JSON value a line on stdout and nothing else there. Errors go to
stderr: `ending`.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click
import orjson

from sluicemq.cli.ending import OptionError, when_interrupted
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
from sluicemq.net.tls import VERIFY_MODES, Tls, default_tls, tls_from_environment
from sluicemq.numbers import format_duration, other_unit, parse_duration_ms
from sluicemq.wire.codes import version_name

if TYPE_CHECKING:
    from sluicemq.client.sync.admin import Admin

F = TypeVar("F", bound=Callable[..., Any])
PROGRESS_AFTER_S: Final = 0.5
TIME_MAX_MS: Final = 2**63 - 1

# ------------------------------------------------------------------------------- options

_FILE: Final = click.Path(exists=True, dir_okay=False)
_CLIENT_OPTIONS: Final = (
    click.option(
        "-n", "--nameserver", "name_servers", envvar="NAMESRV_ADDR", default=DEFAULT_NAME_SERVER,
        show_default=True, help="Name servers, host:port;host:port.",
    ),
    click.option(
        "--access-key", envvar=["SLUICE_ACCESS_KEY", "ROCKETMQ_ACCESS_KEY"],
        help="Access key; without it that of $ROCKETMQ_HOME/conf/tools.yml, as mqadmin does.",
    ),
    click.option(
        "--secret-key", envvar=["SLUICE_SECRET_KEY", "ROCKETMQ_SECRET_KEY"],
        help="Secret key; better from the environment (SLUICE_SECRET_KEY) or from tools.yml.",
    ),
    click.option(
        "--tls/--no-tls", default=None,
        help="Speak TLS (SLUICE_TLS=true); also on with --tls-ca or --tls-certificate.",
    ),
    click.option(
        "--tls-ca", type=_FILE,
        help="PEM file of the authorities to trust; without it those of the system.",
    ),
    click.option(
        "--tls-certificate", type=_FILE,
        help="PEM file of the certificate to show to servers that want one.",
    ),
    click.option("--tls-key", type=_FILE, help="PEM file of the key of --tls-certificate."),
    click.option(
        "--tls-verify", type=click.Choice(list(VERIFY_MODES)),
        help="What of a server's certificate is checked: full, ca (not the host name), none.",
    ),
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")


@dataclass(frozen=True)
class Access:
    """Which cluster a command talks to, and who asks."""

    name_servers: str = DEFAULT_NAME_SERVER
    access_key: str | None = None
    secret_key: str | None = None

    @property
    def credentials(self) -> tuple[str, str] | None:
        """The pair, or what mqadmin signs with: that of $ROCKETMQ_HOME/conf/tools.yml; or None.
        Raises ConfigurationError when one half is missing."""
        if self.access_key and self.secret_key:
            return self.access_key, self.secret_key
        if self.access_key or self.secret_key:
            raise ConfigurationError(
                "only one of access key and secret key is given.",
                fix="Give both: SLUICE_ACCESS_KEY and SLUICE_SECRET_KEY.",
            )
        home = os.environ.get("ROCKETMQ_HOME")
        path = f"{home}/conf/tools.yml"
        text = read_text(SYSTEM_FILES, path) if home else None
        if text is None:
            return None
        from sluicemq.acl.loading import load_credentials  # noqa: PLC0415 - rarely there

        warning = exposure_warning(SYSTEM_FILES, path)
        if warning is not None:
            click.echo(f"sluice: warning: {warning}", err=True)
        return load_credentials(text, path)

    def admin(self) -> "Admin":
        """Administration of the cluster, for a `with` statement."""
        from sluicemq.client.sync.admin import Admin  # noqa: PLC0415 - not for `--help`

        return Admin(self.name_servers, credentials=self.credentials)


def client_options(function: F) -> F:
    """The options of a command that makes clients: it gets them as `access`. TLS it does not see:
    clients take it up by themselves (`net.tls.default_tls`), as they do the environment."""
    return _with_access(function, _CLIENT_OPTIONS)


def server_options(function: F) -> F:
    """The same for a command that is told the address of its one server."""
    return _with_access(function, _CLIENT_OPTIONS[1:])


def _with_access(function: F, client_options: Sequence[Callable[[Any], Any]]) -> F:
    @functools.wraps(function)
    def command(*args: Any, tls: bool | None, tls_verify: str | None, **options: Any) -> Any:
        named = {one: options.pop(f"tls_{one}") for one in ("ca", "certificate", "key")}
        files = {one: path for one, path in named.items() if path}
        names = ("name_servers", "access_key", "secret_key")
        access = Access(**{name: options.pop(name) for name in names if name in options})
        with default_tls(chosen_tls(tls, files, tls_verify)):
            try:
                return function(*args, access=access, **options)
            except RouteNotFoundError as error:
                if hint := _meant(str(error), access, options.values()):
                    raise RouteNotFoundError(str(error), fix=hint) from None
                raise

    return with_options(*client_options)(command)  # type: ignore[return-value]


def _meant(text: str, access: Access, words: Iterable[object]) -> str:
    """The nearest of the topics that there are, to the word of the command that an error quotes."""
    with suppress(SluiceError), access.admin() as admin:
        for word in words:
            if isinstance(word, str) and repr(word) in text:
                return did_you_mean(word, admin.topics())
    return ""


def with_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options at once, in the order of `--help`."""
    return lambda function: functools.reduce(lambda made, one: one(made), options[::-1], function)


def admin_options(function: F) -> F:
    """The options of a command that asks the cluster, and --json: it gets `admin`, which is open
    while it runs, and `as_json`."""

    @client_options
    @json_option
    @functools.wraps(function)
    def command(*args: Any, access: Access, **options: Any) -> Any:
        with access.admin() as admin:
            return function(*args, admin=admin, **options)

    return command  # type: ignore[return-value]


def chosen_tls(wanted: bool | None, files: dict[str, str], verify: str | None) -> Tls | None:
    """What the options say, on top of the environment. Raises ConfigurationError."""
    base = tls_from_environment()
    if wanted is False or (wanted is None and base is None and not files.keys() - {"key"}):
        return None
    changes: dict[str, Any] = dict(files)
    if verify is not None:
        changes["verify"] = VERIFY_MODES[verify]
    return replace(base or Tls(), **changes)


def parse_time(text: str, where: str = "") -> int:
    """Return the milliseconds since 1970 that a text says, itself or as a date. `where` names the
    option. Raises OptionError, for a number that is a time in another unit too."""
    if text.isascii() and text.isdigit():
        number = min(int(text), TIME_MAX_MS)
        if (found := other_unit(number)) is not None:
            unit, time_ms = found
            raise OptionError(
                f"{where} {text} looks like {unit}, and must be milliseconds.".lstrip(),
                fix=f"Write {time_ms}.",
            )
        return number
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise OptionError(
            f"{where} {text!r} is no time.".lstrip(),
            fix="Use milliseconds since 1970, or a date: 2013-01-01T00:00.",
        ) from None


def parse_ago(text: str) -> int | None:
    """Return the time that is a duration such as "30m", "6h" or "2d" ago, or None for other text.

    The time is in milliseconds since 1970.
    """
    duration_ms = parse_duration_ms(text)
    return None if duration_ms is None else SYSTEM_CLOCK.now_ms() - round(duration_ms)


def as_time(_context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """The callback of an option that is a time: its command gets milliseconds since 1970."""
    return None if text is None else parse_time(text, option.opts[0])


# -------------------------------------------------------------------------------- output


def print_json(value: Any) -> None:
    """Print a value as one line of JSON. A half character, which a name that is no UTF-8 has and
    JSON cannot hold, is written as a backslash sequence."""
    dumps = functools.partial(orjson.dumps, default=_plain, option=orjson.OPT_APPEND_NEWLINE)
    try:
        line = dumps(value)
    except TypeError:
        line = dumps(_whole_characters(value))
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _whole_characters(value: Any) -> Any:
    """Return the value with the half characters of its texts escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_whole_characters(key): _whole_characters(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_characters(it) for it in value]
    return value


def _plain(value: object) -> object:
    """What orjson does not know by itself: other mappings than dict, named tuples."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else str(value)


def print_result(value: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """What a command has done: a JSON line, or a sentence."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def fields(names: str) -> Callable[[object], dict[str, Any]]:
    """What makes records of objects: `name`, or `name=path.of.attributes`, separated by blanks."""
    pairs = [
        (name, path or name) for name, _, path in (word.partition("=") for word in names.split())
    ]
    getters = [(name, attrgetter(path)) for name, path in pairs]
    return lambda item: {name: get(item) for name, get in getters}


def print_records(
    records: Sequence[Mapping[str, Any]],
    *,
    as_json: bool = False,
    columns: str = "",
    title: str = "",
    empty: str = "",
) -> None:
    """Records as JSON lines, or as a table; `empty` is said on stderr when there is none.

    `columns`: which fields a table has, all without it: `field`, or `Heading=field` where _ stands
    for a blank; `:time` or `:span` behind it shows milliseconds as a date, as a duration,
    `:version` RocketMQ's number of a version.
    """
    if as_json:
        for record in records:
            print_json(dict(record))
    elif records:
        shown = []
        for word in columns.split() or records[0]:
            name, _, how = word.partition(":")
            heading, _, field = name.rpartition("=")
            shown.append((heading.replace("_", " ") or field, field, _FORMATS[how]))
        rows = [[show(record[field]) for _, field, show in shown] for record in records]
        print_table(title, [heading for heading, _, _ in shown], rows)
    elif empty:
        click.echo(empty, err=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A rich table on a terminal; without colour and full width when stdout is a pipe."""
    from rich.console import Console  # noqa: PLC0415 - 40 ms that other commands do not pay
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=title or None, title_justify="left")
    shown = [[_text(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        is_number = bool(shown) and all(
            row[index].replace(",", "").replace("-", "", 1).isdigit() or not row[index]
            for row in shown
        )
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in shown:
        table.add_row(*map(escape, row))
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "0")) or 160
    console = Console(width=width, highlight=False)
    with console.capture() as drawn:  # rich has an end of its own for readers who are gone
        console.print(table)
    click.echo(drawn.get(), nl=False)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def show_time(time_ms: int) -> str:
    """Milliseconds since 1970 as local time; empty for 0 and below."""
    if time_ms <= 0:
        return ""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).astimezone()
    return moment.isoformat(sep=" ", timespec="milliseconds")[:23]


def show_span(time_ms: int | None) -> str:
    """Return a duration for a table; "" for None, which means unknown."""
    return "" if time_ms is None else format_duration(time_ms)


_FORMATS: Final[Mapping[str, Callable[[Any], object]]] = {
    "": lambda value: value, "time": show_time, "span": show_span, "version": version_name,
}  # fmt: skip


class WithBody(Protocol):
    """A message with a body that may be undecodable."""

    @property
    def body_or_raw(self) -> bytes: ...

    @property
    def body_error(self) -> UndecodableBodyError | None: ...


def show_body(message: WithBody, bytes_max: int) -> str:
    """Return the beginning of the body as text; bytes that are not text as escapes. A body that
    cannot be decoded is shown as it is stored, behind the reason."""
    body, error = message.body_or_raw, message.body_error
    text = body[:bytes_max].decode("utf-8", "backslashreplace")
    told = "" if error is None else f"[undecodable: {error.reason}] "
    return told + text + ("…" if len(body) > bytes_max else "")


def body_record(message: WithBody) -> dict[str, str]:
    """Return the body for --json: as text, in hex digits when it is not UTF-8. A body that cannot
    be decoded is shown as it is stored, with `body_error`."""
    body, error = message.body_or_raw, message.body_error
    told = {} if error is None else {"body_error": str(error)}
    try:
        return {"body": body.decode()} | told
    except UnicodeDecodeError:
        return {"body_hex": body.hex()} | told


@contextmanager
def byte_progress(
    what: str, *, shown: bool = True, clock: Clock = SYSTEM_CLOCK
) -> Iterator[Callable[[int, int], None]]:
    """A function that takes (bytes done, bytes in all) now and then, and shows a bar with rate and
    time left: on stderr, on terminals only, and after half a second of work, when rich is imported.
    Ctrl-C says how far it was.
    """
    is_shown = shown and sys.stderr.isatty()
    began_s, bar, task, reached = clock.monotonic_s(), None, None, (0, 0)
    when_interrupted(lambda: f"{what}: {reached[0]:,} of {reached[1]:,} bytes.")

    def advance(done: int, total: int) -> None:
        nonlocal bar, task, reached
        reached = done, total
        if bar is None:
            if not is_shown or clock.monotonic_s() - began_s < PROGRESS_AFTER_S:
                return
            bar = progress_bar("DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn")
            task = bar.add_task(what, total=total)
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def progress_bar(*columns: str) -> Any:
    """A bar of rich's on stderr, which goes when the work ends, with these columns behind it."""
    from rich import progress  # noqa: PLC0415 - 40 ms that short work does not pay
    from rich.console import Console  # noqa: PLC0415

    return progress.Progress(
        progress.TextColumn("{task.description}"), progress.BarColumn(),
        *(getattr(progress, name)() for name in columns),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
