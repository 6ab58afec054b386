"""Blocking consumers: the asyncio ones on a loop and thread of their own."""
