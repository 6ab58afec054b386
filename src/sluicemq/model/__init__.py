"""Frozen values that every part speaks of: message, queue, topic, group, subscription, route, ids.

No behaviour beyond what follows from the values; no I/O. RocketMQ's own spellings live in
`wire`, these are the field's standard terms.
"""
