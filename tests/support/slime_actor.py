"""slime/backends/megatron_utils/actor.py as wsync.slime.install sees it: names and signatures as in
624b824, none of its code.  `support.slime_double` loads it under that name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def _deferring(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return wrapper


class _Own:
    """slime's own updater: what it is asked is noted."""

    def __init__(
        self,
        args: Any,
        model: Any,
        weights_getter: Any,
        *,
        model_name: str,
        quantization_config: Any,
    ) -> None:
        self.made_with = (args, model, weights_getter, model_name, quantization_config)
        self.weight_version = 0
        self.update_weight_metrics: dict[str, float] = {}
        self.connected: list[Any] = []

    def connect_rollout_engines(
        self,
        rollout_engines: Any,
        rollout_engine_lock: Any,
        engine_gpu_counts: Any = None,
        engine_gpu_offsets: Any = None,
        engine_parallel_configs: Any = None,
    ) -> None:
        self.connected.append((rollout_engines, engine_gpu_counts, engine_parallel_configs))

    def update_weights(self) -> None:
        self.weight_version += 1

    def pop_metrics(self) -> dict[str, float]:
        return {"slime/own": 1.0}


class _Disconnecting(_Own):
    def disconnect_rollout_engines(self) -> None:
        return


class UpdateWeightFromTensor(_Own):
    pass


class UpdateWeightFromDisk(_Disconnecting):
    pass


class UpdateWeightFromDistributed(_Disconnecting):
    pass


class UpdateWeightFromDiskDelta(_Disconnecting):
    pass


class MegatronTrainRayActor:
    @_deferring
    def init(self, args, role, with_ref=False, with_opd_teacher=False):
        self.args = args
        if args.custom_megatron_init_path:
            args.custom_megatron_init_path(args)
        if args.update_weight_mode == "delta":
            update_weight_cls = UpdateWeightFromDiskDelta
        elif args.update_weight_transport == "disk":
            update_weight_cls = UpdateWeightFromDisk
        elif args.colocate:
            update_weight_cls = UpdateWeightFromTensor
        else:
            update_weight_cls = UpdateWeightFromDistributed
        self.weight_updater = update_weight_cls(
            args,
            args.model,
            weights_getter=lambda: args.weights,
            model_name=args.model_name,
            quantization_config=args.quantization_config,
        )
        self.weight_updater.weight_version = args.update_weight_start_version
