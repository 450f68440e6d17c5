"""The vision tower of Kimi-K2.5, whose code comes with its checkpoint: some parameters of its."""

import types

from torch import nn


def VisionTowerConfig(_):
    return types.SimpleNamespace()


ProjectorConfig = VisionTowerConfig


class MoonViT3dEncoder(nn.Linear):
    pass


class MoonViT3dPretrainedModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        del config
        self.encoder = MoonViT3dEncoder(4, 6)


class PatchMergerMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        del config
        self.proj = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 32))


def shapes():
    """{name: shape} in a checkpoint."""
    made = {"vision_tower": MoonViT3dPretrainedModel(None), "mm_projector": PatchMergerMLP(None)}
    return {
        f"{home}.{name}": tensor.shape
        for home, module in made.items()
        for name, tensor in module.state_dict().items()
    }
