"""Settings of a model of transformers: any of its causal language model classes, described by the content of a
config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional, Self

from common.errors import UserError
from common.settings import CHANGES_ROUNDING, at_least, one_of, settings_class
from models.config import ModelConfig, ModelSize, register_model
from models.families.hf_config import NO_INFLUENCE, ROPE_FIELDS, list_fields

# Fields of config.json, at any depth, that name code or kernels to download, how a file was written, or labels of other
# tasks: nothing of them is used.
UNREAD_FIELDS = """
    auto_map custom_pipelines attn_implementation _attn_implementation _attn_implementation_internal
    _experts_implementation _name_or_path transformers_version dtype torch_dtype num_labels id2label label2id
    problem_type
""".split()
# modules of more take minutes to create; by part of a field's name
MAX_COUNTS = {"layer": 1000, "block": 1000, "expert": 4096, "head": 1 << 16}
MAX_SIZE = 1 << 40  # of any integer
MAX_BUFFER_BYTES = 1 << 30  # of what a model stores besides its parameters: tables of positions, masks
IGNORED_BY_LOGITS = """
    architectures use_cache max_position_embeddings initializer_range router_aux_loss_coef output_router_logits
""".split()
CHOOSE_ANOTHER = "choose another model; docs/reference/models.md lists what loads"


@register_model("transformers")
@settings_class
class TransformersConfig(ModelConfig):
    """A causal language model class of transformers."""

    config: dict[str, Any]  # content of config.json
    # own (the kernels of this program), a kernel of transformers (sdpa, eager), or auto: own where it is exact
    attention: str = one_of("auto", "own", "sdpa", "eager", resume=CHANGES_ROUNDING)
    # weight of the load-balancing loss of experts; null: that of config.json, none if output_router_logits=false there
    router_aux_loss_coef: Optional[float] = at_least(0, 0.001)
    # model=transformers: folder, or owner/name[@revision] of the hub, of `config`, and of the weights unless init_from
    # names others
    path: Optional[str]

    model_class = "models.transformers_adapter.model.TransformersModel"
    hf_model_types: ClassVar[tuple[str, ...]] = ()  # `read_model_config` tries this family after all others

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.config.get("model_type"), str):
            raise UserError(
                "model.config has no model_type", "model.config", "model.path=FOLDER with a config.json reads it"
            )

    def size(self) -> ModelSize:
        import torch
        from transformers import AutoModelForCausalLM

        hf_config = create_hf_config(self.config, "model.config")
        with _reporting_values(self.name, "model.config"), torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
        parameters, buffers = list(hf.parameters()), sum(buffer.nbytes for buffer in hf.buffers())
        if buffers > MAX_BUFFER_BYTES:
            message = f"the model has tables of {buffers / 2**30:,.1f} GiB besides its parameters, at most {MAX_BUFFER_BYTES >> 30} GiB are allowed"
            raise UserError(
                message, "model.config", f"correct max_position_embeddings in config.json, or {CHOOSE_ANOTHER}"
            )
        return ModelSize(sum(parameter.numel() for parameter in parameters), len(parameters))

    @property
    def leaves_out_balance_loss(self) -> bool:
        """Whether config.json has output_router_logits=false: transformers adds the load-balancing loss of experts only
        with true.
        """
        text = self.config.get("text_config")
        fields = self.config | (text if isinstance(text, dict) else {})
        return self.router_aux_loss_coef is None and fields.get("output_router_logits") is False

    @property
    def has_dynamic_shapes(self) -> bool:
        return self._has_any(EXPERT_COUNTS)  # the number of tokens of an expert

    @property
    def has_attention_dropout(self) -> bool:
        return self._has_any(DROPOUT_FIELDS)

    def _has_any(self, names: Iterable[str]) -> bool:
        """Return whether one of these fields of the text model, or its default in transformers, is not 0."""
        fields = create_hf_config(self.config, self.name).get_text_config(decoder=True).to_dict()
        return any(fields.get(name) for name in names)

    def mathematics(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "config": {name: value for name, value in sorted(self.config.items()) if name not in IGNORED_BY_LOGITS},
        }

    def training_warnings(self) -> list[str]:
        unread = _unread_fields(self.config)
        message = f"transformers does not declare these fields of config.json for {self.name}; if the model needs them, its logits are wrong: "
        return [message + list_fields(unread)] if unread else []

    def to_hf_config(self) -> dict[str, Any]:
        return dict(self.config)

    @classmethod
    def from_hf_config(cls, raw: dict[str, Any], path: Path) -> Self:
        config = _without_unread(raw)
        text = create_hf_config(raw, str(path)).get_text_config(decoder=True)
        return cls(
            family="transformers",
            name=str(raw["model_type"]),
            vocab_size=text.vocab_size,
            num_hidden_layers=text.num_hidden_layers,
            max_position_embeddings=_exact_positions(text),
            tie_word_embeddings=bool(text.tie_word_embeddings),
            config=config,
            attention="auto",
            router_aux_loss_coef=None,
            path=None,
        )


# probabilities of attention dropout in configs of transformers
DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
# number of experts in configs of transformers
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# rope_type of embeddings that are others in a batch with a text beyond the trained length
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
# max_position_embeddings of a model without position embeddings, e.g. a state-space model (tokens)
UNBOUNDED_POSITIONS = 1 << 20


class LengthDependence(NamedTuple):
    """Rotary embeddings that depend on the number of tokens."""

    length: int  # tokens; up to it they do not
    at_each_token: bool  # beyond it they change with each token (dynamic); False: once (longrope)

    def invalidates_cache(self, before: int, after: int) -> bool:
        """Return whether keys that are cached from `before` tokens are not those of `after` tokens."""
        return after > self.length and (self.at_each_token or before <= self.length)


def _exact_positions(text: Any) -> int:
    """Return the longest sequence (tokens) whose logits do not depend on the other rows of its batch.

    `text`: configuration of transformers.
    """
    longest: int = getattr(text, "max_position_embeddings", None) or UNBOUNDED_POSITIONS
    dependence = length_dependence(text)
    return longest if dependence is None else min(longest, dependence.length or longest)


def length_dependence(config: Any) -> LengthDependence | None:
    """Return how the rotary embeddings of a configuration of transformers depend on the length of the text, None if
    they do not.
    """
    text = config.get_text_config(decoder=True)
    found = [
        settings
        for settings in _rope_settings(getattr(text, "rope_parameters", None))
        if settings["rope_type"] in LENGTH_DEPENDENT_ROPES
    ]
    if not found:
        return None
    lengths = [
        settings.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None) or 0
        for settings in found
    ]
    return LengthDependence(min(lengths), any(settings["rope_type"] == "dynamic" for settings in found))


def _rope_settings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of rotary embeddings: one set, or one of each layer type."""
    if isinstance(value, dict):
        if "rope_type" in value:
            yield value
        for inner in value.values():
            yield from _rope_settings(inner)


