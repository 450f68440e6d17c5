"""A receiver and its loaders against a real exporter in the same process."""

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.trainer import SECONDS, Tensors, Trainer, as_bytes

from wsync._core import (
    DeadlineError,
    Event,
    Exporter,
    Layout,
    LayoutBuilder,
    Memory,
    PeerClosedError,
    RemoteError,
    StateError,
    Stream,
    SystemCallError,
)
from wsync.engine.receiver import Receiver
from wsync.engine.ring_loaders import CallingLoader, LayoutLoader, Loader, ModuleLoader
from wsync.machine.device import find, settle
from wsync.messages import payload
from wsync.messages.control import PIECES
from wsync.trainer.sessions.worker import WorkerSession

Handled = Future[tuple[bool, str]]


@pytest.fixture
def start() -> Iterator[Callable[[Receiver, bytes], Handled]]:
    """Runs Receiver.handle in a thread, as an engine does."""
    with ThreadPoolExecutor() as pool:
        yield lambda receiver, control: pool.submit(receiver.handle, control)


Start = Callable[[Receiver, bytes], Handled]


class Tiny(torch.nn.Module):
    """Two linear layers and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.up = torch.nn.Linear(4, 6)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (10, 4), "up.weight": (6, 4), "up.bias": (6,), "bias": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


ROUNDS = [["embed.weight"], ["up.weight"], ["up.bias", "bias"]]


def first_update(start: Start, loader: Loader, weights: Tensors, rounds: Any = ROUNDS) -> Any:
    """(trainer, receiver, receipt) after a committed first update."""
    trainer, receiver = Trainer(weights, rounds), Receiver(loader)
    handled = start(receiver, trainer.control(1))
    trainer.accept()
    receipt = trainer.update(1, weights)
    assert handled.result(SECONDS)[0]
    return trainer, receiver, receipt


def failed_update(start: Start, loader: Loader, weights: Tensors, rounds: Any = ROUNDS) -> str:
    """The text of a first update that the receiver refuses; both sides have the same."""
    trainer, receiver = Trainer(weights, rounds), Receiver(loader)
    handled = start(receiver, trainer.control(1))
    trainer.accept()
    with pytest.raises((RemoteError, PeerClosedError)) as caught:
        trainer.update(1, weights)
    success, text = handled.result(SECONDS)
    assert not success
    if isinstance(caught.value, RemoteError):
        assert f"failed: {text.removeprefix('worker 0: ')}" in str(caught.value)
    return text


def check(module: torch.nn.Module, weights: Tensors) -> None:
    state = module.state_dict()
    for name, tensor in weights.items():
        assert as_bytes(state[name]) == as_bytes(tensor.to(state[name].dtype)), name


def test_tensors_are_copied_by_name_update_after_update(start: Start) -> None:
    module = Tiny()
    pointers = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    weights = tiny_weights(1)
    trainer, receiver, receipt = first_update(start, ModuleLoader(module), weights)
    assert trainer.blob == PIECES
    assert receipt[:2] == (4, sum(tensor.nbytes for tensor in weights.values()))
    check(module, weights)
    weights = tiny_weights(2)
    handled = start(receiver, trainer.control(2))  # the same session: nothing is attached again
    trainer.update(2, weights)
    assert handled.result(SECONDS) == (True, "update 2 of this connection")
    check(module, weights)
    assert pointers == {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    state = receiver.state
    assert (state.consistent, state.reason, state.update) == (True, "", 2)


def test_a_late_message_of_a_trainer_that_is_gone_does_not_end_anothers_session(
    start: Start,
) -> None:
    module = Tiny()
    late = Trainer(tiny_weights(1), ROUNDS, session="b2")
    message = late.control(1)
    del late
    trainer, receiver, _ = first_update(start, ModuleLoader(module), tiny_weights(1))
    assert not receiver.handle(message)[0]
    handled = start(receiver, trainer.control(2))
    trainer.update(2, tiny_weights(2))
    assert handled.result(SECONDS)[0]
    check(module, tiny_weights(2))


def test_parameters_may_move_between_updates(start: Start) -> None:
    module = Tiny()
    trainer, receiver, _ = first_update(start, ModuleLoader(module), tiny_weights(1))
    module.up.weight.data = torch.zeros(4, 6).t()
    handled = start(receiver, trainer.control(2))
    trainer.update(2, tiny_weights(2))
    assert handled.result(SECONDS)[0]
    check(module, tiny_weights(2))


def test_narrow_weights_fill_a_wider_module(start: Start) -> None:
    module = Tiny()
    weights = {name: tensor.bfloat16() for name, tensor in tiny_weights(1).items()}
    first_update(start, ModuleLoader(module), weights)
    check(module, weights)


def test_a_tied_head_may_be_delivered_or_not(start: Start) -> None:
    module, weights = Tiny(), tiny_weights(1)
    weights["head.weight"] = weights["embed.weight"]
    first_update(start, ModuleLoader(module), weights, [*ROUNDS, ["head.weight"]])
    check(module, weights)
    del weights["embed.weight"]
    first_update(start, ModuleLoader(module), weights, [*ROUNDS[1:], ["head.weight"]])
    check(module, weights)


def test_an_unknown_name_is_refused(start: Start) -> None:
    weights = {**tiny_weights(1), "stranger": torch.ones(2)}
    rounds = [*ROUNDS, ["stranger"]]
    before = as_bytes(torch.nn.utils.parameters_to_vector((module := Tiny()).parameters()))
    assert "stranger: Tiny has no such tensor" in failed_update(
        start, ModuleLoader(module), weights, rounds
    )
    # nothing was loaded: the weights are still the old ones
    assert as_bytes(torch.nn.utils.parameters_to_vector(module.parameters())) == before
    fused = {**tiny_weights(1), "a.experts.down_proj": torch.ones(2)}
    text = failed_update(start, ModuleLoader(module), fused, [*ROUNDS, ["a.experts.down_proj"]])
    assert (
        "down_proj: Tiny has no such tensor; wsync.fsdp.layout(model) gives fused experts the"
        in text
    )


def test_what_is_not_converted_is_named_with_what_is(start: Start) -> None:
    weights = {name: tensor.half() for name, tensor in tiny_weights(1).items()}
    text = failed_update(start, ModuleLoader(Tiny()), weights)
    assert "no conversion from float16 to float32: wsync converts float32 to bfloat16" in text


def test_a_parameter_that_is_not_delivered_is_named(start: Start) -> None:
    weights = tiny_weights(1)
    del weights["up.bias"]
    rounds = [["embed.weight", "up.weight", "bias"]]
    text = failed_update(start, ModuleLoader(Tiny()), weights, rounds)
    assert "up.bias: Tiny has it, but the trainer does not deliver it" in text


def test_another_shape_is_refused_with_both(start: Start) -> None:
    weights = {**tiny_weights(1), "up.weight": torch.ones(4, 6)}
    text = failed_update(start, ModuleLoader(Tiny()), weights)
    assert "up.weight: the trainer delivers shape (4, 6), but Tiny has (6, 4)" in text


class Loading(Tiny):
    """A module with its own loader, which keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}
        self.calls = 0

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        state = self.state_dict()
        for name, tensor in weights:
            state[name].copy_(tensor)
            self.kept[name] = tensor
        self.calls += 1


