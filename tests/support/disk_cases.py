"""What trainer ranks do in tests/test_disk_ranks.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from support import delta_reader, hf_reference, megatron_cpu
from support.errors import error_of
from support.update_cases import compare, slime_arguments, trainer_and_engine

import wsync
from wsync import _core, megatron
from wsync.disk import DiskSync, newest

OPTIONS = wsync.Options(deadline=60.0, progress=False)


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library reads, file by file."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def in_transformers(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What transformers' own loader makes of it."""
    auto: Any = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.named_parameters())


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found
        or name not in expected
        or found[name].dtype != expected[name].dtype
        or not torch.equal(
            found[name].detach().contiguous().reshape(-1).view(torch.uint8),
            expected[name].reshape(-1).view(torch.uint8),
        )
    ]


def update_twice(
    config: Any,
    parallel: megatron_cpu.Parallel,
    folder: str,
    shard_nbytes: int,
    dtype: str | None,
    engine: dict[str, Any],
) -> dict[str, Any]:
    """Two updates with different weights; what differs in files, transformers and the engine."""
    wrong: list[str] = []
    with trainer_and_engine(config, parallel, engine) as (trainer, started):
        layout = megatron.layout(trainer.chunks, config)
        engines = [started] if started else []
        with DiskSync(
            layout,
            engines,
            folder=folder,
            base=config,
            dtype=dtype,
            shard_nbytes=shard_nbytes,
            options=OPTIONS,
        ) as sync:
            for seed in (1, 2):
                trainer.randomize(seed)
                report = sync.update()
                expected = hf_reference.hf_state_dict(trainer.chunks, config)
                if dtype is not None:
                    expected = {n: t.to(getattr(torch, dtype)) for n, t in expected.items()}
                if dist.get_rank() == 0:
                    path = newest(folder)
                    wrong += differences(in_files(path), expected)
                    kind = next(iter(expected.values())).dtype
                    wrong += differences(in_transformers(path, kind), expected)
                    wrong += compare(started, {n: t.float() for n, t in expected.items()})
                dist.barrier()
    written = [0] * dist.get_world_size()
    dist.all_gather_object(written, sync._writer.nbytes)
    return {"wrong": wrong, "written": written, **report.facts()}


def write_changes(
    config: Any, parallel: megatron_cpu.Parallel, folder: str, dtype: str | None
) -> dict[str, Any]:
    """A whole version and two with changes; what differs in a host's copy of them."""
    wrong: list[str] = []
    versions, copy = Path(folder, "versions"), Path(folder, "copy")
    with megatron_cpu.on_cpu(), megatron_cpu.groups(parallel):
        trainer = megatron_cpu.build(config, parallel)
        trainer.randomize(1)
        layout = megatron.layout(trainer.chunks, config)
        with DiskSync(layout, folder=versions, dtype=dtype, delta=True, options=OPTIONS) as sync:
            first = 0
            for step in range(3):
                report = sync.update()
                expected = hf_reference.hf_state_dict(trainer.chunks, config)
                if dtype is not None:
                    expected = {n: t.to(getattr(torch, dtype)) for n, t in expected.items()}
                if dist.get_rank() == 0:
                    first = first or int(newest(versions).name.removeprefix("weight_v"))
                    delta_reader.pull(copy, versions, first + step)
                    wrong += differences(in_files(copy), expected)
                dist.barrier()
                for name, tensor in megatron_cpu.named_weights(trainer.chunks):
                    if not name.endswith("norm.weight"):  # a few stay as they are
                        tensor.data.view(-1)[step::97] *= -1
    last = delta_reader.folder(versions, first + 2)
    return {
        **report.facts(),
        "wrong": wrong,
        "first": first,
        "versions": sorted(path.name for path in versions.glob("weight_v*")),
        "files": sorted(path.name for path in last.glob("*")),
    }


written: list[str] = []


def note_written(args: Any, path: str, engines: list[Any]) -> None:
    """A function of a user's, for slime's updater."""
    written.append(path)