def _unread_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that the configuration class does not declare, without those that it computes
    itself with the same value (intermediate_size of Mamba). Some models read head_dim without.
    """
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[config["model_type"]]
    known = {field.name for field in dataclasses.fields(cls)} | {
        *("head_dim", "per_layer_config"),
        *cls.attribute_map,
        *ROPE_FIELDS,
        *NO_INFLUENCE,
        *UNREAD_FIELDS,
    }
    unread = {
        name: value
        for name, value in config.items()
        if name not in known and value is not None and not name.startswith("_")
    }
    if not unread:
        return {}
    computed = create_hf_config({name: value for name, value in config.items() if name not in unread}, "model.config")
    return {name: value for name, value in unread.items() if getattr(computed, name, None) != value}


def create_hf_config(config: dict[str, Any], where: str) -> Any:
    """Return the PreTrainedConfig of transformers.

    Raises UserError for a model that it has no causal language model class for.

    Remote code is never used: the class comes from model_type alone.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = config["model_type"]
    if config.get("quantization_config") is not None:
        raise UserError(
            "quantized weights cannot be trained", where, "choose the folder of the model that is not quantized"
        )
    if model_type not in CONFIG_MAPPING:
        fix = f"upgrade transformers if it is newer, or {CHOOSE_ANOTHER}" + (
            "; code of a model folder (auto_map) is never executed" if "auto_map" in config else ""
        )
        raise UserError(f"transformers has no model_type {model_type}", where, fix)
    cls = CONFIG_MAPPING[model_type]
    if cls not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model_type {model_type} is no causal language model", where, CHOOSE_ANOTHER)
    fields = {name: _clean(name, value, where) for name, value in _without_unread(config).items()}
    with _reporting_values(model_type, where):
        return cls.from_dict(fields)


def _without_unread(value: Any) -> Any:
    """Return the content of a config.json without UNREAD_FIELDS at any depth: what is exported or recorded names no
    code either.
    """
    if isinstance(value, list):
        return [_without_unread(item) for item in value]
    return (
        {name: _without_unread(item) for name, item in value.items() if name not in UNREAD_FIELDS}
        if isinstance(value, dict)
        else value
    )


@contextmanager
def _reporting_values(model_type: str, where: str) -> Iterator[None]:
    """Turn any exception of the code of a model into a UserError: it raises what it likes for values that its authors
    did not expect.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join((str(error) or type(error).__name__).split())[:200]
        raise UserError(
            f"transformers cannot create a {model_type} with these settings: {reason}",
            where,
            "correct config.json, or download it again",
        ) from error


def _clean(name: str, value: Any, where: str) -> Any:
    """Return the value of a field: transformers writes infinity and NaN as {"__float__": "Infinity"}.

    Raises UserError for a number beyond the limits.
    """
    if isinstance(value, list):
        return [_clean(name, item, where) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _clean(key, item, where) for key, item in value.items()}
    limit = min(
        [
            MAX_SIZE,
            *(
                limit
                for part, limit in MAX_COUNTS.items()
                if part in name.lower() and "dim" not in name and "size" not in name
            ),
        ]
    )
    if isinstance(value, int) and value > limit:
        raise UserError(f"{name} must be at most {limit:,}, got {str(value)[:30]}", where, CHOOSE_ANOTHER)
    return value
