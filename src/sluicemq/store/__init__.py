"""The store: CommitLog, ConsumeQueue, checkpoint, recovery. Synchronous, single writer."""