def as_slime_does(config: Any, parallel: megatron_cpu.Parallel, folder: str) -> dict[str, Any]:
    """slime's calls: connect, update, connect anew, update; backups move each time."""
    with trainer_and_engine(config, parallel, {"tp": 2}) as (trainer, _):

        def weights_getter() -> dict[str, torch.Tensor]:
            weights = megatron_cpu.named_weights(trainer.chunks)
            return {f"module.module.{name}": tensor.detach().clone() for name, tensor in weights}

        args = slime_arguments(config)
        args.update_weight_disk_dir = f"{folder}/versions"
        args.hf_checkpoint = f"{folder}/base"
        args.custom_update_weight_post_write_path = f"{__name__}.note_written"
        written.clear()
        if dist.get_rank() == 0:
            config.save_pretrained(args.hf_checkpoint)
        updater = wsync.UpdateWeightFromDisk(
            args,
            trainer.chunks,
            weights_getter,
            model_name="qwen3",
            quantization_config=None,
            options=OPTIONS,
        )
        wrong: list[str] = []
        for seed in (3, 4):
            updater.connect_rollout_engines([], None)
            trainer.randomize(seed)
            updater.update_weights()
            expected = hf_reference.hf_state_dict(trainer.chunks, config)
            if dist.get_rank() == 0:
                wrong += differences(in_files(newest(args.update_weight_disk_dir)), expected)
            dist.barrier()
        metrics = updater.pop_metrics()
        updater.disconnect_rollout_engines()
        return {
            "wrong": wrong,
            "version": updater.weight_version,
            "versions": sorted(os.listdir(args.update_weight_disk_dir)),
            "written": [Path(path).name for path in written],
            "metrics": metrics,
            "second_pop": updater.pop_metrics(),
        }


def fail_once(config: Any, parallel: megatron_cpu.Parallel, folder: str) -> dict[str, Any]:
    """Rank 1's disk fails in the second update; the third is to succeed."""
    original = _core.write_files

    def write(*arguments: Any) -> int:
        if dist.get_rank() == 1:
            raise wsync.SystemCallError("shard: writing 5 bytes at 9: No space left on device")
        return original(*arguments)

    with trainer_and_engine(config, parallel, {"tp": 1}) as (trainer, engine):
        layout = megatron.layout(trainer.chunks, config)
        engines = [engine] if engine else []
        with DiskSync(layout, engines, folder=folder, options=OPTIONS) as sync:
            trainer.randomize(1)
            sync.update()
            before = hf_reference.hf_state_dict(trainer.chunks, config)
            trainer.randomize(2)
            with mock.patch.object(_core, "write_files", write):
                error = error_of(sync.update)
            dist.barrier()
            wrong = differences(in_files(newest(folder)), before)
            wrong += compare(engine, before)
            paused = engine is not None and engine.paused
            dist.barrier()
            sync.update()
            after = hf_reference.hf_state_dict(trainer.chunks, config)
            wrong += differences(in_files(newest(folder)), after) + compare(engine, after)
            dist.barrier()
    return {"error": error, "wrong": wrong, "paused": paused, "left": sorted(os.listdir(folder))}


def die_in_the_middle(
    config: Any, parallel: megatron_cpu.Parallel, folder: str, notes: str
) -> None:
    """Rank 2 is killed while it writes the second version; the others note what they raise."""
    original = _core.write_files

    def write(*arguments: Any) -> int:
        written = original(*arguments)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    with trainer_and_engine(config, parallel, {"tp": 1}) as (trainer, _):
        layout = megatron.layout(trainer.chunks, config)
        sync = DiskSync(layout, folder=folder, base=config, options=OPTIONS)
        trainer.randomize(1)
        sync.update()
        expected = hf_reference.hf_state_dict(trainer.chunks, config)
        trainer.randomize(2)
        _core.write_files = write
        if text := error_of(sync.update):
            Path(notes, f"rank{dist.get_rank()}").write_text(text)
        wrong = differences(in_files(newest(folder)), expected)
        wrong += differences(in_transformers(newest(folder), torch.float32), expected)
        Path(notes, f"wrong{dist.get_rank()}").write_text(" ".join(wrong))
        os._exit(0)  # groups that a rank has left cannot be taken down in order


def write_slowly(folder: str, calls: int) -> str:
    """Each call of rank 1 takes half a deadline; what update() raises."""
    original = _core.write_files

    def write(*arguments: Any) -> int:
        if dist.get_rank() == 1:
            time.sleep(1.0)
        return original(*arguments)

    mine = {f"{dist.get_rank()}.{i}": torch.full((64,), float(i)) for i in range(calls)}
    options = wsync.Options(deadline=2.0, progress=False)
    slow = mock.patch.object(_core, "write_files", write)
    with slow, DiskSync(mine, folder=folder, options=options) as sync:
        error = error_of(sync.update)
        dist.barrier()
        if not error:
            found = in_files(newest(folder))
            assert all(torch.equal(found[name], tensor) for name, tensor in mine.items())
            assert len(found) == calls * dist.get_world_size()
    return error
