"""The broker: keeps messages, hands them out, knows who consumes what.

    server          sockets, name servers, chores: the only file that waits
    table           which request goes where
    state           all parts of a broker, made from top to bottom
    turns           when answers leave
    background      long answers, in slices beside everything else
    consume/        what consumers ask for: who they are, pulls, how far they are
    lanes/          members of one group with different subscriptions
    produce/        sends, and what comes back
    transactions/ waiting/ epochs/    what is stored and not to be seen yet
    admin/          what tools ask for and change

A handler is a function of (command, peer), or of its header too (`table.py`). It answers now (bytes
or a Command), when the log is durable (`Durable`), when data arrives (`Parked`), when everyone who
has to know a change knows it (`Announced`) or step by step (`Postponed`).
"""
