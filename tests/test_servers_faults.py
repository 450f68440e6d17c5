"""SGLang's whole server and its trainer fail in the middle of an update; see test_servers.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nursery import run
from support.server_models import PATIENCE, PROMPT, Checkpoint, checkpoint
from support.server_phases import LOADER, STOCK, before
from support.sglang_server import Nursery, Server

import wsync

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]
TRAINER = Path(__file__).parent / "support" / "server_trainer.py"
TOKENS = 12
STOPPED = 0.5  # seconds
SHORT = 4.0  # a deadline that is to pass
WAYS = {"wsync": LOADER, "stock": STOCK}
CELLS = [(way, phase) for way, phases in WAYS.items() for phase in phases]


class Lab:
    """A server that is started again when it has been killed."""

    def __init__(self, servers: Nursery, folder: Path, tp: int) -> None:
        self.models = [
            checkpoint(folder / str(seed), seed, experts=False, dtype=torch.float32)
            for seed in (1, 2)
        ]
        self.server = Server(servers, self.models[0], folder / "log", tp=tp)
        self.wanted = [self._reloaded(model) for model in self.models]
        assert self.wanted[0] != self.wanted[1]

    def _reloaded(self, model: Checkpoint) -> Any:
        self.server.post("/update_weights_from_disk", model_path=str(model.folder))
        return self.held()

    def held(self) -> Any:
        """The checksums of every tensor of every worker."""
        answer = self.server.post("/weights_checker", action="checksum")
        return [rank["checksums"] for rank in answer["ranks"]]

    def version(self) -> str:
        greedy = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        answer = self.server.post("/generate", input_ids=PROMPT, sampling_params=greedy)
        found: str = answer["meta_info"]["weight_version"]
        return found

    def connect(self, way: str, deadline: float = PATIENCE) -> wsync.Sync:
        options = wsync.Options(
            deadline=deadline, progress=False, delivery=way, bucket_nbytes=1 << 16
        )
        return wsync.connect(self.models[1].weights, engines=[self.server.url], options=options)

    def kill(self) -> None:
        self.server.close()

    def start(self) -> None:
        self.server = self.server.again()

    def holds(self, number: int, version: str) -> None:
        """It is up to date, and answers."""
        assert self.held() == self.wanted[number], version
        assert self.version() == version

    def recovers(self, way: str, number: int = 0) -> None:
        """Another trainer's update finds everything as it should be."""
        with self.connect(way) as sync:
            sync.update(self.models[number].weights, version="recovered")
            self.holds(number, "recovered")


@pytest.fixture(scope="module")
def lab(servers: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """With one worker: it is started many times."""
    made = Lab(servers, tmp_path_factory.mktemp("faults"), 1)
    yield made
    made.server.close()


@pytest.fixture(scope="module")
def lasting(servers: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """With two workers."""
    made = Lab(servers, tmp_path_factory.mktemp("lasting"), 2)
    yield made
    made.server.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_stops_for_a_while(lasting: Lab, way: str) -> None:
    server = lasting.server
    with lasting.connect(way) as sync:
        sync.update(lasting.models[0].weights)
        for count, phase in enumerate(WAYS[way]):
            later = threading.Timer(STOPPED, server.signal, [signal.SIGCONT])

            def stop(later: threading.Timer = later) -> None:
                server.signal(signal.SIGSTOP)
                later.start()

            number = (count + 1) % 2
            with before(phase, stop) as struck:
                sync.update(lasting.models[number].weights, version=f"stopped-{phase}")
            assert struck, phase
            later.join()
            lasting.holds(number, f"stopped-{phase}")


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_stops_for_longer_than_the_deadline(lasting: Lab, way: str) -> None:
    struck: list[str] = []
    for _ in range(20):  # a busy machine may need the time for what comes before
        with pytest.raises(wsync.WsyncError), lasting.connect(way, SHORT) as sync:
            with before("tensors", lambda: lasting.server.signal(signal.SIGSTOP)) as struck:
                try:
                    sync.update(version="late")
                finally:
                    lasting.server.signal(signal.SIGCONT)
        if struck:
            break
    assert struck
    lasting.recovers(way)


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_a_trainer_whose_server_has_stopped(lasting: Lab, way: str) -> None:
    for phase in ("pause", "tensors", "continue"):
        folder = lasting.models[0].folder
        command = [sys.executable, "-P", str(TRAINER), lasting.server.url, str(folder), way, phase]
        # an empty entry would stand for the folder that this runs in
        folders = [str(TRAINER.parent.parent), os.environ.get("PYTHONPATH")]
        trainer = subprocess.Popen(
            [*command, "1"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with trainer:
            assert trainer.stdout is not None
            if trainer.stdout.readline() != f"{phase}\n":
                pytest.fail(f"the trainer has ended: {trainer.communicate()[1]}")
            lasting.server.signal(signal.SIGSTOP)
            try:
                time.sleep(3)  # it asks, and waits
                trainer.send_signal(signal.SIGINT)
                begun = time.monotonic()
                _, errors = trainer.communicate(timeout=15)
                print(f"{way}, {phase}: ended {time.monotonic() - begun:.1f} s after Ctrl-C")
            finally:
                lasting.server.signal(signal.SIGCONT)
                trainer.kill()
        assert errors.endswith("KeyboardInterrupt\n"), errors
        assert f"these requests have no answer: engine {lasting.server.url}: /" in errors, errors
        lasting.recovers(way)


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_is_killed(lasting: Lab, way: str) -> None:
    for count, phase in enumerate(WAYS[way]):
        number = (count + 1) % 2
        folder = lasting.models[1 - number].folder
        command = [sys.executable, "-P", str(TRAINER), lasting.server.url, str(folder)]
        done = run([*command, way, phase], timeout=PATIENCE)
        assert done.returncode == -signal.SIGKILL, (phase, done.stderr)
        lasting.recovers(way, number)


@pytest.mark.parametrize(("way", "phase"), CELLS)
def test_a_server_that_is_killed(lab: Lab, way: str, phase: str) -> None:
    with lab.connect(way) as sync:
        sync.update(lab.models[0].weights, version="before")
        try:
            with before(phase, lab.kill) as struck:
                with pytest.raises(wsync.WsyncError) as caught:
                    sync.update(lab.models[1].weights, version="killed")
        finally:
            lab.start()
        assert struck
        assert lab.server.url in str(caught.value)
        sync.update(lab.models[1].weights, version="again")  # the new one is at the same URL
        lab.holds(1, "again")


@pytest.mark.parametrize(("way", "phase"), CELLS)
def test_a_server_that_is_started_again(lab: Lab, way: str, phase: str) -> None:
    """Before the trainer has noticed that the old one is gone."""

    def restart() -> None:
        lab.kill()
        lab.start()

    raised = False
    with lab.connect(way) as sync:
        sync.update(lab.models[0].weights, version="before")
        with before(phase, restart) as struck:
            try:
                sync.update(lab.models[1].weights, version="restarted")
            except wsync.WsyncError:
                raised = True
    assert struck
    if raised:  # and nothing is under way any more
        lab.server.post("/continue_generation")
        assert lab.version() != "restarted"
    else:
        lab.holds(1, "restarted")
    lab.recovers(way)
