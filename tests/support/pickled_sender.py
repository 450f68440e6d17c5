"""What a child process of test_payload runs; importable, as the start method "spawn" asks."""

from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # teaches ForkingPickler tensors


def send_pickled(connection: Connection) -> None:
    """Sends a tensor by torch's default, a file descriptor, and stays until it was taken."""
    connection.send_bytes(ForkingPickler.dumps([("w", torch.arange(6).reshape(2, 3))]))
    connection.recv()
