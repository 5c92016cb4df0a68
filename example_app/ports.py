"""Ports for throw-away servers."""

import errno
import random
import socket

# Below those that the kernel gives to outgoing connections: one of them could take the port before its server does.
_PORTS = range(15_000, 32_000)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody has just now; another for everybody who asks, almost surely."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
        return port
