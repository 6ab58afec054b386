"""The pytest plugin with the fixture `sluicemq`: a cluster for each test.

    async def test_orders_are_shipped(sluicemq):
        await sluicemq.send("orders", b"1")
        await sluicemq.clock.advance(hours=5)

    @pytest.mark.sluicemq(tcp=True, settings={"autoCreateTopicEnable": "false"})
    async def test_that_needs_other_settings(sluicemq): ...

The arguments of the marker are those of `embedded`. Without `clock`, the cluster has a new
`VirtualClock`; with `clock=None`, it runs in real time. The fixture needs pytest-asyncio, in either
of its modes.

Every run of pytest loads this module. So everything else is imported when a test uses the fixture.
"""

import importlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

try:
    _asyncio: Any = importlib.import_module("pytest_asyncio")
except ImportError:
    _asyncio = None

if TYPE_CHECKING:
    from sluicemq.testing.embedded import EmbeddedSluice


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `sluicemq`."""
    config.addinivalue_line(
        "markers", "sluicemq(**options): the arguments with which the fixture calls embedded()"
    )


if _asyncio is None:

    @pytest.fixture
    def sluicemq() -> None:
        """Fail the test, because pytest-asyncio is missing."""
        pytest.fail("the fixture sluicemq needs pytest-asyncio: pip install pytest-asyncio")

else:

    @_asyncio.fixture  # type: ignore[untyped-decorator, unused-ignore]
    async def sluicemq(request: pytest.FixtureRequest) -> "AsyncIterator[EmbeddedSluice]":
        """Yield a client of a cluster that runs inside the test, by default on virtual time."""
        from sluicemq.testing.embedded import embedded  # noqa: PLC0415 - see the module
        from sluicemq.testing.virtual import VirtualClock  # noqa: PLC0415 - see the module

        marker = request.node.get_closest_marker("sluicemq")
        options = {"clock": VirtualClock()} | (marker.kwargs if marker else {})
        async with embedded(**options) as mq:
            yield mq
