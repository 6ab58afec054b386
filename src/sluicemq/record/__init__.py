"""Bytes of a stored message: scalar codec, batches, and the vectorised Arrow decoder."""
