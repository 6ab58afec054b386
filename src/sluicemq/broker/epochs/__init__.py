"""Exactly-once sinks: epochs, and the messages staged for them."""
