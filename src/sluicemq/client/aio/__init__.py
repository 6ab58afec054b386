"""The asyncio shell of the client.

sluice.py           the object that an application creates; it makes everything else
producer.py         sending, transactions, request-reply; the writer of trace records
consumer.py         a stream of messages, and a consumer that calls a handler
pull.py             consumers that the application asks for messages
received.py         a received message
cluster.py          connections to servers, and administration

memberships.py      the consumer groups of a client
members.py          one group: heartbeats, rebalances, subscriptions
readers.py          the readers of a group and the commits of their offsets
queue_reader.py     the reader of one queue: pulls, acknowledgements, rejected messages
repositioning.py    how a reader is moved to another offset
ordered.py          queue locks, and readers that consume in order
prefetch.py         buffers between readers and consumers
offsets.py          committed offsets, at brokers or in files
broker_requests.py  answers to the requests that brokers send to clients
"""
