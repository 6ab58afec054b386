"""Requests of tools and of clients that ask about topics, groups, queues and the broker."""
