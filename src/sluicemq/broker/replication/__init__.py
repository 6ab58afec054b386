"""Replication: how slaves copy the commit log and the state of their master."""
