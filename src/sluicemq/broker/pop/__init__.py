"""POP consuming: its requests, the messages in flight, and their return to the queue."""
