"""The modules of the TransformerEngine stand-in (see fake_te): its parameters, and inference.

Plain torch, without sequence parallelism, dropout and context parallelism; no gradients pass
between tensor-parallel ranks.
"""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False


class _Module(nn.Module):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        del state

    def set_tensor_parallel_group(self, group):
        self.tp_group = group


def _mark(tensor, dimension):
    tensor.tensor_model_parallel = True
    tensor.partition_dim = dimension
    tensor.partition_stride = 1
    return tensor


def _weight(rows, columns, options):
    weight = torch.empty(rows, columns, dtype=options.get("params_dtype"))
    mode = options.get("parallel_mode")
    return _mark(nn.Parameter(weight), 1 if mode == "row" else 0)


def _share(in_features, out_features, options):
    group, size = options.get("tp_group"), options.get("tp_size", 1)
    size = size if group is None else group.size()
    mode = options.get("parallel_mode")
    return (
        in_features // size if mode == "row" else in_features,
        out_features // size if mode == "column" else out_features,
    )


def _normalization(options):
    """(hidden, weight, bias) to the normalized values of a layer with these options."""
    epsilon, centered = options.get("eps", 1e-5), options.get("zero_centered_gamma", False)

    def normal(hidden, weight, bias):
        scale, shape = weight + 1 if centered else weight, hidden.shape[-1:]
        if bias is None:
            return functional.rms_norm(hidden, shape, scale, epsilon)
        return functional.layer_norm(hidden, shape, scale, bias, epsilon)

    return normal


class Linear(_Module):
    def __init__(self, in_features, out_features, *, bias=True, return_bias=False, **options):
        super().__init__()
        self.in_features, self.out_features = _share(in_features, out_features, options)
        self.use_bias, self.return_bias = bias, return_bias
        self.parallel_mode, self.tp_group = options.get("parallel_mode"), options.get("tp_group")
        self._norm(in_features, options)
        self.weight = _weight(self.out_features, self.in_features, options)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=self.weight.dtype))
            if options.get("parallel_mode") == "column":
                _mark(self.bias, 0)

    def _norm(self, features, options):
        """A place for the norm of LayerNormLinear, which comes before the weight."""

    def forward(self, hidden, **_):
        output = functional.linear(hidden, self.weight)
        if self.parallel_mode == "row" and self.tp_group is not None:
            dist.all_reduce(output, group=self.tp_group)
        if self.return_bias:
            return output, self.bias
        return output if self.bias is None else output + self.bias


class LayerNormLinear(Linear):
    def _norm(self, features, options):
        dtype = options.get("params_dtype")
        self.normal = _normalization(options)
        self.layer_norm_weight = nn.Parameter(torch.ones(features, dtype=dtype))
        if options.get("normalization") != "RMSNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(features, dtype=dtype))

    def forward(self, hidden, **_):
        bias = getattr(self, "layer_norm_bias", None)
        return super().forward(self.normal(hidden, self.layer_norm_weight, bias))


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms, in_features, out_features, *, bias=True, return_bias=False, **options
    ):
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.in_features, self.out_features = _share(in_features, out_features, options)
        for index in range(num_gemms):
            weight = _weight(self.out_features, self.in_features, options)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                zeros = torch.zeros(self.out_features, dtype=weight.dtype)
                self.register_parameter(f"bias{index}", nn.Parameter(zeros))

    def forward(self, hidden, splits, **_):
        """Rows of one expert after another; `splits` counts them."""
        own = range(self.num_gemms)
        biases = [getattr(self, f"bias{index}") if self.use_bias else None for index in own]
        added = [None] * self.num_gemms if self.return_bias else biases
        parts = torch.split(hidden, [int(count) for count in splits])
        output = torch.cat(
            [
                functional.linear(parts[index], getattr(self, f"weight{index}"), added[index])
                for index in own
            ]
        )
        return (output, biases) if self.return_bias else output


class RMSNorm(_Module):
    def __init__(self, hidden_size=None, *, params_dtype=None, **options):
        super().__init__()
        size = options["normalized_shape"] if hidden_size is None else hidden_size
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype))
        self.normal = _normalization(options)

    def forward(self, hidden):
        return self.normal(hidden, self.weight, getattr(self, "bias", None))


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size=None, *, params_dtype=None, **options):
        super().__init__(hidden_size, params_dtype=params_dtype, **options)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))


class DotProductAttention(_Module):
    """Causal attention, whatever mask is passed; `learnable` is gpt_oss's softmax with sinks."""

    def __init__(self, num_attention_heads, kv_channels, *, softmax_scale=None, **options):
        super().__init__()
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.scale = 1 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        if options.get("softmax_type") == "learnable":
            group, size = options.get("tp_group"), options.get("tp_size", 1)
            self.softmax_offset = nn.Parameter(
                torch.zeros(num_attention_heads // (size if group is None else group.size()))
            )

    def forward(self, query, key, value, *_, **__):
        length, batch, heads = query.shape[:3]
        shared = heads // key.shape[2]
        key, value = key.repeat_interleave(shared, 2), value.repeat_interleave(shared, 2)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (query @ key.mT * self.scale).masked_fill(later, -torch.inf)
        if hasattr(self, "softmax_offset"):
            sinks = self.softmax_offset[:, None, None].expand(batch, heads, length, 1)
            scores = torch.cat([scores, sinks], -1)
        output = scores.softmax(-1)[..., :length] @ value
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1)


class _SplitAlongDim:
    @staticmethod
    def apply(tensor, dimension, sizes):
        return torch.split(tensor, sizes, dimension)


def get_cpu_offload_context(*args, **options):
    del args, options
    return contextlib.nullcontext(), lambda tensor: tensor


# what a module of the package holds besides empty classes
HOMES = {
    "pytorch": (DotProductAttention, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm),
    "pytorch.attention": (_SplitAlongDim,),
    "pytorch.fp8": (FP8GlobalStateManager,),
    "pytorch.cpu_offload": (get_cpu_offload_context,),
}
