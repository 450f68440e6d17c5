"""verl's checkpoint engine "wsync": verl's base class, registry, manager and workers, on a CPU.

verl and Ray are not among the test extra's packages: `.ci/run verl` installs them.  Modules of verl
that need a GPU's packages are read instead of imported (support.verl_source).
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import tiny_qwen3, verl_source
from support.weights_only_engine import ProcessEngine

import wsync
import wsync.sglang
from wsync.demo.engines.serve import ServerProcess, serve_in_process
from wsync.messages.tcp_channel import Frame, Listener

if TYPE_CHECKING:
    from support.verl_cluster import Cluster

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]  # verl's and Ray's
PLACE = "WSYNC_VERL_PACKAGES"  # a folder that holds one of packages for each version
SGLANG = "workers/rollout/sglang_rollout/async_sglang_server.py"
VLLM = "workers/rollout/vllm_rollout/vllm_async_server.py"
EXTENSION = "workers/rollout/vllm_rollout/utils.py"


@pytest.fixture(scope="module", autouse=True)
def engine_class() -> Any:
    """The class, as verl's workers come by it."""
    if PLACE not in os.environ:
        pytest.skip(f"needs verl and Ray: `.ci/run verl` installs them and sets {PLACE}")
    folder = str(Path(os.environ[PLACE], "verl091"))
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(Path(__file__).parent)])
    sys.path.insert(0, folder)
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("wsync.verl")
    return CheckpointEngineRegistry.get("wsync")


@pytest.fixture
def pair(engine_class: Any) -> Iterator[tuple[Any, Any]]:
    """A trainer's first rank and a rollout worker that have met."""
    trainer = engine_class(bucket_size=1 << 20, is_master=True, timeout=60.0)
    rollout = engine_class(bucket_size=1 << 20, timeout=60.0)
    rollout._listener = Listener("127.0.0.1", "the trainer")
    address = rollout._listener.address
    meeting = threading.Thread(target=rollout.init_process_group, kwargs={"servers": None})
    meeting.start()
    trainer.init_process_group(servers=[], rollouts=[address])
    meeting.join()
    yield trainer, rollout
    trainer.finalize()
    rollout.finalize()


def test_the_package_does_not_import_verl() -> None:
    code = (
        "import sys, wsync, wsync.sglang; sys.exit('verl' in sys.modules or 'ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", code], check=True, timeout=120)


def test_the_class_has_all_that_verls_base_class_demands(engine_class: Any) -> None:
    from verl.checkpoint_engine import CheckpointEngine

    assert issubclass(engine_class, CheckpointEngine) and not engine_class.__abstractmethods__
    for name in CheckpointEngine.__abstractmethods__:
        wanted = inspect.signature(getattr(CheckpointEngine, name)).parameters.values()
        taken = inspect.signature(getattr(engine_class, name)).parameters
        assert [p.name for p in wanted if p.kind is not p.VAR_KEYWORD and p.name not in taken] == []
    engine = engine_class(bucket_size=3 << 20)
    assert engine._options.bucket_nbytes == 3 << 20


def written_configurations() -> list[str]:
    """The configurations that the guide and the module show."""
    import wsync.verl

    pages = (verl_source.GUIDE.read_text(encoding="utf-8"), wsync.verl.__doc__ or "")
    return [re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0] for page in pages]


