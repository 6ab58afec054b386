"""Test what `sluice quickstart` writes and refuses. tests/integration runs the projects."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sluicemq import __version__
from sluicemq.cli import main
from sluicemq.cli.quickstart import KINDS, TEMPLATES, requirement_line


def quickstart(*words: str) -> Result:
    return CliRunner().invoke(main, ["quickstart", *words])


def test_each_template_is_a_kind_and_is_listed() -> None:
    assert set(KINDS) == {path.name for path in TEMPLATES.iterdir() if path.is_dir()}
    told = quickstart()
    assert told.exit_code == 0
    for kind in KINDS:
        assert f"\n  {kind} " in told.output


def test_a_wrong_kind_suggests_a_similar_one_or_lists_all() -> None:
    near, far = quickstart("mesages"), quickstart("kubernetes")
    assert (near.exit_code, far.exit_code) == (2, 2)
    assert "'mesages' is not a kind of project. Did you mean 'messages'?" in near.output
    assert all(kind in far.output for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_created_and_its_commands_are_printed(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "my shop"
    told = quickstart(kind, str(directory))
    assert told.exit_code == 0, told.output
    assert {path.name for path in directory.iterdir()} == {
        path.name for path in (TEMPLATES / kind).iterdir() if path.name != "__pycache__"
    }
    assert f"cd '{directory}'" in told.output
    commands = (directory / "README.md").read_text("utf-8").split("```")[1].split("\n")
    assert all(command in told.output for command in commands)
    required = (directory / "requirements.txt").read_text("utf-8").splitlines()
    extras = "server,spark" if kind == "spark" else "server"
    assert requirement_line(f"sluicemq[{extras}]") in required


def test_only_a_new_or_empty_folder_is_written_to(
    tmp_path: Path,
) -> None:
    assert quickstart("messages", str(tmp_path)).exit_code == 0
    (tmp_path / "produce.py").write_text("mine")
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        told = quickstart("messages", str(taken))
        assert told.exit_code == 1
        assert "exists and is not an empty folder" in told.output
        assert "Name a new or an empty one." in told.output
    assert (tmp_path / "produce.py").read_text() == "mine"


def test_a_folder_that_cannot_be_created_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = quickstart("messages", str(tmp_path / "file" / "shop"))
    assert told.exit_code == 1
    assert "cannot be written: Not a directory." in told.output


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({"url": "file:///srv/sluicemq", "dir_info": {}}, "x[y] @ file:///srv/sluicemq"),
        (
            {"url": "file:///tmp/sluicemq-1-py3-none-any.whl", "archive_info": {}},
            "x[y] @ file:///tmp/sluicemq-1-py3-none-any.whl",
        ),
        (
            {"url": "ssh://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "x[y] @ git+ssh://host/r.git@c0ffee",
        ),
        (
            {"url": "file:///srv/all", "dir_info": {}, "subdirectory": "mq"},
            "x[y] @ file:///srv/all#subdirectory=mq",
        ),
    ],
)
def test_requirements_name_the_source_of_the_package(origin: dict[str, object], line: str) -> None:
    assert requirement_line("x[y]", json.dumps(origin)) == line


def test_a_package_from_an_index_is_required_by_version() -> None:
    assert requirement_line("sluicemq[server]", "") == f"sluicemq[server]=={__version__}"
