"""Ports for processes that start later, or again."""

import random

from deploy.region.launch.ports import can_listen


def free_port(host: str = "127.0.0.1") -> int:
    """A port at which this machine can listen now, below the range from which Linux takes the ports
    of outgoing connections: none of these takes it before its owner has started.
    """
    while not can_listen(host, port := random.randint(20000, 32000)):
        pass
    return port
