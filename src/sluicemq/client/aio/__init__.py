"""The asyncio shell of the client."""
