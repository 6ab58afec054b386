"""Connections of clients and servers: sockets, TLS, HTTP/2 and gRPC, and connections in memory."""
