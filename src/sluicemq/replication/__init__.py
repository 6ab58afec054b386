"""A broker that fails over: several processes, of which an existing consensus service names one
(docs/design/0022-replication.md).
"""
