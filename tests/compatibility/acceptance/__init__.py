"""RocketMQ's own test suites before our servers: `make acceptance`."""
