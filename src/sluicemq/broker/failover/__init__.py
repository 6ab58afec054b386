"""A broker that fails over: several processes, of which an existing consensus service names one
(design/0022).

`consensus.py` is what is asked of the service, `etcd.py` the one adapter there is; `election.py`
decides without waiting, `replica.py` does it to a broker; `forward.py` passes on what only the
master answers.
"""
