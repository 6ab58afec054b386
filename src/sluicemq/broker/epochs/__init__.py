"""Exactly-once sinks: the epochs of Spark queries, and the messages that are staged for them."""
