"""The fixture `sluicemq` as a user's tests have it, and the page that describes it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import limit

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_FIXTURE = ("-p", "sluicemq.testing.plugin", "-p", "no:randomly", "-p", "no:cacheprovider")


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_user=source)
        loaded = () if has_entry_point() else WITH_FIXTURE[:2]
        return pytester.runpytest_subprocess(
            *loaded, *WITH_FIXTURE[2:], *options, timeout=limit(60)
        )

    return run


def has_entry_point() -> bool:
    """Is the package installed, so that pytest finds the plugin by itself?"""
    from importlib.metadata import entry_points

    return any(point.value == "sluicemq.testing.plugin" for point in entry_points(group="pytest11"))


def test_the_examples_of_the_page_about_testing_pass(run, pytester: pytest.Pytester) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "testing.md").read_text(encoding="utf-8"))
    (service,) = (block for block in blocks if block.startswith("# shop.py\n"))
    blocks.remove(service)
    pytester.makepyfile(shop=service)
    source = "\n\n".join(blocks)
    run(source).assert_outcomes(passed=source.count("async def test_"))
    assert source.count("async def test_") >= 6


def test_the_fixture_works_in_the_strict_mode_of_pytest_asyncio_too(run) -> None:
    source = """
        import pytest

        @pytest.mark.asyncio
        async def test_it(sluicemq):
            await sluicemq.send("t", b"1", delay_level=18)
            await sluicemq.clock.advance(hours=2)
            async for message in sluicemq.subscribe("t", group="g"):
                assert message.body == b"1"
                break
    """
    run(source, "-o", "asyncio_mode=strict").assert_outcomes(passed=1)
    run(source, "-o", "asyncio_mode=auto").assert_outcomes(passed=1)


def test_each_test_has_a_cluster_of_its_own(run) -> None:
    source = """
        import pytest

        @pytest.mark.parametrize("number", range(3))
        async def test_it(sluicemq, number):
            await sluicemq.send("t", b"%d" % number)
            stream = sluicemq.subscribe("t", group="g")
            got = await stream.receive_many(10, timeout_s=60)
            assert [message.body for message in got] == [b"%d" % number]
            await stream.close()
    """
    run(source, "-o", "asyncio_mode=auto").assert_outcomes(passed=3)


def test_the_marker_says_how_the_cluster_is(run) -> None:
    source = """
        import pytest
        from sluicemq.errors import ConfigurationError
        from sluicemq.net.network import SOCKET_NETWORK

        @pytest.mark.sluicemq(clock=None, tcp=True, settings={"brokerClusterName": "mine"})
        async def test_it(sluicemq):
            assert sluicemq.servers.network is SOCKET_NETWORK
            assert sluicemq.servers.broker.settings.broker.cluster_name == "mine"
            with pytest.raises(ConfigurationError, match="real time"):
                sluicemq.clock
            await sluicemq.send("t", b"1")
    """
    run(source, "-o", "asyncio_mode=auto", "--strict-markers").assert_outcomes(passed=1)


def test_without_pytest_asyncio_the_fixture_says_what_is_missing(run) -> None:
    source = """
        import pytest

        def test_it(sluicemq):
            raise AssertionError("never called")
    """
    # A module that is None in sys.modules cannot be imported: as if it were not installed.
    hidden = "import sys; sys.modules['pytest_asyncio'] = None\n"
    plugin = (ROOT / "src/sluicemq/testing/plugin.py").read_text(encoding="utf-8")
    Path("plugin_without_asyncio.py").write_text(hidden + plugin, encoding="utf-8")
    Path("test_user.py").write_text(source.replace("\n        ", "\n"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:asyncio", "-p", "plugin_without_asyncio",
         "-p", "no:randomly", "test_user.py"],
        capture_output=True, text=True, timeout=limit(60), check=False,
    )  # fmt: skip
    assert "pip install pytest-asyncio" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize("module", ["sluicemq.testing", "sluicemq.testing.embedded"])
def test_the_cluster_needs_no_pytest(module: str) -> None:
    script = f"import sys; sys.modules['pytest'] = None; import {module}"
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=limit(60),
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def test_loading_the_plugin_costs_next_to_nothing() -> None:
    """It is loaded in every run of pytest on a machine that has SluiceMQ."""
    script = (
        "import sys, sluicemq.testing.plugin as _; "
        "print([name for name in sys.modules if name.startswith('sluicemq.broker')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True,
        timeout=limit(60), env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
