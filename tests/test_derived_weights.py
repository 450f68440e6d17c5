"""What a module derives from its weights and keeps is made anew after an update, as it is where its
own load_weights has loaded."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from support.two_weights import Pairs, TwoWeights, draw
from support.workers import ThreadEngine
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import wsync
import wsync.fsdp
from wsync._core import LayoutBuilder, describe
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import LayoutLoader, ModuleLoader

OPTIONS = wsync.Options(deadline=20, progress=False)


class Module(TwoWeights):
    """Two parameters; `answer` is made of one of them, by what is kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, torch.Tensor] = {}

    def answer(self) -> torch.Tensor:
        key = self.a.data_ptr(), self.a._version
        if key not in self.kept:
            self.kept = {key: self.a.t().contiguous()}
        return self.kept[key]

    def copy(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)


class Loading(Module):
    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)


def by_layout(module: Module) -> LayoutLoader:
    builder = LayoutBuilder()
    builder.add_tensors(["a", "b"], describe([module.a, module.b]))
    return LayoutLoader(builder.build(), [module.a, module.b])


@pytest.mark.parametrize(
    ("module", "make"),
    [(Module(), by_layout), (Module(), ModuleLoader), (Loading(), RecordedLoader)],
)
def test_copies_count_as_writes(module: Module, make: Any) -> None:
    with wsync.connect(draw(0), engines=[ThreadEngine([make(module)])], options=OPTIONS) as sync:
        for seed in (1, 2, 3):
            weights = draw(seed)
            sync.update(weights)
            assert torch.equal(module.answer(), weights["a"].t())


class Flag(Module):
    """Keeps a flag that says whether what it has made is stale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.zeros(8, 8), persistent=False)
        self.stale = True

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)
            self.stale = True

    def answer(self) -> torch.Tensor:
        if self.stale:
            self.made.copy_(self.a.t())
            self.stale = False
        return self.made


class Dropped(Module):
    """Keeps what it has made until it is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.made: torch.Tensor | None = None

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        self.made = None

    def answer(self) -> torch.Tensor:
        if self.made is None:
            self.made = self.a.t().contiguous()
        return self.made


class Emptied(Module):
    """Keeps what it has made in a dict, until it has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, torch.Tensor] = {}

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        self.made = {}

    def answer(self) -> torch.Tensor:
        if "a" not in self.made:
            self.made["a"] = self.a.t().contiguous()
        return self.made["a"]


@pytest.mark.parametrize("module", [Flag(), Dropped(), Emptied()])
def test_an_update_leaves_attributes_as_a_load_does(module: Any) -> None:
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in range(1, 6):
            weights = draw(seed)
            sync.update(weights)
            assert loader.recording is not None
            assert torch.equal(module.answer(), weights["a"].t())


class FlagInDict(Module):
    """Says in a dict that what was made is old."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"old": False}

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        self.state["old"] = True

    def answer(self) -> torch.Tensor:
        if self.state["old"]:
            self.kept = {"a": self.a.t().contiguous()}
            self.state["old"] = False
        return self.kept["a"]


class OneOfDict(Module):
    """Drops what it has made from a dict that has other things, too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Any] = {"kept": 1}

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        self.made.pop("a", None)

    def answer(self) -> torch.Tensor:
        if "a" not in self.made:
            self.made["a"] = self.a.t().contiguous()
        answer: torch.Tensor = self.made["a"]
        return answer


@pytest.mark.parametrize("make", [FlagInDict, OneOfDict])
def test_what_is_reset_in_a_dict_costs_one_update(make: type[Module]) -> None:
    """No update leaves it so: load_weights is called from then on."""
    module = make()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        assert torch.equal(module.answer(), draw(1)["a"].t())
        with pytest.raises(wsync.RemoteError, match=r"no update leaves what it leaves: "):
            sync.update(draw(2))
        for seed in range(3, 8):
            sync.update(draw(seed))
            assert torch.equal(module.answer(), draw(seed)["a"].t())
    assert "no update leaves what it leaves" in loader.reason


class Fused(Loading):
    """A forward that makes something of its weights once, in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Any = None
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("table", torch.randn(8, 8), persistent=False)
        self.scratch = torch.randn(8, 8)

    def copy(self, pairs: Pairs) -> None:
        super().copy(pairs)
        self.norm.weight.data.copy_(self.a.data[0])
        self.norm.bias.data.copy_(self.a.data[1])

    def joined(self) -> Any:
        return torch.cat([self.a.data, self.b.data[:1], torch.zeros(3, 8)])

    def turned(self) -> Any:
        return self.b.data[2:].t().contiguous().to(torch.bfloat16)

    def pair(self) -> Any:
        return (self.norm.weight.to(torch.bfloat16), torch.zeros(8))