def test_verl_takes_the_configuration_that_is_written_down(engine_class: Any) -> None:
    import yaml
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import RolloutConfig

    guide, docstring = written_configurations()
    assert guide == docstring
    rollout = omega_conf_to_dataclass({"name": "sglang", **yaml.safe_load(guide)}, RolloutConfig)
    chosen = rollout.checkpoint_engine
    assert chosen.custom_backend_module == engine_class.__module__
    given = chosen.engine_kwargs[chosen.backend]
    engine = CheckpointEngineRegistry.new(chosen.backend, bucket_size=1 << 20, **given)
    assert type(engine) is engine_class and engine._options.deadline == 300
    assert rollout.engine_kwargs == {
        "sglang": {
            "custom_weight_loader": [f"{wsync.sglang.load_weights.__module__}.load_weights"]
        },
        "vllm": {"worker_extension_cls": f"{engine_class.__module__}.WorkerExtension"},
    }


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"speed": 1}, "engine_kwargs.wsync: no option 'speed'"),
        ({"deadline": 0}, "deadline=0 is not positive"),
    ],
)
def test_options_that_cannot_be_are_refused(
    engine_class: Any, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        engine_class(bucket_size=1 << 20, **given)


def test_replicas_are_near_on_the_trainers_gpus_or_remote() -> None:
    from wsync.verl import Member, _offsets

    def members(*places: str) -> list[Member]:
        return [Member(None, *place.split(":")) for place in places]

    trainer = members("a:", "a:")
    assert _offsets(trainer, [members("a:"), members("a:", "a:", "a:")]) is None
    assert _offsets(trainer, [members("a:"), members("b:")]) == [0, 2]
    trainer = members("a:0", "a:1", "b:0", "b:1")
    found = _offsets(trainer, [members("b:0", "b:1"), members("a:2"), members("a:1", "c:0")])
    assert found == [2, 4, 4]


def test_an_update_of_sglang_leaves_going_on_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its KV cache has memory again, what goes on would write to none."""
    from wsync.verl import Server

    asked = []

    def request(self: object, method: str, path: str, *_: object) -> tuple[int, str]:
        asked.append(path)
        return 200, '{"status": "ok", "success": true, "tp_size": 1}'

    monkeypatch.setattr("wsync.handles.sglang_http.HttpHandle.request", request)
    handle = Server("sglang", "http://127.0.0.1:1").handle(60.0)
    handle.pause("abort", 60.0)
    handle.update_weights([b""], load_format=None, weight_version=3, timeout=60.0)
    handle.resume(60.0)
    update = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    assert asked == ["/server_info", "/pause_generation", *update]


def test_an_update_of_vllm_leaves_pausing_and_going_on_to_verl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wsync.verl import Server

    asked = []

    class Vllm:
        name = "vllm"

        def collective_rpc(self, method: str, args: object = ()) -> list[str]:
            return ['{"rank": 0, "workers": 1, "engine": 0, "engines": 1, "prefix_cache": true}']

        def __getattr__(self, name: str) -> Any:
            if name not in ("pause_generation", "resume_generation", "reset_prefix_cache"):
                raise AttributeError(name)
            return lambda **_: asked.append(name)

    monkeypatch.setattr("wsync.verl.VllmServer", lambda url: Vllm())
    handle = Server("vllm", "http://127.0.0.1:1").handle(60.0)
    handle.pause("abort", 60.0)
    handle.flush(60.0)
    handle.resume(60.0)
    assert asked == ["reset_prefix_cache"]


def test_a_trainer_that_fails_tells_the_rollout_workers_why(pair: tuple[Any, Any]) -> None:
    trainer, rollout = pair

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        asyncio.run(trainer.send_weights(weights(), global_steps=3))
    with pytest.raises(wsync.RemoteError, match="KeyError: 'no such layer'"):
        list(rollout.receive_weights(global_steps=3))


def test_a_rollout_worker_that_is_gone_fails_the_trainer(pair: tuple[Any, Any]) -> None:
    trainer, rollout = pair
    rollout.finalize()
    with pytest.raises(wsync.PeerClosedError, match=r"rollout worker at .* is gone"):
        asyncio.run(trainer.send_weights(iter(()), global_steps=3))


@pytest.mark.parametrize("failure", ["of a rollout worker", "of a tensor"])
def test_a_rank_that_fails_gathers_on_with_the_others(pair: tuple[Any, Any], failure: str) -> None:
    """What verl gathers it gathers on all ranks together."""
    trainer, rollout = pair
    gathered = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            gathered.append(name)
            yield ("a" if failure == "of a tensor" else name), torch.zeros(2)

    if failure == "of a rollout worker":
        rollout.finalize()
    with pytest.raises((wsync.PeerClosedError, wsync.LayoutError)):
        asyncio.run(trainer.send_weights(weights(), global_steps=3))
    assert gathered == ["a", "b", "c"]


def test_a_trainer_that_is_gone_fails_the_rollout_worker(pair: tuple[Any, Any]) -> None:
    trainer, rollout = pair
    trainer.finalize()
    with pytest.raises(wsync.PeerClosedError, match="the trainer is gone"):
        list(rollout.receive_weights(global_steps=3))


def test_the_wait_for_a_trainer_has_an_end(pair: tuple[Any, Any]) -> None:
    _, rollout = pair
    rollout._timeout = 0.2
    with pytest.raises(wsync.DeadlineError, match="did not send BEGIN"):
        list(rollout.receive_weights(global_steps=3))


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["a", "a"], wsync.LayoutError, "a: verl gives two tensors of this name"),
        (["q.base_layer.weight"], wsync.UnsupportedError, "model.lora.merge=True"),
        (["q.lora_A.default.weight"], wsync.UnsupportedError, "model.lora.merge=True"),
    ],
)
def test_tensors_that_are_not_whole_weights_are_refused(
    engine_class: Any, names: list[str], error: type[Exception], text: str
) -> None:
    engine = engine_class(bucket_size=1 << 20, is_master=True)
    with pytest.raises(error, match=text):
        asyncio.run(engine.send_weights((name, torch.zeros(1)) for name in names))


Given = list[tuple[str, torch.Tensor]]


def given(names: str, value: float, **more: Any) -> Given:
    return [(name, torch.full((8, 4), value, **more)) for name in names]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (given("abc", 2.0), "c: "),
        (given("a", 2.0), "b: "),
        ([*given("a", 2.0), ("b", torch.ones(9, 4))], "b: "),
        (given("ab", 2.0, dtype=torch.int8), "a: "),
        (given("aa", 2.0), "two tensors"),
    ],
    ids=["more", "fewer", "shape", "dtype", "twice"],
)
def test_the_step_after_one_with_other_tensors_is_right(
    engine_class: Any, bad: Given, error: str
) -> None:
    """What no server takes is refused by name, and leaves nothing that refuses the next step."""
    held = {name: ((8, 4), torch.float32) for name in "ab"}
    with ProcessEngine(held, name="e", timeout=60) as server:
        trainer = trainer_of(engine_class, server)
        for step in (1, 3):
            with pytest.raises(wsync.WsyncError, match=error):
                send(trainer, bad, step)
            send(trainer, given("ab", step + 1.0), step + 1)
            assert all((tensor == step + 1).all() for tensor in server.weights().values())


def trainer_of(engine_class: Any, server: ProcessEngine) -> Any:
    """A trainer's only rank, with a server of this host."""
    trainer = engine_class(1 << 20, True, deadline=30.0, progress=False)
    trainer._servers = [SimpleNamespace(handle=lambda timeout: wsync.handle(server))]
    return trainer


def send(trainer: Any, weights: Given, step: int) -> None:
    trainer.finalize()
    asyncio.run(trainer.send_weights(iter(weights), global_steps=step))


def arguments_of(path: str, name: str) -> list[str | None]:
    """The keys of the dict `args` that a server of verl's is started with; None: a `**`."""
    launch = verl_source.methods_of(path, name)["launch_server"]
    (found,) = (
        node.value
        for node in ast.walk(launch)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.targets[0]) == "args"
    )
    return [None if key is None else ast.literal_eval(key) for key in found.keys]


