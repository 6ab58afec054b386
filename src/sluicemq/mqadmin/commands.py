"""The parser, the session and the error output of `sluice mqadmin`.

`table.COMMANDS` declares each command of RocketMQ's mqadmin as a `Command`; `run` parses the
arguments of a command line and calls its function.

The flags of a command are declared in one string. `b:brokerAddr=` is a flag `-b` or `--brokerAddr`
with a value; without `=`, the flag has no value. A `!` at the end makes the flag required. Of the
flags in `(b:brokerAddr=|c:clusterName=)`, at least one is required. A `~` at the end marks a flag
that SluiceMQ does not support: a command line with it is an error, except for `-c CLUSTER` with the
name of the only cluster.

On a command line, a flag has one of the forms `-b X`, `-bX`, `-b=X`, `--brokerAddr X`,
`--brokerAddr=X` and `-brokerAddr X`. Arguments that belong to no flag are ignored, as RocketMQ's
tool does.

Exit codes are those of RocketMQ's tool: 0, also for a command that fails, and 1 for wrong flags. A
command or flag that SluiceMQ does not support has exit code 1, too.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import ConfigurationError, RequestError, SluiceError
from sluicemq.files import SYSTEM_FILES, create_private_file, make_private_directory
from sluicemq.model.topic import MASTER_ID

USAGE_WIDTH: Final = 110
"""The number of characters after which RocketMQ's tool wraps the usage line of a command."""

TEMPORARY_DIRECTORY: Final = "/tmp"
"""The parent of the default output directories. All users of the machine can write there."""

_DECLARATION: Final = re.compile(
    r"(?P<group>\()?(?P<short>\w*):(?P<long>\w+)(?P<value>=?)(?P<mark>[!~]?)"
)
_UNSAFE_IN_FILE_NAME: Final = re.compile(r"^\.+|[/\0]")
_COMMON_FLAGS: Final = "h:help n:namesrvAddr="


class WrongFlagsError(Exception):
    """The arguments do not match the flags of the command, or ask for its usage.

    `run` prints the text of the error, unless it is empty, then the usage of the command, and
    returns `exit_code`.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        """Create the error. `message` is printed before the usage, unless it is empty."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Flag:
    """The declaration of one flag of a command.

    `short` is the name after one dash, or "" if the flag only has the name `long`. Flags with the
    same `choice` form a set of which at least one is required; 0 means that the flag is in no set.
    """

    short: str
    long: str
    takes_value: bool
    is_required: bool
    choice: int = 0
    is_unsupported: bool = False

    @property
    def usage_text(self) -> str:
        """The flag as the usage line shows it, for example `-t <arg>` or `--list`."""
        name = f"-{self.short}" if self.short else f"--{self.long}"
        return f"{name} <arg>" if self.takes_value else name


def parse_flag_declarations(declarations: str) -> tuple[Flag, ...]:
    """Return the flags that a string such as "b:brokerAddr= (t:topic=|g:group=)" declares.

    A declaration is `short:long`. It is followed by `=` if the flag takes a value, and by `!` if it
    is required or `~` if it is unsupported. Of the flags in parentheses, at least one is required.
    """
    flags: list[Flag] = []
    # An item is one declaration, or a choice: several of them in parentheses.
    items = re.findall(r"\([^)]*\)|[^ ]+", declarations)
    for item_number, item in enumerate(items, start=1):
        choice = item_number if item.startswith("(") else 0
        flags += [_parse_flag(declaration, choice) for declaration in item.strip("()").split("|")]
    return tuple(flags)


def _parse_flag(declaration: str, choice: int) -> Flag:
    """Return the flag that a declaration such as `b:brokerAddr=!` describes.

    `choice` is the number of its set of alternatives, 0 if it is in no set.
    """
    match = _DECLARATION.fullmatch(declaration)
    assert match is not None, declaration
    return Flag(
        match["short"],
        match["long"],
        takes_value=match["value"] == "=",
        is_required=match["mark"] == "!",
        choice=choice,
        is_unsupported=match["mark"] == "~",
    )


