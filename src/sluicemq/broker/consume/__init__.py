"""Requests of consumers: heartbeats and groups, pulls, filters, queue locks and offsets."""
