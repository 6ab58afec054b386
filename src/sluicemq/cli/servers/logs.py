"""The log options of all server commands, and the set-up of logging.

Without `--log-file`, a server logs to stderr and writes no log file. With it, the file is rotated
when it is full, so that the disk does not fill up: the full files are `FILE.1` … `FILE.10`, of
which `FILE.1` is the newest, and older ones are deleted. The format `text` is for people, `json`
(one object per line) for log collectors.

`--log-config` reads a `logback.xml` of RocketMQ, such as `rmq.broker.logback.xml`. Only the level
and the file with its size and count are used; everything else in it has no effect.

Only the scripts of `sluice install-names` log to a file by default (`~/logs/rocketmqlogs`).
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.log_lines import JsonLines, TextLines
from sluicemq.net.limits import LogRateLimit

log = logging.getLogger("sluicemq.cli")
F = TypeVar("F", bound=Callable[..., Any])
LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
FILE_BYTES_MAX: Final = 128 * 1024 * 1024
ROTATED_FILES: Final = 10
_VARIABLE: Final = re.compile(r"\$\{([^}:]*)(?::-([^}]*))?\}")
_SIZE: Final = re.compile(r"([0-9]+) *(KB|MB|GB)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}
_LOGBACK_LEVELS: Final = {"trace": "debug", "warn": "warning", "all": "debug", "off": "error"}
"""The levels of logback that Python does not have, and the most similar ones."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What a server logs, in which format, and where."""

    level: str = "info"
    """One of LEVELS."""
    form: str = "text"
    """One of FORMATS."""
    path: str = ""
    """The log file; "" means stderr."""
    bytes_max: int = FILE_BYTES_MAX
    """The size at which the file is rotated."""
    rotated_files: int = ROTATED_FILES
    """The number of full files that are kept."""