class FlagValues(dict[str, str]):
    """The flags of one command line: long name -> value, or "" for a flag without a value."""

    def get_int(self, name: str, default: int = 0) -> int:
        """Return the value of a flag as an integer, or `default` if the flag is missing.

        Raises ConfigurationError if the value is not an integer.
        """
        value = self.get(name)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            raise ConfigurationError(
                f"{name} must be an integer, got {value!r}.", fix="Pass an integer."
            ) from None

    def get_bool(self, name: str, default: bool = False) -> bool:
        """Return whether the value of a flag is `true` in any case; `default` without the flag."""
        return self[name].lower() == "true" if name in self else default


class Session:
    """What one run of a command works with: an admin client, producers and the standard output.

    `make_producer` returns a new producer, which the command closes. `write` appends text to the
    standard output; it adds no line break.
    """

    def __init__(
        self, admin: Admin, make_producer: Callable[[], Producer], write: Callable[[str], object]
    ) -> None:
        """Use an admin client of the cluster, which the caller closes."""
        self.admin = admin
        self.make_producer = make_producer
        self.write = write

    def save_file(self, directory: str, name: str, content: bytes) -> str:
        """Write a file that only its owner can read, and return its path.

        A missing directory is created. `name` may come from a message or a client, so leading dots
        and slashes in it are replaced: the file is always in `directory`. Raises ConfigurationError
        if `directory` is a default directory below `TEMPORARY_DIRECTORY`, where all users can
        write, and a part of it is a symbolic link or belongs to another user.
        """
        path = f"{directory}/{_UNSAFE_IN_FILE_NAME.sub('_', name)}"
        if directory.startswith(f"{TEMPORARY_DIRECTORY}/rocketmq/"):
            make_private_directory(directory, below=TEMPORARY_DIRECTORY)
        else:
            SYSTEM_FILES.make_directory(directory, durable=False)
        create_private_file(path, content)
        return path

    def print_line(self, line: str = "") -> None:
        """Write `line` and a line break to the standard output."""
        self.write(line + "\n")

    def master_addresses(self, cluster: str) -> list[str]:
        """Return the addresses of a cluster's masters.

        Raises ConfigurationError for an unknown cluster.
        """
        return list(self.admin.masters(cluster).values())

    def broker_addresses(self, cluster: str) -> Iterator[tuple[str, list[str]]]:
        """Yield (address of the master, addresses of its slaves) for each broker of a cluster.

        The master's address is "" if no master is registered. An unknown cluster has no brokers.
        """
        cluster_info = self.admin.cluster_info()
        for name in cluster_info.clusters.get(cluster, ()):
            address_by_id = cluster_info.brokers[name].addresses
            slaves = [
                address for broker_id, address in address_by_id.items() if broker_id != MASTER_ID
            ]
            yield address_by_id.get(MASTER_ID, ""), slaves

    def all_addresses(self, cluster: str) -> list[str]:
        """Return the addresses of a cluster's masters and slaves; [] for an unknown cluster."""
        addresses: list[str] = []
        for master, slaves in self.broker_addresses(cluster):
            addresses += filter(None, (master, *slaves))
        return addresses

    def target_addresses(self, values: FlagValues) -> list[str]:
        """Return the address in flag `brokerAddr`, or the masters of the cluster `clusterName`.

        Raises ConfigurationError for an unknown cluster. Raises WrongFlagsError without either
        flag; its exit code is 0, like that of RocketMQ's tool.
        """
        if "brokerAddr" in values:
            return [values["brokerAddr"]]
        if "clusterName" in values:
            return self.master_addresses(values["clusterName"])
        raise WrongFlagsError("", exit_code=0)


CommandFunction = Callable[[Session, FlagValues], None]
"""The code of a command. It prints by its session, and raises SluiceError if it fails."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of mqadmin.

    `summary` is its line in the list of all commands. `run` is None for a command that SluiceMQ
    does not support; `refusal` then says why, and what to use instead. `aliases` are other names
    of the command.
    """

    name: str
    flags: tuple[Flag, ...]
    summary: str
    run: CommandFunction | None
    refusal: str = ""
    aliases: tuple[str, ...] = field(default=())

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """The flags of this command and those of every command, sorted as the usage shows them."""
        short_names = {flag.short for flag in self.flags}
        common = (
            flag for flag in parse_flag_declarations(_COMMON_FLAGS) if flag.short not in short_names
        )
        return tuple(
            sorted((*self.flags, *common), key=lambda flag: (flag.short or flag.long).lower())
        )