def test_verl_hands_the_loaders_of_a_configuration_on() -> None:
    sglang = arguments_of(SGLANG, "SGLangHttpServer")
    assert "custom_weight_loader" in sglang
    read = "list(engine_kwargs.pop('custom_weight_loader', None) or [])"
    launch = verl_source.methods_of(SGLANG, "SGLangHttpServer")["launch_server"]
    assert read in ast.unparse(launch)
    vllm = arguments_of(VLLM, "vLLMHttpServer")
    assert vllm.index("worker_extension_cls") < vllm.index(None)  # so that engine_kwargs decide


def test_the_worker_extension_is_verls_and_wsyncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's class, as far as names go: vLLM refuses an extension of which its worker has one."""
    import wsync.verl
    import wsync.vllm

    names = verl_source.methods_of(EXTENSION, "vLLMColocateWorkerExtension")
    ours = {name for name in vars(wsync.vllm.WorkerExtension) if not name.startswith("__")}
    assert not ours & set(names)
    verls = type("vLLMColocateWorkerExtension", (), dict.fromkeys(set(names) - {"__new__"}))
    package = "verl.workers.rollout.vllm_rollout"  # whose own needs vLLM
    module = ModuleType(f"{package}.utils")
    module.vLLMColocateWorkerExtension = verls  # type: ignore[attr-defined]
    monkeypatch.setitem(
        sys.modules, "verl.workers.rollout.vllm_rollout", ModuleType("vllm_rollout")
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = wsync.verl.WorkerExtension
    monkeypatch.delattr(wsync.verl, "WorkerExtension")
    assert issubclass(made, verls) and issubclass(made, wsync.vllm.WorkerExtension)
    with pytest.raises(AttributeError, match="no attribute 'Extension'"):
        _ = wsync.verl.Extension


def test_verls_adapter_of_vllm_only_records_the_step(
    engine_class: Any, pair: tuple[Any, Any]
) -> None:
    from verl.workers.rollout.utils import ensure_async_iterator

    path = "workers/rollout/vllm_rollout/vllm_rollout.py"
    wanted: dict[str, Any] = {"update_weights": {}, "_update_delta_weights": {}}
    known = {"torch": torch, "ensure_async_iterator": ensure_async_iterator}
    verls = verl_source.borrowed(path, "ServerAdapter", wanted, **known)
    asked = []

    class Handle:
        async def remote(self, step: int) -> None:
            asked.append(step)

    adapter: Any = type("Adapter", (), verls)()
    adapter.use_shm, adapter._ensure_server_handle = False, lambda: True
    adapter.server_handle = SimpleNamespace(set_global_steps=Handle())
    trainer, rollout = pair
    trainer._say(Frame.BEGIN)
    trainer._say(Frame.COMMIT)
    weights = rollout.receive_weights(global_steps=3)
    wire = {"wire_format": engine_class.wire_format}
    asyncio.run(adapter.update_weights(weights, global_steps=3, **wire))
    assert asked == [3]


@pytest.fixture(scope="module")
def running(
    engine_class: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, list[ServerProcess]]]:
    import ray
    from support.verl_cluster import Cluster, start_ray

    config = tiny_qwen3.dense()
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:  # while Ray starts
            starting = [pool.submit(serve_in_process, config, seed=seed) for seed in (5, 6)]
            stack.callback(ray.shutdown)
            start_ray(tmp_path_factory.mktemp("ray"))
            servers = [stack.enter_context(server.result()) for server in starting]
        yield Cluster([server.url for server in servers]), servers


