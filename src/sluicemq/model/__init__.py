"""The values that all packages share: messages, topics, groups, queues, routes, ids, subscriptions.

Values are immutable, and nothing here does I/O. Python names are the usual terms of messaging
systems. How RocketMQ spells them on the wire is in `wire`.
"""
