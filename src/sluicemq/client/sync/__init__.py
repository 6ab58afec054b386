"""The blocking client: producer, administration and bulk reads, without an event loop.

Blocking consumers are in `sluicemq.client.threaded`, because they work in the background.
"""