Running = tuple["Cluster", list[ServerProcess]]
# what verl has a server do around an update
AROUND = [
    "pause_generation",
    "release_kv_cache",
    "set_global_steps",
    "resume_kv_cache",
    "continue_generation",
]


def holds(server: ServerProcess, sums: dict[str, str], version: str) -> bool:
    """Whether a server has these weights, byte for byte, and calls them so."""
    info = wsync.handle(server.url).model_info(60.0)
    return tiny_qwen3.in_server(server.url) == sums and info["weight_version"] == version


def test_verls_manager_updates_all_servers(running: Running) -> None:
    """Twice, with other weights."""
    cluster, servers = running
    cluster.noted()
    for step in (1, 2):
        sums = cluster.trainers.train(step)[0]
        metrics = cluster.manager.update_weights(global_steps=step)
        assert metrics["checkpoint_engine/payload_mbytes"] > 0
        assert metrics["checkpoint_engine/seconds"] == metrics["wsync/update_seconds"] > 0
        assert metrics["checkpoint_engine/gather_seconds"] > 0
        assert not [name for name in metrics if not name.startswith(("checkpoint_", "wsync/"))]
        assert all(holds(server, sums, str(step)) for server in servers)
        assert cluster.noted() == [(AROUND, step)] * 2


def test_a_wrong_tensor_is_named_everywhere_and_the_next_update_is_right(running: Running) -> None:
    cluster, servers = running
    sums = cluster.trainers.train(20)[0]
    cluster.manager.update_weights(global_steps=20)
    name = "model.layers.1.mlp.up_proj.weight"
    cluster.trainers.spoil(name, (3, 64))
    sent, received = cluster.outcomes(21)
    for error in sent:
        assert isinstance(error, wsync.WsyncError) and name in str(error)
    for error in received:
        assert isinstance(error, wsync.RemoteError) and name in str(error)
    assert all(holds(server, sums, "20") for server in servers)
    cluster.trainers.spoil(name, None)
    sums = cluster.trainers.train(22)[0]
    cluster.manager.update_weights(global_steps=22)
    assert all(holds(server, sums, "22") for server in servers)


def test_replicas_without_a_server_that_can_be_updated_are_refused(running: Running) -> None:
    import ray
    from support.verl_server import ServerActor

    from wsync.verl import _server

    with pytest.raises(wsync.UnsupportedError, match=r"set rollout\.name to sglang or vllm"):
        _server(7)
    actor = ray.remote(num_cpus=0)(ServerActor)
    names = ("vllm_server_8_0", "vllm_server_decode_8_0")
    held = [actor.options(name=name).remote("http://[::1]:80") for name in names]
    with pytest.raises(wsync.UnsupportedError, match=r"replica 8: .*\(disaggregation\)"):
        _server(8)
    del held


def test_a_dead_server_fails_all_and_the_others_go_on_without_it(running: Running) -> None:
    cluster, servers = running
    servers[1].process.kill()
    servers[1].process.wait(60)
    sent, received = cluster.outcomes(30)
    for error in sent + received:
        assert isinstance(error, wsync.WsyncError) and servers[1].url in str(error), error
    cluster.manager.remove_replicas([cluster.replicas[1]])
    sums = cluster.trainers.train(31)[0]
    cluster.manager.update_weights(global_steps=31)
    assert holds(servers[0], sums, "31")


def test_a_trainer_rank_that_dies_fails_the_rollout_workers(running: Running) -> None:
    """The last test of this cluster."""
    cluster, servers = running
    before = tiny_qwen3.in_server(servers[0].url)
    cluster.trainers.die(1)
    sent, received = cluster.outcomes(40)
    assert all(isinstance(error, Exception) for error in sent)
    (error,) = received[:1]
    assert isinstance(error, wsync.RemoteError) and "the trainer: " in str(error)
    assert tiny_qwen3.in_server(servers[0].url) == before
