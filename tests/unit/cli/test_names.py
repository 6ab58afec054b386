"""RocketMQ's command names as thin scripts."""

import subprocess
from pathlib import Path

from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.cli.servers.names import NAMES


def test_the_names_are_installed_twice_but_never_over_what_is_not_ours(tmp_path: Path) -> None:
    for _ in range(2):
        result = CliRunner().invoke(main, ["install-names", str(tmp_path / "bin")])
        assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "bin").iterdir()} == set(NAMES)
    (tmp_path / "bin" / "mqbroker").write_text("#!/bin/sh\nexec java\n")
    result = CliRunner().invoke(main, ["install-names", str(tmp_path / "bin")])
    assert result.exit_code == 1
    assert "mqbroker exist" in result.output
    assert "--force" in result.output
    assert (tmp_path / "bin" / "mqbroker").read_text() == "#!/bin/sh\nexec java\n"


def test_a_name_knows_rocketmqs_flags(tmp_path: Path) -> None:
    CliRunner().invoke(main, ["install-names", str(tmp_path)])
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerName=b-7\n")
    told = subprocess.run(
        ["sh", str(tmp_path / "mqbroker"), "-c", str(conf), "-p"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "brokerName=b-7\n" in told.stdout
    nobody = subprocess.run(
        ["sh", str(tmp_path / "mqshutdown"), "proxy"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (nobody.returncode, nobody.stdout) == (255, "No mqproxy running.\n")


def test_an_error_of_a_name_is_one_sentence(tmp_path: Path) -> None:
    CliRunner().invoke(main, ["install-names", str(tmp_path)])
    told = subprocess.run(
        ["sh", str(tmp_path / "mqnamesrv"), "-p", "-c", str(tmp_path / "missing.conf")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 1
    assert "missing.conf cannot be read" in told.stderr
    assert "Traceback" not in told.stderr
