"""What operators use: doctor, mqadmin, assistants' tools."""
