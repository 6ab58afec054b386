"""The client: one core without I/O, an asyncio shell and a blocking shell.

core/                decisions without I/O: routes, rebalancing, retries, in-flight messages, checks
admin/               the administrative operations of both shells
aio/                 Sluice, producer, consumers and administration for asyncio
sync/                producer, administration and bulk reading over blocking connections, without
                     threads or an event loop
threaded/            blocking consumers: the asyncio ones on an event loop and thread of their own
heartbeat_thread.py  the client id, and heartbeats on a thread of their own, so that a busy
                     application keeps its queues; stacks of all threads and tasks
affinity.py          the process and the event loop that a client belongs to
tasks.py             background tasks, calls of application code, cleanup in spite of cancellation
ledger.py            and idempotence.py: handlers whose effects in a database happen once
"""
