"""The remoting protocol, sans-IO: bytes in, commands out, and back.

Nothing here awaits or touches a socket. Facts: spec/remoting.md, corrected by the recorded traffic.
"""
