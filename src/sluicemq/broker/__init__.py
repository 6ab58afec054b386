"""The broker: a composition of store, filter and net behind RocketMQ's request codes."""
