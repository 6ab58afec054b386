"""A broker of several replicas on virtual time: the production classes over a network, disks and a
consensus service in memory that fail; what is seen from outside is judged by `histories.checker`.

    python -m simulation.cluster --kind replicas --seeds 2000
    python -m simulation.cluster --kind replicas --seed 17 --verbose

Processes, the network and the way a failing seed is shrunk are those of `simulation.cluster`.
"""
