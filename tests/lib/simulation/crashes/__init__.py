"""Crashing the product a thousand times: seeded histories of a store or a broker, and a model.

    python -m simulation.crashes --seeds 2000        # what `make simulate` runs
    python -m simulation.crashes --world store --seed 17

A seed makes a world (its configuration and its disk, `worlds`) and a list of steps (`plan`). Each
step has a seed of its own and depends on no other, so any of them can be left out: a failing
history shrinks to the steps that matter (`runs`). The code that runs is the production code over
`testing.files.CrashableFiles`; a model of what was promised (`ledger`) says after every restart
what must be there, what may be there, and that nothing else is.
"""
