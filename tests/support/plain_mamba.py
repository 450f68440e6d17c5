"""What Megatron-Core's Mamba layers call of the package mamba_ssm, in plain torch."""

import torch
from torch import nn
from torch.nn import functional

mamba_chunk_scan_combined = None  # of inference


class RMSNorm(nn.Module):
    """Of groups of channels."""

    def __init__(self, size, eps=1e-5, group_size=None, norm_before_gate=True, **place):
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(size, **place))

    def forward(self, hidden):
        grouped = hidden.unflatten(-1, (-1, self.group_size))
        return self.weight * functional.rms_norm(
            grouped, (self.group_size,), None, self.eps
        ).flatten(-2)


def mamba_split_conv1d_scan_combined(
    zxBCdt, weight, bias, dt_bias, A, D, chunk_size, *, activation, headdim, ngroups, **_
):
    """A layer of Mamba 2 but for its linear parts and its norm.

    zxBCdt: (batch, length, channels); weight: (channels, taps), and bias, of the convolution;
    dt_bias, A and D: (heads).
    """
    assert activation == "silu"
    heads, inner = len(A), len(A) * headdim
    z, mixed, dt = zxBCdt.split([inner, len(weight), heads], -1)
    padded = functional.pad(mixed.transpose(1, 2), (weight.shape[1] - 1, 0))
    mixed = functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
    mixed = functional.silu(mixed).transpose(1, 2)
    x, *states = mixed.split([inner, (len(weight) - inner) // 2, (len(weight) - inner) // 2], -1)
    x = x.unflatten(-1, (heads, headdim))
    # Heads of a group share what is written to their states and read from them.
    B, C = (part.unflatten(-1, (ngroups, -1)) for part in states)
    B, C = (part.repeat_interleave(heads // ngroups, 2) for part in (B, C))
    dt = functional.softplus(dt + dt_bias)
    state, outputs = 0.0, []
    for step in range(x.shape[1]):
        decay = torch.exp(dt[:, step] * A)[..., None, None]
        written = (dt[:, step, :, None] * x[:, step])[..., None] * B[:, step, :, None]
        state = decay * state + written
        outputs.append((state * C[:, step, :, None]).sum(-1) + D[:, None] * x[:, step])
    return torch.stack(outputs, 1).flatten(-2) * functional.silu(z)
