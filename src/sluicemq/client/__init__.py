"""The client: one pure core, an asyncio shell and a blocking shell.

core/       decisions without I/O: routes, balance, retries, in-flight offsets, checks
aio/        Sluice, producer, consumers, administration for asyncio
sync/       producer, administration, bulk reading over blocking connections: no thread, no loop
threaded/   blocking consumers: the asyncio ones on a loop and thread of their own
keeper.py   who a client is, and its heartbeats on a thread of their own, so that a busy program
            keeps its queues; stacks
ledger.py   and idempotence.py: handlers whose effects in a database happen once
"""
