"""`sluice quickstart KIND DIRECTORY`: create an example project.

A kind is a folder of `templates`, which is copied as it is, except for `requirements.txt`: its
lines name the extras of SluiceMQ, and are completed with the source from which this SluiceMQ was
installed (`direct_url.json`, PEP 610), because no package index may have it.

The README of a kind has two uses here: its title is the description in the list of kinds, and its
first code block contains the commands that are printed as next steps.
"""

import json
import re
import shlex
import shutil
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Final

import click

from sluicemq import __version__
from sluicemq.errors import ConfigurationError
from sluicemq.hints import did_you_mean

TEMPLATES: Final = Path(__file__).with_name("templates")
KINDS: Final = ("messages", "transactions", "spark", "tests")
_TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)
_COMMANDS: Final = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


@click.command()
@click.argument("kind", required=False)
@click.argument("directory", type=click.Path(path_type=Path), required=False)
def quickstart(kind: str | None, directory: Path | None) -> None:
    """Create an example project of KIND in DIRECTORY, which must be new or empty.

    KIND is messages, transactions, spark or tests. Without it, list the kinds. The default of
    DIRECTORY is the name of KIND.
    """
    if kind is None:
        click.echo(
            "sluice quickstart KIND DIRECTORY creates an example project. Kinds:\n"
            f"{_describe_kinds()}"
        )
        return
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"Choose one of:\n{_describe_kinds()}"
        raise click.BadParameter(f"{kind!r} is not a kind of project. {hint}")

    directory = directory or Path(kind)
    _require_empty(directory)
    try:
        file_names = write_project(kind, directory)
    except OSError as error:
        raise ConfigurationError(
            f"{directory} cannot be written: {error.strerror}.", fix="Name another folder."
        ) from None
    click.echo(f"Created {', '.join(file_names)} in {directory}. Next:\n")
    for command in (f"cd {shlex.quote(str(directory))}", *readme_commands(kind)):
        click.echo(f"    {command}")


def _require_empty(directory: Path) -> None:
    """Raise ConfigurationError if a directory exists and contains something, or is a file."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(
            f"{directory} exists and is not an empty folder. Nothing was written.",
            fix="Name a new or an empty one.",
        )


def write_project(kind: str, directory: Path) -> list[str]:
    """Copy the template of a kind of project to a directory, and return the sorted names in it.

    In requirements.txt, a line that begins with `sluicemq` is replaced by the result of
    `requirement_line`, so that pip finds the package. Existing files are overwritten. Raises
    OSError.
    """
    # `copyfile` copies no modes: the installed templates may be read-only.
    shutil.copytree(
        TEMPLATES / kind,
        directory,
        dirs_exist_ok=True,
        copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    requirements_path = directory / "requirements.txt"
    requirements = re.sub(
        r"(?m)^sluicemq\S*",
        lambda match: requirement_line(match[0]),
        requirements_path.read_text("utf-8"),
    )
    requirements_path.write_text(requirements, "utf-8")
    return sorted(path.name for path in directory.iterdir())


def readme_commands(kind: str) -> list[str]:
    """Return the lines of the first code block in the README of a kind.

    They are the commands that the user runs next.
    """
    code_block = _COMMANDS.search((TEMPLATES / kind / "README.md").read_text("utf-8"))
    assert code_block is not None
    return code_block[1].splitlines()


def requirement_line(name: str, origin: str | None = None) -> str:
    """Return a line for pip that installs `name` from where this package was installed.

    `name` is "sluicemq", possibly with extras, such as "sluicemq[spark]". `origin` is the content
    of the package's direct_url.json, which pip writes for a URL or folder. None means to read it;
    "" means a package index. The result is `NAME @ URL`, or `NAME==VERSION` without an origin.
    """
    if origin is None:
        try:
            origin = Distribution.from_name("sluicemq").read_text("direct_url.json")
        except PackageNotFoundError:  # run from a folder on the path
            origin = None
    if not origin:
        return f"{name}=={__version__}"
    direct_url = json.loads(origin)
    url = direct_url["url"]
    if vcs := direct_url.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if folder := direct_url.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f"{name} @ {url}"


def _describe_kinds() -> str:
    """Return one line for each kind: its name and the title of its README."""
    width = max(map(len, KINDS))
    lines = []
    for kind in KINDS:
        title = _TITLE.search((TEMPLATES / kind / "README.md").read_text("utf-8"))
        assert title is not None
        lines.append(f"  {kind:{width}}  {title[1]}")
    return "\n".join(lines)
