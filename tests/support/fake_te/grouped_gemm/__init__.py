"""A stand-in for the grouped_gemm package: lets Megatron-Core build its legacy grouped experts."""

import types

ops = types.SimpleNamespace()
