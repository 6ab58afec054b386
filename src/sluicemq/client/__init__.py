"""The client: one pure core, an asyncio shell and a blocking shell."""
