"""Stored records: their layout, encoding and decoding, and columns of many of them."""
