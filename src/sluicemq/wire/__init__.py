"""Encoders and decoders for all protocols: remoting, HA, HTTP/2, and the JSON of bodies and files.

Nothing here does I/O. The formats are described in spec/remoting.md, and were checked against
recorded traffic of RocketMQ.
"""
