"""A store of torch that listens on the loopback alone."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.parallel.launch import LOOPBACK


def keep_store(port: int = 0, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """One kept by this process, on ``port`` of 127.0.0.1 (0: a free one). By itself torch listens on every
    interface, whatever address it is given. Raises OSError."""
    listening = socket.create_server((LOOPBACK, port))
    return TCPStore(
        LOOPBACK,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


__all__ = ["keep_store"]
