"""Long work of a server: in slices on the event loop, or on another thread."""
