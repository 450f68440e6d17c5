"""What a rank does in the tests of families against Megatron-Bridge (tests/test_bridge.py)."""

import contextlib
import dataclasses
import itertools
import re
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from support import kimi_vision, megatron_cpu
from support import megatron_cases as cases

import wsync.megatron
from wsync import _core
from wsync.families import registry
from wsync.families.rules import Expansion


class MiMoConfig(transformers.Qwen2Config):
    """A MiMo is a Qwen2 but for layers that predict further tokens."""

    model_type = "mimo"


class MiMoForCausalLM(transformers.Qwen2ForCausalLM):
    config_class = MiMoConfig


class NemotronHConfig(transformers.PretrainedConfig):
    """As transformers 4 has none."""

    model_type = "nemotron_h"


if "nemotron_h" not in transformers.CONFIG_MAPPING:
    transformers.AutoConfig.register("nemotron_h", NemotronHConfig)
transformers.AutoConfig.register("mimo", MiMoConfig)
transformers.AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def kimi_shapes(config):
    """Those of Kimi-K2.5's tensors: a DeepSeek-V3 under another name, and a vision tower."""
    with tempfile.TemporaryDirectory() as folder:
        _save_model(config.text_config, folder)
        text = {f"language_model.{name}": t.shape for name, t in tensors_of(folder).items()}
    return text | kimi_vision.shapes()


# of embedding and head, which a layer of multi-token prediction has none of its own of
COPIES = re.compile(r"\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$")


@dataclass(frozen=True)
class Mtp:
    """Layers of multi-token prediction, which models of transformers do not have.

    `layer`: the beginning of their names, with {layer}, which counts on from the model's last one,
    or {mtp}, which does not.  `names`: those of the norms of embedding and hidden state, of the
    last norm and of the projection.  `count`: how many.  `block`: of how many layers each consists;
    they have the shapes of as many of the model's last ones.  `fused`: whether the experts of a
    layer are together.
    """

    layer: str
    names: tuple[str, str, str, str]
    count: int = 1
    block: int = 1
    fused: bool = False

    def shapes(self, state, config):
        found, config = {}, config.get_text_config()
        for number in range(self.count):
            numbers = {"mtp": number, "layer": config.num_hidden_layers + number}
            for name in self.names[:3]:
                found[name.format(**numbers)] = (config.hidden_size,)
            found[self.names[3].format(**numbers)] = (config.hidden_size, 2 * config.hidden_size)
        for number in range(self.count * self.block):
            like = config.num_hidden_layers - self.block + number % self.block
            base = self.layer.format(mtp=number, layer=config.num_hidden_layers + number)
            for name, tensor in state.items():
                _, inside, rest = name.partition(f".layers.{like}.")
                if inside:
                    found[base + rest] = tensor.shape
        return _fused_shapes(found) if self.fused else found


def _fused_shapes(shapes):
    found = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    for name, shape in shapes.items():
        layer, first, part = name.partition(".experts.0.")
        if first:
            rows, columns = shape
            count = sum(other.startswith(f"{layer}.experts.") for other in shapes) // 3
            if part == "gate_proj.weight":
                found[f"{layer}.experts.gate_up_proj"] = (count, 2 * rows, columns)
            elif part == "down_proj.weight":
                found[f"{layer}.experts.down_proj"] = (count, rows, columns)
    return found


@dataclass(frozen=True)
class Case:
    """A small model of a family, which is its configuration's model_type.

    `extra`: attributes that Megatron-Bridge reads and the configuration's class does not know.
    `shapes`: those of a configuration's tensors, where transformers has no model of the family.
    `named`: the family as wsync calls it, where that is another name.
    """

    family: str
    fields: dict
    extra: dict = field(default_factory=dict)
    mtp: Mtp | None = None
    shapes: Callable | None = None
    named: str = ""


