"""Who listens on a port."""

from typing import NamedTuple

import psutil


class Owner(NamedTuple):
    pid: int
    name: str


def owner_of(port: int) -> Owner | None:
    """The process that listens on a TCP port; None if nobody does or it cannot be told (another
    user's process)."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return None
            try:
                return Owner(connection.pid, psutil.Process(connection.pid).name())
            except psutil.Error:
                return None
    return None
