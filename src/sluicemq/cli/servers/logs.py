"""What servers log, where and in which form: options of every serving command.

Without `--log-file` a server logs to stderr and writes no file unasked. With it, the file is
replaced when it is full (`FILE.1` … `FILE.10`, the oldest goes), so that no disk fills up. Text is
for people; `json` is one object a line, for collectors. RocketMQ's habit is a `logback.xml`
(`rmq.broker.logback.xml` and so on): `--log-config` reads of it what is asked of it most, the level
and the file with its size and count; everything else in it is without effect.

Only the names that `sluice install-names` makes log to `~/logs/rocketmqlogs` by themselves.
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
FILES_KEPT: Final = 10
_VARIABLE: Final = re.compile(r"\$\{([^}:]*)(?::-([^}]*))?\}")
_SIZE: Final = re.compile(r"([0-9]+) *(KB|MB|GB)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where a server's log goes. `path` "": to stderr."""

    level: str = "info"
    form: str = "text"
    path: str = ""
    bytes_max: int = FILE_BYTES_MAX
    kept: int = FILES_KEPT


def start_log(config: LogConfig) -> None:
    """Log from now on as `config` says. Raises ConfigurationError for a file that cannot be
    written."""
    handler: logging.Handler
    if config.path:
        from logging.handlers import RotatingFileHandler  # noqa: PLC0415 - `sluice up` starts fast

        try:
            Path(config.path).parent.mkdir(parents=True, exist_ok=True)
            handler = RotatingFileHandler(
                config.path, maxBytes=config.bytes_max, backupCount=config.kept, encoding="utf-8"
            )
        except OSError as error:
            raise ConfigurationError(
                f"the log cannot be written to {config.path}: {error.strerror}.",
                fix="Name another file with --log-file, or give this user the right to write it.",
            ) from error
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.form == "json" else TextLines())
    handler.addFilter(LogRateLimit())
    logging.basicConfig(level=config.level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request


def log_options_of(name: str) -> list[str]:
    """The options for a process below this one to log as it does; a file has one writer."""
    from logging.handlers import RotatingFileHandler  # noqa: PLC0415 - not for one process

    found = ["--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()]
    for handler in logging.getLogger().handlers:
        found += ["--log-format", "json" if isinstance(handler.formatter, JsonLines) else "text"]
        if isinstance(handler, logging.FileHandler):
            found += ["--log-file", f"{handler.baseFilename}.{name}"]
        if isinstance(handler, RotatingFileHandler):
            found += ["--log-size", str(handler.maxBytes), "--log-kept", str(handler.backupCount)]
    return found


def of_logback(text: str, name: str, properties: Mapping[str, str]) -> LogConfig:
    """What RocketMQ's logback.xml says of the server `name` (broker, namesrv, proxy): the level of
    its logger (`RocketmqBroker`), else of the root; the file `NAME.log` of its appenders.

    `properties`: what variables stand for (`user.home` …). Raises ConfigurationError for text that
    is no XML, and for a variable that nothing gives a value to.
    """
    from xml.etree import ElementTree  # noqa: PLC0415 - rarely asked for

    try:
        tree = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigurationError(
            f"the log's configuration is no XML: {error}.", fix="Mend it, or leave it out."
        ) from error
    known = {"file.separator": "/", **properties}
    for one in tree.iter("property"):
        known[one.get("name", "")] = _resolved(one.get("value", ""), known)
    config = LogConfig()
    levels = {one.get("name", "root").lower(): one.get("level", "")
              for one in (*tree.iter("root"), *tree.iter("logger"))}  # fmt: skip
    level = (levels.get(f"rocketmq{name}") or levels.get("root") or config.level).lower()
    level = {"trace": "debug", "warn": "warning", "all": "debug", "off": "error"}.get(level, level)
    if level in LEVELS:
        config = replace(config, level=level)
    for appender in tree.iter("appender"):
        path = _resolved(appender.findtext("file", "").strip(), known)
        if Path(path).name != f"{name}.log":
            continue
        size = _bytes_of(appender.findtext(".//maxFileSize", ""))
        kept = appender.findtext(".//maxIndex", "").strip()
        return replace(
            config,
            path=path,
            bytes_max=size or config.bytes_max,
            kept=int(kept) if kept.isdigit() else config.kept,
        )
    return config


def _resolved(text: str, known: Mapping[str, str]) -> str:
    """With its variables replaced."""

    def value(found: re.Match[str]) -> str:
        if found[1] in known:
            return known[found[1]]
        if found[2] is None:
            raise ConfigurationError(
                f"the log's configuration names {found[0]}, which has no value.",
                fix=f"Give it one: ${{{found[1]}:-value}}.",
            )
        return found[2]

    while (replaced := _VARIABLE.sub(value, text)) != text:
        text = replaced
    return text


def _size(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    if not (size := _bytes_of(text)):
        raise click.BadParameter("write 64MB, 1GB or a number of bytes.")
    return size


def _bytes_of(text: str) -> int:
    """`500MB`; 0 for a text that is none."""
    found = _SIZE.fullmatch(text.strip())
    return int(found[1]) * _UNITS[(found[2] or "").upper()] if found else 0


def log_options(name: str) -> Callable[[F], F]:
    """The options of a server's log, which starts before the command runs."""

    def with_log(function: F) -> F:
        @functools.wraps(function)
        def start(
            *arguments: Any,
            log_level: str | None,
            log_format: str,
            log_file: str | None,
            log_config: str | None,
            log_size: int | None,
            log_kept: int | None,
            **named: Any,
        ) -> Any:
            config = LogConfig()
            if log_config is not None:
                home = os.environ | {"user.home": str(Path.home())}
                config = of_logback(Path(log_config).read_text("utf-8"), name, home)
            said = {
                "level": log_level, "path": log_file, "bytes_max": log_size, "kept": log_kept,
            }  # fmt: skip
            given: dict[str, Any] = {
                name: value for name, value in said.items() if value is not None
            }
            config = replace(config, form=log_format, **given)
            start_log(config)
            try:
                return function(*arguments, **named)
            except SluiceError as error:
                if config.path:  # stderr has it too
                    log.error("%s", error)
                raise

        for option in _OPTIONS:
            start = option(start)
        return start  # type: ignore[return-value]

    return with_log


_OPTIONS: Final = (
    click.option(
        "--log-config", type=click.Path(exists=True, dir_okay=False),
        help="RocketMQ's logback.xml: level and file are read from it.",
    ),
    click.option(
        "--log-kept", envvar="SLUICE_LOG_KEPT", type=click.IntRange(1),
        help="So many full files are kept beside it (10).",
    ),
    click.option(
        "--log-size", envvar="SLUICE_LOG_SIZE", callback=_size, metavar="SIZE",
        help="When the file is full: 64MB, 1GB (128MB).",
    ),
    click.option(
        "--log-file", envvar="SLUICE_LOG_FILE", type=click.Path(dir_okay=False),
        help="Log to this file instead of stderr; it is replaced when it is full.",
    ),
    click.option(
        "--log-format", envvar="SLUICE_LOG_FORMAT", type=click.Choice(FORMATS), default="text",
        show_default=True, help="Lines for people, or a JSON object each.",
    ),
    click.option(
        "--log-level", envvar="SLUICE_LOG_LEVEL", type=click.Choice(LEVELS),
        help="What is logged (info).",
    ),
)  # fmt: skip
