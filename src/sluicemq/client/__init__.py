"""The clients: one core without I/O, and shells that do the I/O.

core/                what a client decides, without I/O: routes, rebalancing, retries, messages in
                     flight, checks of arguments
admin/               the administrative operations, for both shells
aio/                 the asyncio shell: Sluice, its producers, consumers and administration
sync/                the blocking shell: producer, administration and bulk reading, without threads
                     or an event loop
threaded/            blocking consumers: asyncio consumers on an event loop in a thread of their own
heartbeat_thread.py  heartbeats on a thread of their own, so that a client whose event loop is busy
                     stays a member of its groups
affinity.py          the process and the event loop that a client belongs to
tasks.py             background tasks, calls of application code, cleanup in spite of cancellation
ledger.py            a table of processed message keys in the application's database
idempotence.py       handlers whose effects in that database happen once, with such a table
"""
