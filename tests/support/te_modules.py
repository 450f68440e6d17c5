"""The modules of the TransformerEngine stand-in (see fake_te): parameters, no computation."""

import contextlib

import torch
from torch import nn


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

    def forward(self, *args, **options):
        raise NotImplementedError("the TransformerEngine stand-in has parameters only")


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


class Linear(_Module):
    def __init__(self, in_features, out_features, *, bias=True, return_bias=False, **options):
        super().__init__()
        self.in_features, self.out_features = _share(in_features, out_features, options)
        self.use_bias, self.return_bias = bias, return_bias
        self._norm(in_features, options)
        self.weight = _weight(self.out_features, self.in_features, options)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=self.weight.dtype))
            if options.get("parallel_mode") == "column":
                _mark(self.bias, 0)

    def _norm(self, features, options):
        """A place for the norm of LayerNormLinear, which comes before the weight."""


class LayerNormLinear(Linear):
    def _norm(self, features, options):
        dtype = options.get("params_dtype")
        self.layer_norm_weight = nn.Parameter(torch.ones(features, dtype=dtype))
        if options.get("normalization") != "RMSNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(features, dtype=dtype))


class GroupedLinear(_Module):
    def __init__(self, num_gemms, in_features, out_features, *, bias=True, **options):
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.in_features, self.out_features = _share(in_features, out_features, options)
        for index in range(num_gemms):
            weight = _weight(self.out_features, self.in_features, options)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                zeros = torch.zeros(self.out_features, dtype=weight.dtype)
                self.register_parameter(f"bias{index}", nn.Parameter(zeros))


class RMSNorm(_Module):
    def __init__(self, hidden_size=None, *, params_dtype=None, **options):
        super().__init__()
        size = options["normalized_shape"] if hidden_size is None else hidden_size
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype))


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size=None, *, params_dtype=None, **options):
        super().__init__(hidden_size, params_dtype=params_dtype, **options)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))


class DotProductAttention(_Module):
    def __init__(self, num_attention_heads=None, *args, softmax_type="vanilla", **options):
        super().__init__()
        if softmax_type == "learnable":
            heads = num_attention_heads // options["tp_size"]
            self.softmax_offset = nn.Parameter(torch.zeros(heads))


def get_cpu_offload_context(*args, **options):
    del args, options
    return contextlib.nullcontext(), lambda tensor: tensor


# what a module of the package holds besides empty classes
HOMES = {
    "pytorch": (DotProductAttention, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm),
    "pytorch.fp8": (FP8GlobalStateManager,),
    "pytorch.cpu_offload": (get_cpu_offload_context,),
}
