"""Histories of a replicated broker, and what must hold in each (docs/design/0023-histories.md).

    history    what clients asked and were told, what consumers saw, how the roles went
    checker    from a history and what is left at the end to the list of what is wrong
    model      the design itself (docs/design/0022-replication.md) as a small program on virtual
               time (`world`), each of its rules with a switch: one off is a mutant to be caught

The same checker judges the model, the simulated cluster (`simulation.replicas`) and real processes
in network namespaces (`histories.namespaces`, `histories.processes`), some of which have an
exactly-once sink (`histories.sinks`).
"""
