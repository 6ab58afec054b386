"""Failover: an external consensus service decides which broker process of a name is the master.

- `consensus.py` declares the operations that a consensus service must offer (`Consensus`).
- `etcd.py` implements them with etcd.
- `election.py` decides what a replica does next. It is pure: no I/O, no clock.
- `replica.py` executes these decisions through a `RoleExecutor` (`role_executor.py`).
- `broker_replica.py` is the `RoleExecutor` of a real broker, and starts a broker as a replica.
- `forward.py` lets a slave forward requests that only the master can answer.
- `presence.py` remembers heartbeats of consumers across a change of roles.

The design is described in design/0022-replication.md.
"""