def start_log(config: LogConfig) -> None:
    """Configure logging for this process, with one handler on the root logger.

    Missing directories of the log file are created. Raises ConfigurationError if the file is not
    writable.
    """
    handler: logging.Handler
    if config.path:
        from logging.handlers import RotatingFileHandler  # noqa: PLC0415 - few log to a file

        try:
            Path(config.path).parent.mkdir(parents=True, exist_ok=True)
            handler = RotatingFileHandler(
                config.path,
                maxBytes=config.bytes_max,
                backupCount=config.rotated_files,
                encoding="utf-8",
            )
        except OSError as error:
            raise ConfigurationError(
                f"the log file {config.path} cannot be written: {error.strerror}.",
                fix="Name another file with --log-file, or give this user permission to write it.",
            ) from error
    else:
        handler = logging.StreamHandler(sys.stderr)
    formatter = JsonLines() if config.form == "json" else TextLines()
    handler.setFormatter(formatter)
    handler.addFilter(LogRateLimit())
    logging.basicConfig(level=config.level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise it logs each request


def child_log_options(name: str) -> list[str]:
    """Return the options by which a child process called `name` logs like this process.

    If this process logs to a file, the child logs to `FILE.name`, because only one process may
    write a log file.
    """
    from logging.handlers import RotatingFileHandler  # noqa: PLC0415 - with child processes only

    root = logging.getLogger()
    options = ["--log-level", logging.getLevelName(root.getEffectiveLevel()).lower()]
    for handler in root.handlers:
        options += ["--log-format", "json" if isinstance(handler.formatter, JsonLines) else "text"]
        if isinstance(handler, logging.FileHandler):
            options += ["--log-file", f"{handler.baseFilename}.{name}"]
        if isinstance(handler, RotatingFileHandler):
            options += ["--log-size", str(handler.maxBytes)]
            options += ["--log-kept", str(handler.backupCount)]
    return options


def parse_logback(xml_text: str, name: str, properties: Mapping[str, str]) -> LogConfig:
    """Return the log configuration of a server from a logback.xml of RocketMQ.

    `name` is broker, namesrv or proxy. The level is that of the server's logger, such as
    `RocketmqBroker`, or else of the root logger. The file is that of the appender whose file name
    is `NAME.log`. What the text does not contain has its default. `properties` are the values of
    variables such as `user.home`.

    Raises ConfigurationError if the text is not XML, or if a variable has no value.
    """
    from xml.etree import ElementTree  # noqa: PLC0415 - with --log-config only

    try:
        tree = ElementTree.fromstring(xml_text)
    except ElementTree.ParseError as error:
        raise ConfigurationError(
            f"the log configuration is not XML: {error}.",
            fix="Correct the file, or remove --log-config.",
        ) from error

    variables = {"file.separator": "/", **properties}
    for element in tree.iter("property"):
        # A property may contain the variables of the properties before it.
        value = _expand_variables(element.get("value", ""), variables)
        variables[element.get("name", "")] = value

    config = LogConfig()
    level = _find_level(tree, name)
    if level in LEVELS:
        config = replace(config, level=level)
    for appender in tree.iter("appender"):
        path = _expand_variables(appender.findtext("file", "").strip(), variables)
        if Path(path).name == f"{name}.log":
            return _apply_appender(replace(config, path=path), appender)
    return config


def _find_level(tree: Any, name: str) -> str:
    """Return the level of the server's logger, or else of the root logger; "" without both.

    `tree` is the root element of logback.xml, and `name` the server. A level that Python does not
    have, such as trace, is replaced by the most similar one.
    """
    level_by_logger = {
        element.get("name", "root").lower(): element.get("level", "")
        for element in (*tree.iter("root"), *tree.iter("logger"))
    }
    level: str = level_by_logger.get(f"rocketmq{name}") or level_by_logger.get("root", "")
    return _LOGBACK_LEVELS.get(level.lower(), level.lower())


def _apply_appender(config: LogConfig, appender: Any) -> LogConfig:
    """Return a copy of `config` with the file size and the number of files of an appender.

    `appender` is an element of logback.xml. What it does not contain stays the same.
    """
    size_bytes = _parse_size(appender.findtext(".//maxFileSize", ""))
    if size_bytes:
        config = replace(config, bytes_max=size_bytes)
    file_count = appender.findtext(".//maxIndex", "").strip()
    if file_count.isdigit():
        config = replace(config, rotated_files=int(file_count))
    return config


def _expand_variables(template: str, variables: Mapping[str, str]) -> str:
    """Replace `${name}` and `${name:-default}` in a text, also in the values of variables.

    Raises ConfigurationError for a variable that has neither a value nor a default.
    """

    def find_value(match: re.Match[str]) -> str:
        """Return the value of the variable in a match, else its default."""
        name = match[1]
        default = match[2]
        if name in variables:
            return variables[name]
        if default is None:
            raise ConfigurationError(
                f"the log configuration contains {match[0]}, which has no value.",
                fix=f"Give it a default: ${{{name}:-value}}.",
            )
        return default

    # The value of a variable may contain variables, so replace until nothing changes.
    while (expanded := _VARIABLE.sub(find_value, template)) != template:
        template = expanded
    return template


def _parse_size_option(
    _context: click.Context, _option: click.Parameter, size: str | None
) -> int | None:
    """Return the number of bytes of a size such as "64MB"; click calls this. None stays None.

    Raises click.BadParameter for other texts.
    """
    if size is None:
        return None
    if not (size_bytes := _parse_size(size)):
        raise click.BadParameter("write 64MB, 1GB or a number of bytes.")
    return size_bytes


def _parse_size(size: str) -> int:
    """Return the bytes that a text such as "500MB" means; 0 if it is not a size."""
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        return 0
    unit = (match[2] or "").upper()
    return int(match[1]) * _UNITS[unit]


def log_options(name: str) -> Callable[[F], F]:
    """Return a decorator that adds options for the log to a command.

    The decorated command starts the log and then calls the function, without these options. They
    override the file of `--log-config`, which is a logback.xml; `name` is the server in it. If the
    function raises a SluiceError and the log is a file, the error is also logged.
    """

    def with_log(function: F) -> F:
        """Return the command with the log options."""

        @functools.wraps(function)
        def start(
            *arguments: Any,
            log_level: str | None,
            log_format: str,
            log_file: str | None,
            log_config: str | None,
            log_size: int | None,
            log_kept: int | None,
            **other_options: Any,
        ) -> Any:
            config = LogConfig() if log_config is None else _read_logback(log_config, name)
            options = {
                "level": log_level,
                "path": log_file,
                "bytes_max": log_size,
                "rotated_files": log_kept,
            }
            given_options: dict[str, Any] = {
                field: value for field, value in options.items() if value is not None
            }
            config = replace(config, form=log_format, **given_options)
            start_log(config)
            try:
                return function(*arguments, **other_options)
            except SluiceError as error:
                if config.path:  # the log file needs the error too, which `ending` prints to stderr
                    log.error("%s", error)
                raise

        for option in _OPTIONS:
            start = option(start)
        return start  # type: ignore[return-value]

    return with_log


def _read_logback(path: str, name: str) -> LogConfig:
    """Return the log configuration of the server `name` in the file logback.xml at `path`.

    Its variables are those of the environment and `user.home`.
    """
    variables = os.environ | {"user.home": str(Path.home())}
    return parse_logback(Path(path).read_text("utf-8"), name, variables)


_OPTIONS: Final = (
    click.option(
        "--log-config",
        type=click.Path(exists=True, dir_okay=False),
        help="File logback.xml of RocketMQ, from which the level and the log file are read.",
    ),
    click.option(
        "--log-kept",
        envvar="SLUICE_LOG_KEPT",
        type=click.IntRange(1),
        help="Number of full log files to keep as FILE.1, FILE.2 and so on. Default: 10.",
    ),
    click.option(
        "--log-size",
        envvar="SLUICE_LOG_SIZE",
        callback=_parse_size_option,
        metavar="SIZE",
        help="Size at which the log file is rotated, such as 64MB or 1GB. Default: 128MB.",
    ),
    click.option(
        "--log-file",
        envvar="SLUICE_LOG_FILE",
        type=click.Path(dir_okay=False),
        help="Log to this file instead of stderr. It is rotated when it is full.",
    ),
    click.option(
        "--log-format",
        envvar="SLUICE_LOG_FORMAT",
        type=click.Choice(FORMATS),
        default="text",
        show_default=True,
        help="Format of the log: lines of text, or one JSON object per line.",
    ),
    click.option(
        "--log-level",
        envvar="SLUICE_LOG_LEVEL",
        type=click.Choice(LEVELS),
        help="Lowest level that is logged. Default: info.",
    ),
)