def test_a_modules_own_loader_is_called_once_a_round_and_may_keep_what_it_is_given(
    start: Start,
) -> None:
    module = Loading()
    trainer, receiver, _ = first_update(start, CallingLoader(module), tiny_weights(1))
    check(module, tiny_weights(1))
    assert module.calls == 3
    kept = dict(module.kept)
    handled = start(receiver, trainer.control(2))
    trainer.update(2, tiny_weights(2))
    assert handled.result(SECONDS)[0]
    check(module, tiny_weights(2))
    assert all(torch.equal(kept[name], tensor) for name, tensor in tiny_weights(1).items())


@pytest.mark.parametrize("at_once", [(), tuple(tiny_weights(1))])
def test_a_loader_may_copy_to_parameters_that_require_gradients(
    start: Start, at_once: tuple[str, ...]
) -> None:
    module = Loading()
    for parameter in module.parameters():
        parameter.requires_grad_()

    def load_weights(weights: list[tuple[str, torch.Tensor]]) -> None:
        state = module.state_dict(keep_vars=True)
        for name, tensor in weights:
            state[name].copy_(tensor)

    first_update(start, CallingLoader(module, load_weights, at_once=at_once), tiny_weights(1))
    check(module, tiny_weights(1))
    assert all(parameter.requires_grad for parameter in module.parameters())