def parse_arguments(command: Command, arguments: Sequence[str]) -> FlagValues:
    """Return the flags of a command line, as long name -> value; a flag without value has "".

    Values are stripped. Arguments that belong to no flag are ignored, as RocketMQ's tool does.
    Raises WrongFlagsError for an unknown flag, a flag without its value or a missing required flag,
    and with exit code 0 for `--help`.
    """
    flag_by_name = _name_flags(command.all_flags)
    values = FlagValues()
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        flag, value = _split_argument(argument, flag_by_name)
        if flag is None:
            is_number = re.fullmatch(r"-[\d.]*", argument)
            if argument.startswith("-") and not is_number:
                raise WrongFlagsError(f"Unrecognized option: {argument}")
            continue  # RocketMQ's tool ignores arguments that belong to no flag
        if flag.takes_value and value is None:
            # The value is the next argument, unless that is a flag.
            if not remaining or remaining[0].partition("=")[0] in flag_by_name:
                raise WrongFlagsError(f"Missing argument for option: {flag.short or flag.long}")
            value = remaining.pop(0)
        values[flag.long] = (value or "").strip()

    if "help" in values:
        raise WrongFlagsError("", exit_code=0)
    _check_required(command, values)
    return values


def _split_argument(
    argument: str, flag_by_name: Mapping[str, Flag]
) -> tuple[Flag | None, str | None]:
    """Split an argument such as `-b=X`, `--brokerAddr=X` or `-bX` into (flag, value).

    The flag is None if the argument names none, and the value is None if the argument has none.
    """
    name, separator, value = argument.partition("=")
    flag = flag_by_name.get(name)
    if flag is not None:
        return flag, value if separator else None

    # The form -bX, which only flags with a value have.
    has_one_dash = argument.startswith("-") and not argument.startswith("--")
    short_flag = flag_by_name.get(argument[:2])
    if has_one_dash and short_flag is not None and short_flag.takes_value:
        return short_flag, argument[2:]
    return None, None


def _name_flags(flags: Sequence[Flag]) -> dict[str, Flag]:
    """Return name -> flag, for all names on a command line: -b, -brokerAddr, --brokerAddr."""
    flag_by_name = {f"-{flag.short}": flag for flag in flags if flag.short}
    for flag in flags:
        flag_by_name[f"-{flag.long}"] = flag
        flag_by_name[f"--{flag.long}"] = flag
    return flag_by_name


def _check_required(command: Command, values: Mapping[str, str]) -> None:
    """Raise WrongFlagsError if a required flag or a whole set of alternatives is missing."""
    missing = [flag.short for flag in command.flags if flag.is_required and flag.long not in values]
    flags_by_choice: dict[int, list[Flag]] = {}
    for flag in command.flags:
        if flag.choice:
            flags_by_choice.setdefault(flag.choice, []).append(flag)
    for _, alternatives in sorted(flags_by_choice.items()):
        if not any(flag.long in values for flag in alternatives):
            names = ", ".join(f"-{flag.short} {flag.long}" for flag in alternatives)
            missing.append(f"[{names}]")
    if missing:
        plural = "s" if len(missing) > 1 else ""
        raise WrongFlagsError(f"Missing required option{plural}: {', '.join(missing)}")


def usage_lines(command: Command) -> Iterator[str]:
    """Yield the lines that `mqadmin help COMMAND` prints: the usage, and a line for each flag."""
    line = f"usage: mqadmin {command.name}"
    for item in _format_usage_items(command):
        if len(line) + len(item) >= USAGE_WIDTH:
            yield line
            line = "      "
        line += f" {item}"
    yield line

    for flag in command.all_flags:
        names = f"-{flag.short},--{flag.long}" if flag.short else f"   --{flag.long}"
        argument = " <arg>" if flag.takes_value else ""
        yield f" {names}{argument}"


def _format_usage_items(command: Command) -> Iterator[str]:
    """Yield the flags as the usage line shows them, for example `-t <arg>`, `[-l]`, `-b | -c`.

    Alternatives are one item, in the place of the first of them.
    """
    shown_choices: set[int] = set()
    for flag in command.all_flags:
        if not flag.choice:
            yield flag.usage_text if flag.is_required else f"[{flag.usage_text}]"
        elif flag.choice not in shown_choices:
            shown_choices.add(flag.choice)
            yield " | ".join(
                alternative.usage_text
                for alternative in command.all_flags
                if alternative.choice == flag.choice
            )


