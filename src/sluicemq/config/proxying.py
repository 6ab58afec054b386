"""The limits of a proxy for gRPC clients: the keys of RocketMQ's rmq-proxy.json that bound calls.

A proxy that stands alone has them among its settings (`ProxyConfig`); the proxy in a broker's
process takes them from the file of `--proxy-config`, else their defaults.
"""

from dataclasses import dataclass
from typing import Final

from sluicemq.config.keys import INT_MAX, setting

_HOUR_MS: Final = 3_600_000
BODY_BYTES_LARGEST: Final = 16 * 1024 * 1024 - 64 * 1024
"""The largest body that fits into a request with its properties: a request has at most 16 MiB."""


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ProxyLimits:
    """The limits within which one proxy serves its clients.

    Not slotted: a class of settings inherits from it beside another class that has slots.
    """

    invisible_ms_min: int = setting("minInvisibleTimeMillsForRecv", 10_000,
        "The shortest invisible time that a receive may ask for, in ms.")
    invisible_ms_max: int = setting("maxInvisibleTimeMills", 12 * _HOUR_MS,
        "The longest invisible time that a client may ask for, in ms; 0 or -1 is no limit.",
        minimum=-1)
    invisible_ms: int = setting("defaultInvisibleTimeMills", 60_000,
        "Invisible time of messages that the proxy renews for their client, in ms.",
        minimum=1000)
    renews: bool = setting("enableProxyAutoRenew", True,
        "Messages of clients that ask for it stay invisible while they work on them. `false`: the "
        "invisible time of the receive counts.")
    renew_ahead_ms: int = setting("renewAheadTimeMillis", 10_000,
        "Invisible times are renewed as many ms before their end.", minimum=1000)
    renew_ms_max: int = setting("renewMaxTimeMillis", 3 * _HOUR_MS,
        "A message is renewed for as many ms after its receive.", minimum=1000)
    renew_attempts_max: int = setting("maxRenewRetryTimes", 3,
        "Failed renewals in a row after which a message is not renewed again.", minimum=1)
    given_back_ms: int = setting("invisibleTimeMillisWhenClear", 1000,
        "What a client held when it left is visible again after as many ms.", minimum=1)
    poll_ms_min: int = setting("grpcClientConsumerMinLongPollingTimeoutMillis", 5000,
        "A receive waits at least as many ms for messages. A call whose deadline is nearer is "
        "refused.")
    poll_ms_max: int = setting("grpcClientConsumerMaxLongPollingTimeoutMillis", 20_000,
        "A receive waits at most as many ms for messages; at least "
        "grpcClientConsumerMinLongPollingTimeoutMillis.")
    batch_size: int = setting("grpcClientConsumerLongPollingBatchSize", 32,
        "Messages that consumers are told to ask for at once; a receive brings at most 32.",
        minimum=1)
    attempts_max: int = setting("grpcClientProducerMaxAttempts", 3,
        "Attempts of a send that producers are told to make.", minimum=1)
    backoff_ms_min: int = setting("grpcClientProducerBackoffInitialMillis", 10,
        "Producers are told to wait as many ms before their second attempt.")
    backoff_ms_max: int = setting("grpcClientProducerBackoffMaxMillis", 1000,
        "Producers are told to wait at most as many ms between two attempts.")
    backoff_multiplier: int = setting("grpcClientProducerBackoffMultiplier", 2,
        "Producers are told to multiply their wait by this after each attempt.", minimum=1)
    body_bytes_max: int = setting("maxMessageSize", 4 * 1024 * 1024,
        "Bytes of a message's body, unpacked; 0, -1 and what is more than 16711680 are taken as "
        "that. Brokers have a limit of their own.", minimum=-1)
    checks_body_empty: bool = setting("enableMessageBodyEmptyCheck", True,
        "Messages without a body are refused.")
    checks_type: bool = setting("enableTopicMessageTypeCheck", True,
        "Messages of another type than that of their topic are refused.")
    properties_max: int = setting("userPropertyMaxNum", 128,
        "Properties that a client may give a message.")
    properties_bytes_max: int = setting("maxUserPropertySize", 16 * 1024,
        "Bytes of these, with tag and keys; 0 or -1 is no limit.", minimum=-1)
    message_group_bytes_max: int = setting("maxMessageGroupSize", 64,
        "A message group has fewer bytes than this; 0 or -1 is no limit.", minimum=-1)
    delay_ms_max: int = setting("maxDelayTimeMills", 24 * _HOUR_MS,
        "The longest delay of a message, in ms; 0 or -1 is no limit. Brokers have a limit of their "
        "own.", minimum=-1)
    recovery_s_max: int = setting("maxTransactionRecoverySecond", 3600,
        "The longest time that a producer may set until its transaction is asked about, in s; 0 or "
        "-1 is no limit.", minimum=-1)
    date_s_max: int = setting("sluiceGrpcDateSeconds", 15 * 3600,
        "With access control: how far the date that a call signs may be from the proxy's clock, in "
        "s; 0 is no limit. The default has room for every time zone, as the clients for Java, Go, "
        "Python and C# sign their local time as if it were UTC. Where all of them run in UTC, "
        "write 300.")
    drain_s: int = setting("grpcShutdownTimeSeconds", 3,
        "A proxy that ends waits at most as many s for answers on their way. **Differs from "
        "RocketMQ, where the default is 30.**", maximum=3600)

# fmt: on

    @property
    def poll_ms_longest(self) -> int:
        """The longest wait of a receive in ms: the shortest one where the two keys contradict each
        other."""
        return max(self.poll_ms_min, self.poll_ms_max)

    @property
    def body_bytes_largest(self) -> int:
        """The bytes of the largest body that the proxy accepts."""
        return min(self.body_bytes_max, BODY_BYTES_LARGEST) if self.body_bytes_max > 0 else (
            BODY_BYTES_LARGEST
        )

    @property
    def invisible_ms_longest(self) -> int:
        """The longest invisible time in ms. Without a limit it is what a Java int holds."""
        return self.invisible_ms_max if self.invisible_ms_max > 0 else INT_MAX