def fused() -> tuple[Layout, list[torch.Tensor]]:
    """Rows 2..4 of `a` above rows 0..2 of `b`, and columns 1..3 of `c`, inside padded tensors."""
    builder = LayoutBuilder()
    builder.add_shard("a", "float32", [6, 4], [2, 0], [2, 4], 0, 0, [16, 4])
    builder.add_shard("b", "float32", [6, 4], [0, 0], [2, 4], 0, 32, [16, 4])
    builder.add_shard("c", "float32", [3, 4], [0, 1], [3, 2], 1, 4, [12, 4])
    return builder.build(), [torch.zeros(5, 4), torch.zeros(3, 3)]


def test_boxes_of_fused_parameters_are_filled_and_padding_is_left_alone(start: Start) -> None:
    layout, tensors = fused()
    weights = {name: torch.randn(6, 4) for name in "ab"} | {"c": torch.randn(3, 4)}
    trainer, _, receipt = first_update(
        start, LayoutLoader(layout, tensors), weights, [["a"], ["b"], ["c"]]
    )
    assert Layout.from_bytes(trainer.blob).names() == ["a", "b", "c"]
    assert torch.equal(tensors[0][:2], weights["a"][2:4])
    assert torch.equal(tensors[0][2:4], weights["b"][:2])
    assert torch.equal(tensors[1][:, 1:], weights["c"][:, 1:3])
    assert not tensors[0][4].any() and not tensors[1][:, 0].any()
    assert receipt[:2] == (3, 2 * 96 + 48)


@pytest.mark.parametrize("by_layout", [True, False])
def test_an_update_that_is_given_up_keeps_no_memory(by_layout: bool) -> None:
    tensor = torch.zeros(4)
    module = torch.nn.Module()
    module.register_buffer("a", tensor)
    builder = LayoutBuilder()
    builder.add_shard("a", "float32", [4], [0], [4], 0, 0, [4])
    layout = builder.build()
    loader: Loader = LayoutLoader(layout, [tensor]) if by_layout else ModuleLoader(module)
    loader.attach(Memory(64), layout)
    loader.begin(1)
    storage = weakref.ref(tensor.untyped_storage())
    tensor.data = torch.ones(4)
    assert storage() is not None  # it is being written to
    loader.abandon()
    assert storage() is None


class Exploding(Loading):
    explodes = True

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "up.weight" and self.explodes:
                raise KeyError("up.kernel")
            super().load_weights([(name, tensor)])


