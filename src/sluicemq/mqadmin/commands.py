"""What a command of mqadmin is; how its flags are read, and how its errors look.

Flags are declared in one text: `b:brokerAddr=` has a value, a `!` behind it makes it required, and
of `(b:brokerAddr=|c:clusterName=)` one is. One with a `~` has nothing to choose from here: it is
refused, but for the name of the only cluster. A flag is given as `-b X`, `-bX`, `-b=X`,
`--brokerAddr X` or `-brokerAddr X`; words that belong to no flag are passed over, as the tool does.

Exit codes are the tool's: 0, also when a command fails, and 1 for wrong flags. A command that is
refused here ends with 1 as well.
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

WIDTH: Final = 110
TEMPORARY: Final = "/tmp"
"""Where files go when nobody says otherwise: everybody of the machine writes there."""
_FLAG: Final = re.compile(r"(?P<group>\()?(?P<short>\w*):(?P<long>\w+)(?P<value>=?)(?P<mark>[!~]?)")
_UNSAFE: Final = re.compile(r"^\.+|[/\0]")
_COMMON: Final = "h:help n:namesrvAddr="


class WrongFlagsError(Exception):
    """The words do not fit the command, which prints its usage."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Flag:
    """One of a command; `choice` flags are a set of which one is required."""

    short: str
    long: str
    takes_value: bool
    is_required: bool
    choice: int = 0
    is_idle: bool = False

    @property
    def shown(self) -> str:
        """As usage has it."""
        name = f"-{self.short}" if self.short else f"--{self.long}"
        return f"{name} <arg>" if self.takes_value else name


def parse_flags(text: str) -> tuple[Flag, ...]:
    """The declaration as flags."""
    found: list[Flag] = []
    for number, part in enumerate(re.findall(r"\([^)]*\)|[^ ]+", text), start=1):
        choice = number if part.startswith("(") else 0
        for one in part.strip("()").split("|"):
            match = _FLAG.fullmatch(one)
            assert match is not None, one
            value, mark = match["value"] == "=", match["mark"]
            found.append(
                Flag(match["short"], match["long"], value, mark == "!", choice, mark == "~")
            )
    return tuple(found)


class Given(dict[str, str]):
    """The values of flags by their long names; a flag without a value is there, empty."""

    def number(self, name: str, default: int = 0) -> int:
        """Raises ConfigurationError for what is none."""
        text = self.get(name)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            raise ConfigurationError(f"{name} is {text!r}.", fix="Give a number.") from None

    def truth(self, name: str, default: bool = False) -> bool:
        """True for `true` alone, in any case."""
        return self[name].lower() == "true" if name in self else default


class Session:
    """One call: the cluster, who makes producers, and where the lines go."""

    def __init__(
        self, admin: Admin, make_producer: Callable[[], Producer], write: Callable[[str], object]
    ) -> None:
        self.admin = admin
        self.make_producer = make_producer
        self.write = write

    def save(self, directory: str, name: str, data: bytes) -> str:
        """A file in a directory, which is made where it is missing; its path. `name` may come from
        whoever made a message or a client: nothing of it leads to another directory. Raises
        ConfigurationError for one of the default directories that somebody else has prepared.
        """
        path = f"{directory}/{_UNSAFE.sub('_', name)}"
        if directory.startswith(f"{TEMPORARY}/rocketmq/"):
            make_private_directory(directory, below=TEMPORARY)
        else:
            SYSTEM_FILES.make_directory(directory, durable=False)
        create_private_file(path, data)
        return path

    def say(self, line: str = "") -> None:
        """A line."""
        self.write(line + "\n")

    def masters(self, cluster: str) -> list[str]:
        """Addresses of a cluster's masters. Raises ConfigurationError for an unknown cluster."""
        return list(self.admin.masters(cluster).values())

    def brokers(self, cluster: str) -> Iterator[tuple[str, list[str]]]:
        """(Master's address, those of its slaves) of a cluster."""
        info = self.admin.cluster_info()
        for name in info.clusters.get(cluster, ()):
            known = info.brokers[name].addresses
            slaves = [one for number, one in known.items() if number != MASTER_ID]
            yield known.get(MASTER_ID, ""), slaves

    def addresses(self, given: Given, cluster: str = "clusterName") -> list[str]:
        """The broker that is named, or the masters of the cluster. Raises WrongFlagsError when
        neither is given: the tool prints its help then and ends well.
        """
        if "brokerAddr" in given:
            return [given["brokerAddr"]]
        if cluster in given:
            return self.masters(given[cluster])
        raise WrongFlagsError("", exit_code=0)


