"""The limits of the gRPC proxy: the keys of RocketMQ's rmq-proxy.json that limit calls.

They are among the settings of a separate proxy (`ProxyConfig`). A proxy in the process of a broker
reads them from the file of `--proxy-config`, or uses the defaults.
"""

from dataclasses import dataclass
from typing import Final

from sluicemq.config.keys import INT_MAX, setting

_HOUR_MS: Final = 3_600_000
BODY_BYTES_LARGEST: Final = 16 * 1024 * 1024 - 64 * 1024
"""The largest body that fits into a request of 16 MiB, the maximum, together with properties."""


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ProxyLimits:
    """The limits within which one proxy serves its clients.

    It has no slots, because `ProxyConfig` also inherits from a class that has slots.
    """

    invisible_ms_min: int = setting("minInvisibleTimeMillsForRecv", 10_000,
        "Minimum invisible time that a receive may request, in ms.")
    invisible_ms_max: int = setting("maxInvisibleTimeMills", 12 * _HOUR_MS,
        "Maximum invisible time that a client may request, in ms. 0 or -1 means no limit.",
        minimum=-1)
    invisible_ms: int = setting("defaultInvisibleTimeMills", 60_000,
        "Invisible time of messages that the proxy renews for their client, in ms.",
        minimum=1000)
    renews: bool = setting("enableProxyAutoRenew", True,
        "The proxy renews the invisible time of messages while clients that request it process "
        "them. If false, the invisible time of the receive applies.")
    renew_ahead_ms: int = setting("renewAheadTimeMillis", 10_000,
        "Invisible times are renewed this long before their end, in ms.", minimum=1000)
    renew_ms_max: int = setting("renewMaxTimeMillis", 3 * _HOUR_MS,
        "Time after its receive until which a message is renewed, in ms.", minimum=1000)
    renew_attempts_max: int = setting("maxRenewRetryTimes", 3,
        "Number of consecutive failed renewals after which a message is not renewed again.",
        minimum=1)
    given_back_ms: int = setting("invisibleTimeMillisWhenClear", 1000,
        "Time after which the messages of a client that has left become visible again, in ms.",
        minimum=1)
    poll_ms_min: int = setting("grpcClientConsumerMinLongPollingTimeoutMillis", 5000,
        "Minimum time that a receive waits for messages, in ms. A call with a nearer deadline is "
        "refused.")
    poll_ms_max: int = setting("grpcClientConsumerMaxLongPollingTimeoutMillis", 20_000,
        "Maximum time that a receive waits for messages, in ms. It is at least "
        "grpcClientConsumerMinLongPollingTimeoutMillis.")
    batch_size: int = setting("grpcClientConsumerLongPollingBatchSize", 32,
        "Number of messages that consumers are told to request at once. A receive returns at most "
        "32.",
        minimum=1)
    attempts_max: int = setting("grpcClientProducerMaxAttempts", 3,
        "Number of attempts per send that producers are told to make.", minimum=1)
    backoff_ms_min: int = setting("grpcClientProducerBackoffInitialMillis", 10,
        "Pause before the second attempt that producers are told to make, in ms.")
    backoff_ms_max: int = setting("grpcClientProducerBackoffMaxMillis", 1000,
        "Maximum pause between two attempts that producers are told to make, in ms.")
    backoff_multiplier: int = setting("grpcClientProducerBackoffMultiplier", 2,
        "Factor by which producers are told to multiply the pause after each attempt.", minimum=1)
    body_bytes_max: int = setting("maxMessageSize", 4 * 1024 * 1024,
        "Maximum size of the decompressed body of a message, in bytes. 0, -1 and values above "
        "16711680 mean 16711680. Brokers have a limit of their own.", minimum=-1)
    checks_body_empty: bool = setting("enableMessageBodyEmptyCheck", True,
        "Messages without a body are refused.")
    checks_type: bool = setting("enableTopicMessageTypeCheck", True,
        "Messages are refused if their type differs from the type of their topic.")
    properties_max: int = setting("userPropertyMaxNum", 128,
        "Maximum number of properties that a client may give a message.")
    properties_bytes_max: int = setting("maxUserPropertySize", 16 * 1024,
        "Maximum size of the properties, tag and keys of a message, in bytes. 0 or -1 means no "
        "limit.", minimum=-1)
    message_group_bytes_max: int = setting("maxMessageGroupSize", 64,
        "A message group must have fewer bytes than this. 0 or -1 means no limit.", minimum=-1)
    delay_ms_max: int = setting("maxDelayTimeMills", 24 * _HOUR_MS,
        "Maximum delay of a message, in ms. 0 or -1 means no limit. Brokers have a limit of their "
        "own.", minimum=-1)
    recovery_s_max: int = setting("maxTransactionRecoverySecond", 3600,
        "Maximum time that a producer may set until its transaction is checked, in seconds. 0 or "
        "-1 means no limit.", minimum=-1)
    date_s_max: int = setting("sluiceGrpcDateSeconds", 15 * 3600,
        "With access control: maximum difference between the date that a call signs and the clock "
        "of the proxy, in seconds. 0 means no limit. The default covers every time zone, because "
        "the clients for Java, Go, Python and C# sign their local time as if it were UTC. If all "
        "of them run in UTC, set it to 300.")
    drain_s: int = setting("grpcShutdownTimeSeconds", 3,
        "Maximum time that a proxy waits for responses in progress when it ends, in seconds. "
        "**Differs from RocketMQ, where the default is 30.**", maximum=3600)

# fmt: on

    @property
    def poll_ms_longest(self) -> int:
        """The longest wait of a receive in ms. It is never less than the shortest wait."""
        return max(self.poll_ms_min, self.poll_ms_max)

    @property
    def body_bytes_largest(self) -> int:
        """The size in bytes of the largest body that the proxy accepts."""
        return min(self.body_bytes_max, BODY_BYTES_LARGEST) if self.body_bytes_max > 0 else (
            BODY_BYTES_LARGEST
        )

    @property
    def invisible_ms_longest(self) -> int:
        """The longest invisible time in ms. Without a limit it is the largest `int` of Java."""
        return self.invisible_ms_max if self.invisible_ms_max > 0 else INT_MAX
