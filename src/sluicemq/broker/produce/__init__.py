"""How messages enter the store: sends, batches, messages sent back, replies."""
