"""The bodies of the transformers engine's requests: those of SGLang's fields that mean something
here.  As SGLang does, it passes over others."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class Pause(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Update(BaseModel):
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class Update(_Update):
    serialized_named_tensors: list[str]


class FromDisk(_Update):
    model_config = ConfigDict(protected_namespaces=())  # pydantic before 2.10 warns of the name

    model_path: str


class NamedGroup(BaseModel):
    group_name: str = "weight_update_group"


class NewGroup(NamedGroup):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"


class FromDistributed(_Update):
    group_name: str = "weight_update_group"
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Count]]


class NewVersion(BaseModel):
    new_version: str
    abort_all_requests: bool = True


class Abort(BaseModel):
    rid: str = ""
    abort_all: bool = False


class SamplingParams(BaseModel):
    """How to generate; a temperature below 1e-6 takes the likeliest token, as SGLang's does."""

    max_new_tokens: Count = 128
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    ignore_eos: bool = False


class Generate(BaseModel):
    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingParams = SamplingParams()
    rid: str = ""
    return_logprob: bool = False


class Logits(BaseModel):
    input_ids: list[int]