Function = Callable[[Session, Given], None]


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table. `refusal` says why it cannot be, and what to use instead."""

    name: str
    flags: tuple[Flag, ...]
    summary: str
    run: Function | None
    refusal: str = ""
    aliases: tuple[str, ...] = field(default=())

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """With those that every command has."""
        own = {flag.short for flag in self.flags}
        common = (flag for flag in parse_flags(_COMMON) if flag.short not in own)
        return tuple(
            sorted((*self.flags, *common), key=lambda one: (one.short or one.long).lower())
        )


def parse(command: Command, words: Sequence[str]) -> Given:
    """The values of the flags. Raises WrongFlagsError."""
    flags = command.all_flags
    by_name = {f"-{flag.short}": flag for flag in flags if flag.short}
    by_name |= {f"{dashes}{flag.long}": flag for flag in flags for dashes in ("-", "--")}
    found, rest = Given(), list(words)
    while rest:
        word = rest.pop(0)
        name, separator, value = word.partition("=")
        flag = by_name.get(name)
        if flag is None and word[:1] == "-" and word[:2] in by_name and word[1:2] != "-":
            flag, separator, value = by_name[word[:2]], "=", word[2:]  # -bX
            if not flag.takes_value:
                flag = None
        if flag is None:
            if word.startswith("-") and not re.fullmatch(r"-[\d.]*", word):
                raise WrongFlagsError(f"Unrecognized option: {word}")
            continue
        if flag.takes_value and not separator:
            if not rest or rest[0].partition("=")[0] in by_name:
                raise WrongFlagsError(f"Missing argument for option: {flag.short or flag.long}")
            value = rest.pop(0)
        found[flag.long] = value.strip()
    if "help" in found:
        raise WrongFlagsError("", exit_code=0)
    _check_required(command, found)
    return found


def _check_required(command: Command, given: Mapping[str, str]) -> None:
    missing = [one.short for one in command.flags if one.is_required and one.long not in given]
    for choice in sorted({one.choice for one in command.flags} - {0}):
        ones = [one for one in command.flags if one.choice == choice]
        if not any(one.long in given for one in ones):
            missing.append("[" + ", ".join(f"-{one.short} {one.long}" for one in ones) + "]")
    if missing:
        plural = "s" if len(missing) > 1 else ""
        raise WrongFlagsError(f"Missing required option{plural}: {', '.join(missing)}")


def usage(command: Command) -> Iterator[str]:
    """What `mqadmin help COMMAND` prints."""
    shown: list[str] = []
    done: set[int] = set()
    for flag in command.all_flags:
        if not flag.choice:
            shown.append(flag.shown if flag.is_required else f"[{flag.shown}]")
        elif flag.choice not in done:
            done.add(flag.choice)
            ones = (one for one in command.all_flags if one.choice == flag.choice)
            shown.append(" | ".join(one.shown for one in ones))
    line = f"usage: mqadmin {command.name}"
    for part in shown:
        if len(line) + len(part) >= WIDTH:
            yield line
            line = "      "
        line += f" {part}"
    yield line
    for flag in command.all_flags:
        names = f"-{flag.short},--{flag.long}" if flag.short else f"   --{flag.long}"
        yield f" {names}{' <arg>' if flag.takes_value else ''}"


def overview(commands: Iterable[Command]) -> Iterator[str]:
    """What `mqadmin` alone prints."""
    yield "The most commonly used mqadmin commands are:"
    for command in commands:
        yield f"   {command.name:<35} {command.summary}"
    yield ""
    yield "See 'mqadmin help <command>' for more information on a specific command."


def find(commands: Iterable[Command], name: str) -> Command | None:
    """In any case, by an alias too."""
    wanted = name.lower()
    return next((c for c in commands if wanted in map(str.lower, (c.name, *c.aliases))), None)


def failure(command: Command, error: SluiceError) -> Iterator[str]:
    """An error in the form of the tool, whose readers look for CODE and DESC; with our cure."""
    yield f"org.apache.rocketmq.tools.command.SubCommandException: {command.name} command failed"
    if isinstance(error, RequestError):
        kind = "MQBrokerException" if error.address else "MQClientException"
        where = f" BROKER: {error.address}" if error.address else ""
        begin = f"Caused by: org.apache.rocketmq.client.exception.{kind}"
        yield f"{begin}: CODE: {error.code}  DESC: {error.remark}{where}"
    else:
        yield f"Caused by: {error.fact}"
    if error.fix:
        yield f"sluice: {error.fix}"


def _refusal(session: Session, flag: Flag, given: Given) -> str:
    """Why a flag that has nothing to choose from is refused; "" when it chooses what there is."""
    if flag.long != "cluster":
        return "it has no effect here"
    names = sorted(session.admin.cluster_info().clusters)
    is_only = names == [given["cluster"]]
    return "" if is_only else f"all clusters are looked at ({', '.join(names)}), and no lite topics"


def run(
    commands: Sequence[Command],
    words: Sequence[str],
    write: Callable[[str], object],
    complain: Callable[[str], object],
    session: Callable[[str | None], AbstractContextManager[Session]],
) -> int:
    """What `mqadmin WORDS` does; its exit code. `session` opens one for the name servers that -n
    names; `write` takes what goes to stdout, `complain` lines for stderr.
    """
    if not words or words[0] in ("-h", "--help"):
        write("".join(f"{line}\n" for line in overview(commands)))
        return 0
    asks = words[0] == "help" and len(words) == 2
    command = find(commands, words[1] if asks else words[0])
    if command is None:
        write(f"The sub command {words[-1] if asks else words[0]} not exist.\n")
        return 0
    help_text = "".join(f"{line}\n" for line in usage(command))
    if asks:
        write(help_text)
        return 0
    try:
        given = parse(command, words[1:])
        if command.run is None:
            complain(f"{command.name} is refused. {command.refusal}")
            return 1
        with session(given.get("namesrvAddr")) as one:
            for flag in command.flags:
                if flag.is_idle and flag.long in given and (why := _refusal(one, flag, given)):
                    complain(f"{command.name} {flag.shown} is refused: {why}. Leave it away.")
                    return 1
            command.run(one, given)
    except WrongFlagsError as error:
        write(f"{error}\n" * bool(str(error)) + help_text)
        return error.exit_code
    except SluiceError as error:
        for line in failure(command, error):
            complain(line)
    return 0
