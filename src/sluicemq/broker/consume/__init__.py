"""What consumers ask for: who they are, messages that they pull, how far they are."""
