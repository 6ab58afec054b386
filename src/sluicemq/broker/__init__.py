"""The broker: keeps messages, hands them out, knows who consumes what.

    state       topics.py groups.py offsets.py clients.py locks.py longpoll.py documents.py
    families    send.py pull.py heartbeat.py queries.py metadata.py admin.py
    turns       outcomes.py turns.py: when answers leave
    outside     registration.py (name servers), metrics.py
    together    server.py: the composition root, the only file that awaits

A handler is a plain function of (command, peer). It answers now (bytes or a Command), when the log
is durable (`Durable`), when data arrives (`Parked`) or when everyone who has to know a change knows
it (`Announced`). Request families know nothing of each other; they share the state above.
"""
