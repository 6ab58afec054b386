"""The only sockets of the remoting protocol: servers, dialers, and the same frames in memory."""