def values_of(name, shape):
    """Values that tell every element apart."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator) * 0.3
    return values + 1.0 if "norm" in name else values


@torch.no_grad()
def save(config, case, folder):
    """A checkpoint by transformers, and with the layers that it lacks."""
    if case.shapes is not None:
        config.save_pretrained(folder)
        state = {name: values_of(name, shape) for name, shape in case.shapes(config).items()}
    else:
        _save_model(config, folder)
        state = tensors_of(folder)
    if case.mtp is not None:
        shapes = case.mtp.shapes(state, config)
        state |= {name: values_of(name, shape) for name, shape in shapes.items()}
    save_file(state, Path(folder, "model.safetensors"), {"format": "pt"})


def _save_model(config, folder):
    seeing = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    model = kind.from_config(config).float()
    buffers = [item for item in model.named_buffers() if "correction_bias" in item[0]]
    for name, tensor in [*model.named_parameters(), *buffers]:
        tensor.copy_(values_of(name, tensor.shape))
    model.save_pretrained(folder)


def tensors_of(folder):
    state = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        state |= load_file(path)
    return state


def provider_of(bridge, parallel, computes, mtp):
    """Megatron-Bridge's recipe of the model, for float32 on a CPU without fused kernels.

    mtp: the number of layers of multi-token prediction, or None."""
    from megatron.core.transformer.enums import AttnBackend

    provider = bridge.to_megatron_provider(load_weights=True)
    options = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.tp if parallel.etp is None else parallel.etp,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "autocast_dtype": torch.float32,
        "use_cpu_initialization": True,
        "make_vocab_size_divisible_by": 16,
        "moe_token_dispatcher_type": "allgather",
        "sequence_parallel": parallel.tp > 1 and not computes,
        "attention_backend": AttnBackend.auto,
        "deterministic_mode": True,  # the gated delta net in plain torch
    }
    off = "bf16 fp16 gradient_accumulation_fusion bias_dropout_fusion bias_activation_fusion \
        persist_layer_norm moe_permute_fusion moe_router_fusion cross_entropy_loss_fusion \
        apply_rope_fusion masked_softmax_fusion moe_shared_expert_overlap"
    for name, value in (options | dict.fromkeys(off.split(), False)).items():
        setattr(provider, name, value)
    provider.mtp_num_layers = mtp
    provider.finalize()
    return provider


@contextlib.contextmanager
def bridged(folder, case, parallel, *, computes=False):
    """(bridge, Megatron's chunks, configuration) of a new checkpoint in a folder."""
    from megatron.bridge import AutoBridge

    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        if dist.get_rank() == 0:
            config = transformers.AutoConfig.for_model(case.family, **case.fields)
            for name, value in case.extra.items():
                setattr(config, name, value)
            save(config, case, folder)
        dist.barrier()
        bridge = AutoBridge.from_hf_pretrained(
            folder, torch_dtype=torch.float32, trust_remote_code=True
        )
        mtp = None if case.mtp is None else case.mtp.count
        chunks = provider_of(bridge, parallel, computes, mtp).provide_distributed_model(
            wrap_with_ddp=False, bf16=False, fp16=False, use_cpu_initialization=True
        )
        yield bridge, chunks, transformers.AutoConfig.from_pretrained(folder)


def merged(mine):
    everyone = [None] * mine.ranks
    dist.all_gather_object(everyone, mine.layout.to_bytes())
    return _core.Layout.merge([_core.Layout.from_bytes(data) for data in everyone])


def matches(folder, case, parallel):
    """Compares a layout's shards with the checkpoint that Megatron-Bridge has loaded, then exports.

    Returns (tensors, shards, rules with a planted fault); shards are counted on rank 0 only.
    """
    family = case.family
    with bridged(folder, case, parallel) as (bridge, chunks, config):
        state = tensors_of(folder)
        options = {"cpu": True, "show_progress": False}
        if family == "kimi_k25":  # or its experts have four bits
            options["weight_dtype"] = torch.float32
        exported = dict(bridge.export_hf_weights(chunks, **options))
        exported = {name: t for name, t in exported.items() if not COPIES.search(name)}
        assert not exported.keys() ^ state.keys(), sorted(exported.keys() ^ state.keys())
        for name, tensor in state.items():
            assert torch.equal(exported[name], tensor), name
        state = published(family, state)
        family = case.named or family
        mine = wsync.megatron.layout(chunks, config, model_name=family)
        mine.bind()
        buffers = [None] * mine.ranks
        dist.all_gather_object(buffers, [cases.host_bytes(t) for t in mine.tensors()])
        whole = merged(mine)
        shards = cases.check_everything(whole, buffers, state) if mine.rank == 0 else 0
        rules = split_rules(mine, config, family)
        for rule in rules:
            with swapped(rule):
                other = merged(wsync.megatron.layout(chunks, config, model_name=family))
            if mine.rank == 0:
                with pytest.raises(AssertionError):
                    cases.check_everything(other, buffers, state)
        return len(state), shards, rules


def published(family, state):
    """A checkpoint as such are published, where transformers 5 saves experts otherwise."""
    if family == "qwen3_vl_moe":
        return {n: t.mT.contiguous() if ".mlp.experts." in n else t for n, t in state.items()}
    if family != "qwen3_5_moe":
        return state
    found = {n: t for n, t in state.items() if n.startswith("mtp.") or ".mlp.experts." not in n}
    for name in state:
        experts, first, _ = name.partition(".experts.0.gate_proj.weight")
        if not first or name in found:
            continue
        every = range(sum(other.startswith(f"{experts}.experts.") for other in state) // 3)
        gate, up, down = (
            torch.stack(
                [state[f"{experts}.experts.{number}.{part}_proj.weight"] for number in every]
            )
            for part in ("gate", "up", "down")
        )
        found[f"{experts}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"{experts}.experts.down_proj"] = down
    return found


def learnt(folder, case, parallel):
    """As matches, of a layout by Megatron-Bridge's own mappings; (tensors, shards)."""
    with bridged(folder, case, parallel) as (bridge, chunks, config):
        state = tensors_of(folder)
        mine = wsync.megatron.layout(chunks, config, bridge=bridge)
        buffers = [None] * mine.ranks
        dist.all_gather_object(buffers, [cases.host_bytes(t) for t in mine.tensors()])
        whole = merged(mine)
        shards = cases.check_everything(whole, buffers, state) if mine.rank == 0 else 0
        return len(state), shards


def split_rules(mine, config, family):
    """Names of the rules that put a parameter together from several pieces, on any rank."""
    model = registry.read_model(config, family)
    found = set()
    for name in mine.names:
        if model.family.copy_of(name) is not None:
            continue
        rule, _ = model.family.find(name)
        if pair(model.family.expand(rule, name, model.sizes, inferred=1).pieces) is not None:
            found.add(rule.name)
    everyone = [None] * mine.ranks
    dist.all_gather_object(everyone, found)
    return sorted(set().union(*everyone))


def pair(pieces):
    """Two pieces of one extent, of two tensors where there are such."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(pieces, 2)
        if (a.extent, a.axes) == (b.extent, b.axes) and a.source_start != b.source_start
    ]
    return min(pairs, key=lambda two: two[0].name == two[1].name, default=None)


@contextlib.contextmanager
def swapped(name):
    """Layouts that are made meanwhile take two pieces of a rule for each other."""
    right = Expansion.pieces.func

    def wrong(expansion):
        pieces = right(expansion)
        if expansion.rule.name != name:
            return pieces
        a, b = pair(pieces)
        change = {
            a: dataclasses.replace(a, source_start=b.source_start),
            b: dataclasses.replace(b, source_start=a.source_start),
        }
        return tuple(change.get(piece, piece) for piece in pieces)

    with mock.patch.object(Expansion, "pieces", property(wrong)):
        yield


def logits_differ(folder, case, parallel):
    """Largest difference between Megatron's and transformers' logits of one checkpoint, and the
    largest logit."""
    with bridged(folder, case, parallel, computes=True) as (_, chunks, config):
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(0, config.vocab_size, (2, 16), generator=generator)
        with torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            want = model.eval()(ids).logits
        for chunk in chunks:
            chunk.eval()
            if getattr(chunk, "rotary_pos_emb", None) is not None:
                chunk.rotary_pos_emb.cp_group = None  # every rank computes the whole sequence
        trainer = megatron_cpu.CpuTrainer(chunks, config)
        found = trainer.logits(ids)
        return float((found - want).abs().max()), float(want.abs().max())