def overview_lines(commands: Iterable[Command]) -> Iterator[str]:
    """Yield the lines that `mqadmin` without arguments prints."""
    yield "The most commonly used mqadmin commands are:"
    for command in commands:
        yield f"   {command.name:<35} {command.summary}"
    yield ""
    yield "See 'mqadmin help <command>' for more information on a specific command."


def find_command(commands: Iterable[Command], name: str) -> Command | None:
    """Return the command with this name or alias, in upper or lower case; None without one."""
    lower_name = name.lower()
    for command in commands:
        if lower_name in map(str.lower, (command.name, *command.aliases)):
            return command
    return None


def failure_lines(command: Command, error: SluiceError) -> Iterator[str]:
    """Yield the lines that report the failure of a command as RocketMQ's tool does.

    Scripts search them for CODE and DESC. A last line has the fix, if there is one.
    """
    yield f"org.apache.rocketmq.tools.command.SubCommandException: {command.name} command failed"
    if not isinstance(error, RequestError):
        yield f"Caused by: {error.fact}"
    else:
        class_name = "MQClientException"
        broker = ""
        if error.address:
            class_name = "MQBrokerException"
            broker = f" BROKER: {error.address}"
        yield (
            f"Caused by: org.apache.rocketmq.client.exception.{class_name}: "
            f"CODE: {error.code}  DESC: {error.remark}{broker}"
        )
    if error.fix:
        yield f"sluice: {error.fix}"


def _find_unsupported_flag_error(session: Session, command: Command, values: FlagValues) -> str:
    """Return the error line for the first given flag that is not supported, "" if there is none."""
    for flag in command.flags:
        if flag.is_unsupported and flag.long in values:
            reason = _explain_refusal(session, flag, values)
            if reason:
                name = f"{command.name} {flag.usage_text}"
                return f"{name} is not supported: {reason}. Remove the flag."
    return ""


def _explain_refusal(session: Session, flag: Flag, values: FlagValues) -> str:
    """Return why a flag cannot be used, "" if its value makes no difference."""
    if flag.long != "cluster":
        return "it has no effect in SluiceMQ"
    clusters = sorted(session.admin.cluster_info().clusters)
    if clusters == [values["cluster"]]:
        return ""
    return f"the command covers all clusters ({', '.join(clusters)}), and lite topics do not exist"


def _join_lines(lines: Iterable[str]) -> str:
    """Return the lines as one text, with a line break after each."""
    return "".join(f"{line}\n" for line in lines)


def run(
    commands: Sequence[Command],
    arguments: Sequence[str],
    write: Callable[[str], object],
    write_error_line: Callable[[str], object],
    open_session: Callable[[str | None], AbstractContextManager[Session]],
) -> int:
    """Run `mqadmin ARGUMENTS`, and return the exit code.

    `write` receives text for standard output, `write_error_line` lines for standard error, without
    line breaks. `open_session` returns a connection to the cluster. It is called only if the
    command needs one, with the name servers of flag `-n`, None without it. As in RocketMQ's tool, a
    command that fails also has the exit code 0.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        write(_join_lines(overview_lines(commands)))
        return 0
    is_help = arguments[0] == "help" and len(arguments) == 2
    command_name = arguments[1] if is_help else arguments[0]
    command = find_command(commands, command_name)
    if command is None:
        write(f"The sub command {command_name} not exist.\n")
        return 0
    if is_help:
        write(_join_lines(usage_lines(command)))
        return 0

    # `values` are the flags. Wrong ones print the usage, and a failed command its error.
    try:
        values = parse_arguments(command, arguments[1:])
        if command.run is None:
            write_error_line(f"{command.name} is not supported. {command.refusal}")
            return 1
        with open_session(values.get("namesrvAddr")) as session:
            if error_line := _find_unsupported_flag_error(session, command, values):
                write_error_line(error_line)
                return 1
            command.run(session, values)
    except WrongFlagsError as error:
        reason = f"{error}\n" if str(error) else ""
        write(reason + _join_lines(usage_lines(command)))
        return error.exit_code
    except SluiceError as error:
        for line in failure_lines(command, error):
            write_error_line(line)
    return 0
