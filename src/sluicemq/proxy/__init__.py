"""The gRPC server of RocketMQ 5 (`apache.rocketmq.v2.MessagingService`) in front of brokers."""

from typing import TYPE_CHECKING, Any, Final

import orjson

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError
from sluicemq.wire.signature import format_call_date, sign_call

if TYPE_CHECKING:
    from sluicemq.client.core.names import Credentials

STATUS_METHOD: Final = "/sluicemq.Proxy/Status"
"""The path of SluiceMQ's own method: an empty request, and the proxy's status as JSON."""


def fetch_proxy_status(
    address: str, credentials: "Credentials | tuple[str, str] | None"
) -> dict[str, Any]:
    """Return the status of the proxy at `address`, a JSON object with its connections and clients.

    The call blocks. `credentials` sign it; None sends it unsigned. Raises ConfigurationError if the
    server is not a SluiceMQ proxy. Raises CallError if the call fails, and the errors of the
    connection.
    """
    from sluicemq.client.core.names import Credentials  # noqa: PLC0415 - keeps `--help` fast
    from sluicemq.net.grpc import CallError, StatusCode, call_unary  # noqa: PLC0415 - as above
    from sluicemq.net.tls import Tls  # noqa: PLC0415 - as above

    account = Credentials.from_value(credentials)
    now = format_call_date(SYSTEM_CLOCK.now_ms())
    metadata = sign_call(account.access_key, account.secret_key, now) if account else ()
    try:
        status_json = call_unary(address, STATUS_METHOD, b"", metadata, tls=Tls.resolve(None))
    except CallError as error:
        if error.code != StatusCode.UNIMPLEMENTED:
            raise
        raise ConfigurationError(
            f"{address} is not a SluiceMQ proxy: {error}",
            fix="Use the address of a proxy that `sluice up` started.",
        ) from error
    status: dict[str, Any] = orjson.loads(status_json)
    return status
