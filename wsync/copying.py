"""`wsync copy`: fills an engine with the weights of a running engine, without a trainer; or writes
them as a checkpoint, from which a trainer can start again.

The engines may differ in their numbers of workers.  The workers of the source have to run wsync's
loader (SGLang: --custom-weight-loader wsync.sglang.load_weights; vLLM: --worker-extension-cls
wsync.vllm.WorkerExtension), and a trainer has to have updated them since they were started.
The copy begins when the running requests of the source have ended; new ones wait from then on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final

from wsync import _core
from wsync.checkpoints.versions import LATEST
from wsync.engine.update_state import UNKNOWN_VERSION
from wsync.exchange.update_group import Store
from wsync.handles.answers import stages_of
from wsync.handles.base import EngineHandle, handles_of, how_started, send_control
from wsync.handles.sglang_base import ApiHandle
from wsync.handles.worker_facts import obstacle
from wsync.machine.daemon_threads import start
from wsync.machine.deadline import LEAVE_SECONDS, POLL_SECONDS, VERDICT_SECONDS, Deadline
from wsync.machine.host import own_address
from wsync.messages.control import Control
from wsync.options import Options
from wsync.report import Report, Verification

_LAST_SECONDS: Final = 10.0  # for workers to say why they have failed
_PASSED: Final = ("deadline", "delivery", "round_nbytes", "ring_nbytes", "verify")
_STEPS: Final = 3.0  # deadlines that a copy may take: to meet, to learn, to bring the bytes


def copy_weights(
    source: Any, target: Any, *, api_key: str | None = None, options: Options | None = None
) -> Report:
    """Fills an engine with the weights of a running engine of the same model.  The target's workers
    then hold what they would hold after an update by the source's trainer, and the target reports
    the source's weight version.  If the target is a folder, the workers write a checkpoint there,
    with the dtypes that the source has (a trainer's float32 weights come back as bfloat16).

    The source's workers act as the ranks of a trainer.  They learnt in their last update where
    their model's tensors are.  Until the copy is done, the source does not answer requests, and no
    trainer can update it.

    Args:
        source: an engine, as `wsync.handle` takes it.
        target: a URL of another engine, which the source's first worker can reach; or the path of
            a folder that all workers of the source can write to.  The link `latest` in it
            leads to the checkpoint, which gets the configuration and tokenizer files of the
            source's own checkpoint, if the first worker's host has it.
        api_key: the bearer key of both engines.
        options: deadline, delivery, round_nbytes, ring_nbytes and verify count, as for
            `wsync.connect`.  If the weights are on GPUs or the target is on another host,
            delivery="auto" is "distributed".

    Returns:
        What happened, as the source's first worker saw it.

    Raises:
        InvalidArgumentError: both are one engine, or the target holds another model.
        StateError: the source's workers do not know what they hold, or hold parts of an update.
        UnsupportedError: the source does not run wsync's loader, or its load_weights computes with
            some tensors.
        WsyncError: an engine does not answer, refuses, or is updated by a trainer; see also
            `Sync.update`.  The text says whether the target stays paused.
    """
    chosen = Options.of(options)
    folder = isinstance(target, str | os.PathLike) and "://" not in os.fspath(target)
    if folder and re.fullmatch(r"([^/]+:\d+)?", os.fspath(target)):
        raise _core.InvalidArgumentError(f"target={target!r}: a URL starts with http://")
    engines = [source] if folder else [source, target]
    given, *taken = handles_of(engines, timeout=chosen.deadline, api_key=api_key)
    if any("://" not in each.name for each in taken):
        text = "expected the URL of an engine, or the path of a folder"
        raise _core.InvalidArgumentError(f"target={target!r}: {text}")
    target = os.path.abspath(target) if folder else taken[0].name
    orders = {"target": target, "api_key": api_key, **_orders(given, chosen)}
    with _asked(given, orders, chosen.deadline) as (store, asking):
        hear = partial(_hear, store, asking, given.name)
        hear([f"worker{number}" for number in range(orders["ranks"])], chosen.deadline)
        version = store.get("worker0").decode()
        if version == UNKNOWN_VERSION:  # SGLang does not tell its workers
            found = given.model_info(chosen.deadline).get("weight_version")
            version = version if found is None else str(found)
        store.set("version", version)
        state = "" if folder else f"; engine {target} may stay paused"
        hear(["done"], _STEPS * chosen.request_deadline, state=state)
        wait([asking], chosen.deadline)
        facts = json.loads(store.get("done"))["report"]
        found = facts.pop("verification")
        return Report(**facts, verification=found and Verification(**found))


def _orders(source: EngineHandle, options: Options) -> dict[str, Any]:
    """What the source's workers are told, whatever the target is."""
    started = how_started(source, options.deadline)
    if why := obstacle(source, started):
        raise _core.UnsupportedError(f"engine {source.name}: {why}")
    return {
        "ranks": source.workers * stages_of(started),
        "model": [started.get("model_path"), started.get("revision")],
        "options": {name: getattr(options, name) for name in _PASSED} | {"progress": False},
    }


@contextlib.contextmanager
def _asked(
    source: EngineHandle, orders: dict[str, Any], timeout: float
) -> Iterator[tuple[Any, Future[None]]]:
    """In the block, the source's workers are asked to send.  Yields the store in which they answer
    (see wsync.engine.sending), and the request."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(Store(timeout)))
        if isinstance(source, ApiHandle):
            stack.enter_context(source.asking(timeout))
        known: Any = {"op": "send", "session": "0", "update": 0, "orders": orders}
        known["address"] = f"{own_address([source.name])}:{server.port}"
        messages = [Control(deadline=timeout, **known)] * orders["ranks"]
        limit: Any = {"weight_version": None, "timeout": _STEPS * timeout}
        asking = start("wsync-copy", partial(send_control, source, messages, **limit))
        stack.callback(wait, [asking], LEAVE_SECONDS)
        yield server.server, asking


def _hear(
    store: Any,
    asking: Future[None],
    source: str,
    keys: Sequence[str],
    timeout: float,
    state: str = "",
) -> None:
    """Waits until all keys are set.  Raises the error of a worker, or of the request.  When the
    request fails, a worker may say more, a little later.

    state: the end of an error's text that does not say whether the target is paused.
    """
    deadline, last = Deadline(timeout), None
    while True:
        ready = store.check([*keys])
        if store.check(["done"]) and (error := json.loads(store.get("done")).get("error")):
            name, text = error
            if state:
                text = f"its workers are the trainer ranks here: {text}"
            raise getattr(_core, name, _core.RemoteError)(
                f"from engine {source}: {text}{'' if 'paused' in text else state}"
            )
        if ready:
            return
        if asking.done() and last is None:
            last = Deadline(_LAST_SECONDS if state else VERDICT_SECONDS)
        if last is not None and not last.left:
            asking.result()
        deadline.check(f"engine {source}: its workers have not sent their weights")
        time.sleep(POLL_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Copies and prints how.  Returns 0, 1 after an error, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        "wsync copy", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the URL of the engine that has the weights")
    parser.add_argument(
        "target", help="the URL of the engine to fill, or a folder on the source's host"
    )
    parser.add_argument("--api-key", help="the API key of the engines")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a step (default 120)")
    chosen = parser.parse_args(argv)
    try:
        options = Options(deadline=chosen.timeout)
        report = copy_weights(chosen.source, chosen.target, api_key=chosen.api_key, options=options)
    except _core.WsyncError as error:
        print(f"wsync copy: {error}", file=sys.stderr)
        return 1
    where = chosen.target if "://" in chosen.target else os.path.join(chosen.target, LATEST)
    print(f"{chosen.source} to {where}: {report}")
    return 0
