"""`sluice quickstart KIND DIRECTORY`: a project that runs, to begin with.

A kind is a folder of `templates`, which is the project as it will be. One file is completed:
`requirements.txt` names the extras, and `pip` has to be told where this SluiceMQ was installed from
as long as no index has it (`direct_url.json`, PEP 610). The title of its README is the kind's line
in the list of kinds, and the README's first block the commands that are shown at the end.
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
    """Write a project of KIND into DIRECTORY, a new or empty one (default: named as KIND).

    KIND is messages, transactions, spark or tests; without it the kinds are explained.
    """
    if kind is None:
        click.echo(
            f"sluice quickstart KIND DIRECTORY writes a project that runs. Kinds:\n{_kinds()}"
        )
        return
    if kind not in KINDS:
        fix = did_you_mean(kind, KINDS) or f"There are:\n{_kinds()}"
        raise click.BadParameter(f"{kind!r} is no kind of project. {fix}")
    directory = directory or Path(kind)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(
            f"{directory} is there and not an empty folder; nothing is written over.",
            fix="Name a new or an empty one.",
        )
    try:
        written = write_project(kind, directory)
    except OSError as error:
        raise ConfigurationError(
            f"{directory} cannot be written: {error.strerror}.", fix="Name another folder."
        ) from None
    click.echo(f"{', '.join(written)} in {directory}. Next:\n")
    for command in (f"cd {shlex.quote(str(directory))}", *commands(kind)):
        click.echo(f"    {command}")


def write_project(kind: str, directory: Path) -> list[str]:
    """Names of the files. Raises OSError."""
    # Without modes and times: where the package lies may be nobody's to write.
    shutil.copytree(
        TEMPLATES / kind, directory, dirs_exist_ok=True, copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    path = directory / "requirements.txt"
    path.write_text(
        re.sub(r"(?m)^sluicemq\S*", lambda found: requirement(found[0]), path.read_text("utf-8")),
        "utf-8",
    )
    return sorted(found.name for found in directory.iterdir())


def commands(kind: str) -> list[str]:
    """The commands of the README's first block."""
    found = _COMMANDS.search((TEMPLATES / kind / "README.md").read_text("utf-8"))
    assert found is not None
    return found[1].splitlines()


def requirement(name: str, origin: str | None = None) -> str:
    """A line for pip that installs `name` (with its extras) from where this package came from.

    `origin`: what direct_url.json says; None: what it says here. A package of an index has none:
    then its version is the line.
    """
    if origin is None:
        try:
            origin = Distribution.from_name("sluicemq").read_text("direct_url.json")
        except PackageNotFoundError:  # run from a folder on the path
            origin = None
    if not origin:
        return f"{name}=={__version__}"
    found = json.loads(origin)
    source = found.get("vcs_info")
    url = f"{source['vcs']}+{found['url']}@{source['commit_id']}" if source else found["url"]
    folder = found.get("subdirectory")
    return f"{name} @ {url}" + (f"#subdirectory={folder}" if folder else "")


def _kinds() -> str:
    width = max(map(len, KINDS))
    lines = []
    for kind in KINDS:
        title = _TITLE.search((TEMPLATES / kind / "README.md").read_text("utf-8"))
        assert title is not None
        lines.append(f"  {kind:{width}}  {title[1]}")
    return "\n".join(lines)