@pytest.mark.parametrize(("kind", "path"), [("joined", ""), ("turned", ""), ("pair", r"\[0\]")])
@pytest.mark.parametrize("renewed", [False, True])
def test_what_a_forward_has_made_and_keeps_is_named_once(
    kind: str, path: str, renewed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = Fused()

    def make(_: Any = None) -> None:
        made = getattr(module, kind)()
        if isinstance(module.made, torch.Tensor):
            module.made.copy_(made)
        else:
            module.made = made

    module.load_weights(list(draw(7).items()))
    make()
    loader = RecordedLoader(module, after=make if renewed else None)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
    found = [text for text in caplog.messages if "had been made of weights" in text]
    assert len(found) == (not renewed)
    assert all(re.match(rf"made{path}: of Fused", text) for text in found)


class Closed(torch.Tensor):
    """Lets nobody compare it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("eq", "ne", "__eq__", "__ne__"):
            raise TypeError("no")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_cannot_be_compared_hinders_no_update() -> None:
    module = Fused()
    module.made = module.joined().as_subclass(Closed)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
    assert torch.equal(module.a, draw(1)["a"])


def test_tensors_that_are_not_written_keep_their_versions() -> None:
    module = Loading()
    module.register_buffer("table", torch.ones(8))
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        versions = [tensor._version for tensor in (module.a, module.table)]
        sync.update(draw(2))
        assert module.a._version > versions[0]
        assert module.table._version == versions[1]


def test_nothing_is_learnt_in_memory_that_a_trainer_may_share() -> None:
    """torch.multiprocessing moves what it sends to shared memory, and does not copy it."""
    module = Loading()
    module.a.data.copy_(draw(1)["a"])
    module.a.share_memory_()
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.WsyncError, match="a: of Loading, lies in shared memory"):
            sync.update()
    assert torch.equal(module.a, draw(1)["a"])


def assigned(trainer: Module) -> Module:
    module = Loading()
    module.load_state_dict(trainer.state_dict(), assign=True)
    return module


def one_parameter(trainer: Module) -> Module:
    module = Loading()
    module.a = trainer.a
    return module


def view_of_one(trainer: Module) -> Module:
    module = Loading()
    module.a.data = trainer.a.data[2:].detach().view(-1)[:16].view(4, 4)
    return module


class Beside(Loading):
    """Also keeps a trainer's tensor where the module's tensors do not tell of it."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def load_weights(self, pairs: Pairs) -> None:
        super().load_weights(pairs)
        for name, tensor in pairs:
            if name == "a":
                self.other[0][:] = tensor if isinstance(self.other, list) else tensor.numpy()[0]


@pytest.mark.parametrize("kind", ["list", "numpy"])
def test_an_update_fails_where_learning_has_written_to_what_it_sends(kind: str) -> None:
    weights = draw(1)
    module = Beside([weights["a"]] if kind == "list" else weights["a"].numpy())
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        for _ in range(2):  # the second one would deliver what the first has left
            with pytest.raises(wsync.WsyncError, match="written to the weights of a trainer"):
                sync.update()


class Sharded(Module):
    @torch.no_grad()
    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            getattr(self, name).to_local().copy_(tensor)


@pytest.mark.usefixtures("group_of_one")
def test_nothing_is_learnt_in_a_trainers_dtensors() -> None:
    trainer: Any = fully_shard(Sharded(), mesh=init_device_mesh("cpu", (1,)))
    trainer.load_weights(list(draw(1).items()))
    engine = ThreadEngine([RecordedLoader(trainer)])
    with wsync.connect(wsync.fsdp.layout(trainer), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.WsyncError, match=r"a.*, is memory that a trainer"):
            sync.update()
    assert torch.equal(trainer.a.to_local(), draw(1)["a"])


@pytest.mark.parametrize("make", [assigned, one_parameter, view_of_one, lambda trainer: trainer])
def test_nothing_is_learnt_in_a_trainers_own_memory(make: Any) -> None:
    trainer = Loading()
    trainer.copy(list(draw(1).items()))
    engine = ThreadEngine([RecordedLoader(make(trainer))])
    with wsync.connect(trainer.state_dict(), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.WsyncError, match=r"a.*: of Loading, is memory that a trainer"):
            sync.update()
    assert all(torch.equal(tensor, draw(1)[name]) for name, tensor in trainer.state_dict().items())


class Half(Module):
    """Makes one of its weights itself."""

    def load_weights(self, pairs: Pairs) -> None:
        self.copy([(name, tensor.sin() if name == "a" else tensor) for name, tensor in pairs])


OTHERS: Any = {
    "by name": (Module, ModuleLoader),
    "by call": (Loading, ModuleLoader),
    "by layout": (Module, by_layout),
    "learnt": (Loading, RecordedLoader),
    "made": (Half, RecordedLoader),
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_is_loaded_to_where_a_trainer_sends_another_tensor_from(
    kind: str, direct: bool
) -> None:
    make, loading = OTHERS[kind]
    module = make()
    engine = ThreadEngine([loading(module)])
    delivery = "direct" if direct and kind not in ("by call", "made") else "auto"
    options = dataclasses.replace(OPTIONS, delivery=delivery)
    first = {name: tensor.share_memory_() for name, tensor in draw(1).items()}
    with wsync.connect(first, engines=[engine], options=options) as sync:
        sync.update()
        # as where layers have moved up: the engine's a is the trainer's b
        module.a.data = first["b"]
        with pytest.raises(wsync.WsyncError, match=r"a( \(where b is\))? would be loaded to"):
            sync.update()
        assert torch.equal(first["b"], draw(1)["b"])
        module.a.data = torch.zeros(8, 8)
        sync.update(draw(2))
    assert torch.equal(module.b, draw(2)["b"])


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "made"])
def test_an_engine_may_come_to_hold_the_trainers_own_tensors(kind: str) -> None:
    make, loading = OTHERS[kind]
    module, weights = make(), draw(1)
    with wsync.connect(weights, engines=[ThreadEngine([loading(module)])], options=OPTIONS) as sync:
        sync.update()
        for name, tensor in weights.items():
            getattr(module, name).data = tensor
        sync.update()
        weights["a"].add_(1)
        sync.update()
    assert torch.equal(module.a, draw(1)["a"] + 1) and torch.equal(module.b, draw(1)["b"])
