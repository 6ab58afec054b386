"""The gRPC side of RocketMQ 5: `apache.rocketmq.v2.MessagingService` before brokers."""
