"""The gRPC side of RocketMQ 5: `apache.rocketmq.v2.MessagingService` before brokers."""

from typing import Final

STATUS: Final = "/sluicemq.Proxy/Status"
"""A method of ours, for `sluice proxy status`: no message in, JSON out."""
