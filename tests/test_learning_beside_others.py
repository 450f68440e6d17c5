"""What else a process does while load_weights is learnt, in other threads, and what goes on
afterwards."""

from __future__ import annotations

import threading

from support.loads_in_time import PATIENCE, Module, delivered, in_time, plain
from support.two_weights import Pairs
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# --- other threads meanwhile and afterwards -----------------------------------------------------


def test_threads_that_a_load_has_started_leave_no_flags_of_torch_behind() -> None:
    released, threads = threading.Event(), list[threading.Thread]()

    def load(module: Module, pairs: Pairs) -> None:
        threads.append(threading.Thread(target=released.wait))
        threads[-1].start()
        plain(module, pairs)

    try:
        assert in_time(lambda: delivered(load)).reason == ""
    finally:
        released.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not is_in_torch_dispatch_mode()
