"""The pytest plugin: the fixture `sluicemq`, a cluster of its own for each test.

    async def test_orders_are_shipped(sluicemq):
        await sluicemq.send("orders", b"1")
        await sluicemq.clock.advance(hours=5)

    @pytest.mark.sluicemq(tcp=True, settings={"autoCreateTopicEnable": "false"})
    async def test_that_needs_other_settings(sluicemq): ...

The marker's arguments are those of `embedded`; without `clock` it is a new `VirtualClock`
(`clock=None`: real time). Needs pytest-asyncio, in either of its modes. Everything else is imported
when a test asks for the fixture: this module is loaded in every run of pytest.
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
    """Declares the marker."""
    config.addinivalue_line(
        "markers", "sluicemq(**options): how the fixture `sluicemq` calls embedded()"
    )


if _asyncio is None:

    @pytest.fixture
    def sluicemq() -> None:
        """Says what is missing."""
        pytest.fail("the fixture sluicemq needs pytest-asyncio: pip install pytest-asyncio")

else:

    @_asyncio.fixture  # type: ignore[untyped-decorator, unused-ignore]
    async def sluicemq(request: pytest.FixtureRequest) -> "AsyncIterator[EmbeddedSluice]":
        """A client of a name server and a broker inside this test, on virtual time."""
        from sluicemq.testing.embedded import embedded  # noqa: PLC0415
        from sluicemq.testing.virtual import VirtualClock  # noqa: PLC0415

        marker = request.node.get_closest_marker("sluicemq")
        options = {"clock": VirtualClock()} | (marker.kwargs if marker else {})
        async with embedded(**options) as mq:
            yield mq