def test_a_failed_load_reaches_the_trainer_and_a_later_update_heals(start: Start) -> None:
    module = Exploding()
    trainer, receiver = Trainer(tiny_weights(1), ROUNDS), Receiver(CallingLoader(module), worker=3)
    handled = start(receiver, trainer.control(1))
    trainer.accept()
    with pytest.raises(
        RemoteError,
        match=r"worker \(pid \d+\) failed: update 1 of this connection: "
        r"Exploding\.load_weights raised; the last tensor that it took is up\.weight: "
        r"KeyError: 'up\.kernel'",
    ):
        trainer.update(1, tiny_weights(1))
    success, text = handled.result(SECONDS)
    assert (success, receiver.state.consistent) == (False, False)
    assert text in receiver.state.reason
    accepted, why = receiver.handle(trainer.control(1, "close"))
    assert (accepted, "inconsistent" in why) == (False, True)
    module.explodes = False
    again = Trainer(tiny_weights(2), ROUNDS, session="b2")
    handled = start(receiver, again.control(2))
    again.accept()
    again.update(2, tiny_weights(2))
    assert handled.result(SECONDS) == (True, "update 2 of this connection")
    assert (receiver.state.consistent, receiver.state.reason) == (True, "")
    check(module, tiny_weights(2))


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda exporter: exporter.abort("rank 2 has failed: no space"), "rank 2 has failed"),
        (lambda exporter: exporter.close(), ""),
    ],
)
def test_a_trainer_that_gives_up_or_dies_leaves_an_inconsistent_worker(
    start: Start, end: Callable[[Exporter], None], text: str
) -> None:
    trainer, receiver = Trainer(tiny_weights(1), ROUNDS), Receiver(ModuleLoader(Tiny()))
    handled = start(receiver, trainer.control(1))
    trainer.accept()
    trainer.exporter.begin(1, 3, SECONDS)
    trainer.send(tiny_weights(1), range(1))
    trainer.exporter.acquire(0, None, SECONDS)  # round 0 has been loaded
    end(trainer.exporter)
    success, answer = handled.result(SECONDS)
    assert not success
    assert text in answer
    assert not receiver.state.consistent
    assert answer in receiver.state.reason


def test_an_abort_before_the_first_round_leaves_the_old_weights_in_place(start: Start) -> None:
    module = Tiny()
    trainer, receiver, _ = first_update(start, ModuleLoader(module), tiny_weights(1))
    handled = start(receiver, trainer.control(2))
    trainer.exporter.begin(2, 3, SECONDS)
    trainer.exporter.abort("changed my mind")
    assert "changed my mind" in handled.result(SECONDS)[1]
    assert receiver.state.consistent
    check(module, tiny_weights(1))


def test_nothing_more_is_written_when_an_update_has_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Tiny()
    loader = ModuleLoader(module)
    trainer, receiver, _ = first_update(start, loader, tiny_weights(1))
    gate = Event(Memory(4096, find(trainer.exporter.worker_uuid), control=True), 0)
    waits = threading.Event()
    monkeypatch.setattr(
        "wsync.engine.receiver.settle", lambda *given: (settle(*given), waits.set())
    )
    handled = start(receiver, trainer.control(2, deadline=0.5))
    trainer.exporter.begin(2, 3, SECONDS)
    assert waits.wait(SECONDS)  # the worker, for streams of this process: the trainer's is one
    trainer.stream.wait(gate, 1)
    trainer.send(tiny_weights(2), range(1))  # announced, and not there
    assert not handled.result(SECONDS)[0]
    left = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    opener = Stream(1, trainer.stream.device)
    opener.record(gate, 1)
    opener.synchronize(SECONDS)
    trainer.stream.synchronize(SECONDS)  # now it is
    assert loader.stream is not None
    loader.stream.synchronize(SECONDS)
    check(module, left)


def test_a_trainer_that_stalls_costs_the_messages_deadline(start: Start) -> None:
    trainer, receiver = Trainer(tiny_weights(1), ROUNDS), Receiver(ModuleLoader(Tiny()))
    handled = start(receiver, trainer.control(1, deadline=0.2))
    trainer.accept()
    trainer.exporter.begin(1, 3, SECONDS)
    success, text = handled.result(SECONDS)
    assert not success
    assert text.startswith("worker 0: update 1 of this connection: ")


def test_a_worker_that_does_not_join_is_named_with_the_request_that_hangs() -> None:
    session = WorkerSession(0, engine="http://e", index=1)
    text = r"engine http://e: worker 1 did not join .* 0\.1 s: .* \(update_weights_from_tensor, "
    with pytest.raises(DeadlineError, match=text):
        session.accept(0.1, bool)
    session.close()


