"""The bodies of the transformers engine's requests: SGLang's fields, with their bounds.

A field is taken as the type it has, and one that is not known is refused: nothing that a client
asks for is left out silently.  What SGLang's clients send beside and means nothing here is known.
"""

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_NBYTES = 2 << 30
"""Of a whole body: it is read into memory before anything else is known of it."""
_MOST = 2**63 - 1  # what a tensor's sizes can be
_TOKENS = 2**31 - 1
_UNSET: Final[tuple[object, ...]] = (None, [], {})

Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
Word = Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Name = Annotated[Word, StringConstraints(min_length=1)]
TensorName = Annotated[Text, StringConstraints(min_length=1, max_length=4096)]
Path = Annotated[Text, StringConstraints(min_length=1, max_length=4095)]
Count = Annotated[int, Field(ge=0, le=_MOST)]
Token = Annotated[int, Field(ge=0, le=_TOKENS)]


class Body(BaseModel):
    """Ignored fields may have any value; neutral ones that value, which changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    _ignored: ClassVar[frozenset[str]] = frozenset({"rid", "http_worker_ipc"})
    _neutral: ClassVar[dict[str, object]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if name in cls.model_fields
            or not (
                name in cls._ignored
                or (name in cls._neutral and value in (*_UNSET, cls._neutral[name]))
            )
        }


class Pause(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Weights(Body):
    _ignored = Body._ignored | {
        *("crash_on_error", "disable_draft_model", "flush_cache", "is_async", "keep_pause"),
        *("manifest", "recapture_cuda_graph", "selector", "token_step", "torch_empty_cache"),
    }


class _Update(_Weights):
    load_format: Word | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Word | None = None


class Update(_Update):
    serialized_named_tensors: list[str]


class FromDisk(_Update):
    model_path: Path


class NamedGroup(_Weights):
    group_name: Name = "weight_update_group"


class NewGroup(NamedGroup):
    master_address: Name
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=_TOKENS)]
    world_size: Annotated[int, Field(ge=2, le=_TOKENS)]
    backend: Name = "nccl"


class FromDistributed(_Update):
    group_name: Name = "weight_update_group"
    names: list[TensorName]
    dtypes: list[Name]
    shapes: list[list[Count]]


class NewVersion(_Weights):
    new_version: Word
    abort_all_requests: bool = True


class Abort(_Weights):
    rid: Word = ""
    abort_all: bool = False
    _neutral: ClassVar[dict[str, object]] = {"finished_reason": None, "abort_message": None}


class Check(Body):
    action: Literal["checksum"] = "checksum"


class SamplingParams(Body):
    """How to generate; a temperature below 1e-6 takes the likeliest token, as SGLang's does.
    Neutral are SGLang's defaults of what this engine cannot do."""

    max_new_tokens: Token = 128
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    ignore_eos: bool = False
    _ignored = frozenset(
        {"no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval"}
    )
    _neutral: ClassVar[dict[str, object]] = {
        **dict.fromkeys(("top_p", "repetition_penalty", "n"), 1),
        **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_new_tokens"), 0),
        **dict.fromkeys(("stop", "stop_token_ids", "stop_regex", "json_schema", "regex", "ebnf")),
        **dict.fromkeys(("structural_tag", "logit_bias", "custom_params", "sampling_seed")),
        "top_k": -1,
    }


class Generate(Body):
    text: Text | list[Text] | None = None
    input_ids: list[Token] | list[list[Token]] | None = None
    sampling_params: SamplingParams = SamplingParams()
    rid: Word = ""
    return_logprob: bool = False
    _ignored = Body._ignored | {"log_metrics", "priority", "return_text_in_logprobs"}
    _neutral: ClassVar[dict[str, object]] = {
        **dict.fromkeys(("image_data", "video_data", "audio_data", "input_embeds", "lora_path")),
        **dict.fromkeys(("session_params", "custom_logit_processor", "token_ids_logprob")),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts", "stream"), False),
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
    }


class Logits(Body):
    input_ids: list[Token]
