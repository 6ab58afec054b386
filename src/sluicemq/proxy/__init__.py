"""The gRPC side of RocketMQ 5: `apache.rocketmq.v2.MessagingService` before brokers."""

from typing import TYPE_CHECKING, Any, Final

import orjson

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError
from sluicemq.wire.signature import format_call_date, sign_call

if TYPE_CHECKING:
    from sluicemq.client.core.names import Credentials

STATUS: Final = "/sluicemq.Proxy/Status"
"""A method of ours, for `sluice proxy status`: no message in, JSON out."""


def proxy_status(
    address: str, credentials: "Credentials | tuple[str, str] | None"
) -> dict[str, Any]:
    """What a proxy does now; it blocks. Raises ConfigurationError for something that is none of
    ours, and what `net.grpc.ask` raises."""
    from sluicemq.client.core.names import Credentials  # noqa: PLC0415 - not for `--help`
    from sluicemq.net.grpc import CallError, StatusCode, call_unary  # noqa: PLC0415
    from sluicemq.net.tls import Tls  # noqa: PLC0415

    account, now = Credentials.from_value(credentials), format_call_date(SYSTEM_CLOCK.now_ms())
    metadata = sign_call(account.access_key, account.secret_key, now) if account else ()
    try:
        found: dict[str, Any] = orjson.loads(
            call_unary(address, STATUS, b"", metadata, tls=Tls.resolve(None))
        )
    except CallError as error:
        if error.code != StatusCode.UNIMPLEMENTED:
            raise
        raise ConfigurationError(
            f"{address} is no proxy of SluiceMQ: {error}", fix="Name one of `sluice up`."
        ) from error
    return found