def test_nobody_listening_changes_nothing() -> None:
    receiver = Receiver(ModuleLoader(Tiny()))
    trainer = Trainer(tiny_weights(1), ROUNDS)
    control = trainer.control(1, deadline=0.2)
    trainer.exporter.close()
    success, text = receiver.handle(control)
    assert not success
    assert text.startswith("worker 0: update 1 of this connection: ")
    assert "this engine was restarted after the trainer connected (call update again" in text
    assert receiver.state.consistent


@pytest.mark.parametrize("control", [b"", b"{}", b"\xff"])
def test_a_bad_message_is_answered(control: bytes) -> None:
    success, text = Receiver(ModuleLoader(Tiny()), worker=2).handle(control)
    assert not success
    assert text.startswith("worker 2: ")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (payload.named_tensors([("w", torch.ones(3))]), "is a list, not a control message: does"),
        (None, "the payload is a NoneType, not a control message"),
        (
            {"flattened_tensor": torch.ones(3), "metadata": []},
            "the payload is a dict, not a control message",
        ),
        ([("w", torch.ones(3))], "list 'wsync.sglang.load_weights' in load_formats"),
        (b"\xff", "payload: UnpicklingError: invalid load key"),
    ],
)
def test_another_payload_than_a_message_is_named(content: object, text: str) -> None:
    success, said = Receiver(ModuleLoader(Tiny()), worker=2).answer(content)
    assert not success
    assert said.startswith("worker 2: ") and text in said


def test_a_version_is_refused_where_its_update_is_not(start: Start) -> None:
    trainer, receiver, _ = first_update(start, ModuleLoader(Tiny()), tiny_weights(1))
    assert receiver.handle(trainer.control(1, "close")) == (
        True,
        "update 1 of this connection",
    )
    success, text = receiver.handle(trainer.control(2, "close"))
    assert not success
    assert "the weights are not those of update 2 of this connection" in text


def test_a_worker_takes_part_in_one_update_at_a_time(start: Start) -> None:
    trainer, receiver = Trainer(tiny_weights(1), ROUNDS), Receiver(ModuleLoader(Tiny()))
    handled = start(receiver, trainer.control(1))
    trainer.accept()
    assert receiver.handle(trainer.control(1)) == (False, "worker 0: another update is running")
    with pytest.raises(StateError, match="another update is running"):
        with receiver.state.replacing("loading a checkpoint", None):
            pass
    trainer.update(1, tiny_weights(1))
    assert handled.result(SECONDS)[0]


def test_a_worker_whose_weights_were_replaced_in_part_says_so_until_all_are() -> None:
    receiver = Receiver(ModuleLoader(Tiny()))
    with pytest.raises(SystemCallError), receiver.state.replacing("loading /shared/run7", None):
        raise SystemCallError("file 3: Input/output error")
    assert not receiver.state.consistent
    assert receiver.state.reason == (
        "the weights are inconsistent: loading /shared/run7: file 3: Input/output error"
    )
    with receiver.state.replacing("loading /shared/run7", None):
        pass
    assert (receiver.state.consistent, receiver.state.reason) == (True, "")


def test_weights_are_in_trouble_until_somebody_says_their_version(start: Start) -> None:
    """Between the commit and the closing message they are new, under the old version."""
    trainer, receiver, _ = first_update(start, ModuleLoader(Tiny()), tiny_weights(1))
    assert "update 1 is complete, but its version has not been given yet" in receiver.trouble
    assert not receiver.handle(trainer.control(2, "close"))[0] and receiver.trouble
    assert receiver.handle(trainer.control(1, "close"))[0]
    assert receiver.trouble == ""
    assert receiver.handle(trainer.control(1, "close"))[0]  # repeated on its way


def test_a_worker_that_goes_after_the_commit_is_missed(start: Start) -> None:
    """Its engine may have been started again, and take on the version all the same."""
    trainer, receiver, _ = first_update(start, ModuleLoader(Tiny()), tiny_weights(1))
    trainer.exporter.look()
    receiver.close()
    with pytest.raises(PeerClosedError):
        trainer.exporter.look()
