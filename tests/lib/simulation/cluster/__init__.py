"""A cluster on virtual time over a network that fails: seeded histories, checked at every step.

    python -m simulation.cluster --seeds 1000           # what `make simulate` runs
    python -m simulation.cluster --seed 17 --verbose

Name servers, brokers, producers and consumers are the production classes, each of them a `Process`
(`processes`) that can be killed, with a clock of its own whose wall time may jump. Below them are
two ports: files in memory that forget what was not synced (`testing.files`), and a network
(`network`) that delays, holds, cuts in the middle of a frame, or says nothing at all.

A seed makes a world and a list of steps (`world`); a step depends on no other, so a failing history
shrinks to the steps that matter (`runs`). The `ledger` knows what was promised to whom and hears of
every delivery; nothing of the product is asked how it works, only the committed offsets are read.
At the end all faults stop, everything is started again, and what was promised has to arrive.
"""
