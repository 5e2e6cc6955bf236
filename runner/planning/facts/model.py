"""Sizes of the model of a run, from modules without memory: nothing is loaded, and no weight is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.config import ModelConfig
from models.families.decoder import DecoderConfig
from runner.engine.config import Config
from runner.engine.optim.config import OptimizerConfig

# numbers of state per number of (hidden matrices, other parameters)
OPTIMIZER_NUMBERS = {"adamw": (2, 2), "muon": (1, 2)}
EXPERT_SETTINGS = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "moe_topk", "num_experts_per_token"),
)


@dataclass(frozen=True)
class LayerSizes:
    """Widths of a decoder layer (numbers per token)."""

    layers: int
    hidden: int  # D
    heads: int  # N
    queries: int  # N * H
    keys: int  # K * H, of keys and of values
    mlp: int  # F, of a dense MLP or of one expert
    experts: int  # E; 0: dense
    experts_per_token: int  # k; 1 for a dense model
    qk_norm: bool
    is_exact: bool  # False: of a family with layers of its own, which the formula only approximates


@dataclass(frozen=True)
class ModelSizes:
    parameters: int  # numbers; a tied weight counts once
    trained: int
    active: int  # that a token passes through; differs from `parameters` for a mixture of experts
    matrices: int  # trained numbers in hidden matrices
    largest_matrix: int  # numbers
    quantized: int  # numbers of frozen matrices that have 4 bits each
    reference: int  # numbers of the frozen copy that a preference stage compares with; 0: none
    adapted: frozenset[str]  # names of the linear layers with an adapter
    adapter_rank: int
    vocab: int  # V
    layer: LayerSizes
    # query heads, key heads, head width, where a kernel of the CPU is chosen for them
    attention_sizes: tuple[int, int, int] | None
    main_linear: tuple[int, int] | None  # of `runner.engine.kernels.main_linear`
    optimizer_known: bool  # False: the state of this optimizer is taken to be that of AdamW

    def optimizer_numbers(self, optimizer: OptimizerConfig) -> int:
        of_matrices, of_others = OPTIMIZER_NUMBERS.get(optimizer.name, (2, 2))
        return of_matrices * self.matrices + of_others * (self.trained - self.matrices)


def model_facts(cfg: Config) -> ModelSizes:
    """Raises UserError as training would, e.g. for weights that do not fit into the memory of this machine."""
    import torch

    from models.language_model import create_model, trained_parameters
    from runner.engine.kernels import main_linear
    from runner.engine.objectives.config import prepare_stage

    with torch.device("meta"):
        model = create_model(cfg.model)
        objective = prepare_stage(cfg.stage, model, cfg.init_from)
    named = dict(model.named_parameters())
    trained = trained_parameters(model)
    matrices = [
        p.numel() for name, p in trained.items() if p.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
    ]
    frozen = [
        p.numel()
        for name, p in named.items()
        if not p.requires_grad and p.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
    ]
    inactive = 1 - experts_share(cfg.model)
    parameters = sum(p.numel() for p in named.values())
    experts = sum(p.numel() for name, p in named.items() if ".experts." in name)
    return ModelSizes(
        parameters=parameters,
        trained=sum(p.numel() for p in trained.values()),
        active=parameters - round(inactive * experts),
        matrices=sum(matrices),
        largest_matrix=max(matrices, default=0),
        quantized=sum(frozen) if cfg.stage.lora is not None and cfg.stage.lora.quantize else 0,
        reference=sum(p.numel() for extra in objective.extra_models for p in extra.parameters()),
        adapted=frozenset(name.split(".lora.")[0].rsplit(".", 1)[-1] for name in named if ".lora." in name),
        adapter_rank=cfg.stage.lora.rank if cfg.stage.lora is not None else 0,
        vocab=cfg.model.vocab_size,
        layer=layer_sizes(cfg.model),
        attention_sizes=model.attention_sizes,
        main_linear=main_linear(model),
        optimizer_known=cfg.optimizer.name in OPTIMIZER_NUMBERS,
    )


def layer_sizes(model: ModelConfig) -> LayerSizes:
    if isinstance(model, DecoderConfig):
        return LayerSizes(
            layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            queries=model.num_attention_heads * model.head_dim,
            keys=model.num_key_value_heads * model.head_dim,
            mlp=model.moe_intermediate_size if model.num_experts else model.intermediate_size,
            experts=model.num_experts,
            experts_per_token=model.num_experts_per_tok if model.num_experts else 1,
            qk_norm=model.qk_norm,
            is_exact=True,
        )
    raw = _text_config(model)
    hidden = _first(raw, ("hidden_size", "n_embd", "d_model"), 1)
    heads = _first(raw, ("num_attention_heads", "n_head"), 1)
    head = _first(raw, ("head_dim",), hidden // heads)
    experts, per_token = (_first(raw, names, 0) for names in EXPERT_SETTINGS)
    return LayerSizes(
        layers=model.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        queries=heads * head,
        keys=_first(raw, ("num_key_value_heads",), heads) * head,
        mlp=_first(
            raw, ("moe_intermediate_size",) * bool(experts) + ("intermediate_size", "n_inner", "ffn_dim"), 4 * hidden
        ),
        experts=experts,
        experts_per_token=max(1, per_token),
        qk_norm=True,
        is_exact=False,
    )


def experts_share(model: ModelConfig) -> float:
    """Return the share of its experts that a token is routed to; 1 for a dense model."""
    sizes = layer_sizes(model)
    return sizes.experts_per_token / sizes.experts if sizes.experts else 1.0


def _text_config(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the text model; of a multimodal one they are nested."""
    raw = model.to_hf_config()
    nested = raw.get("text_config")
    return raw | nested if isinstance(nested, dict) else raw


def _first(raw: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    return next((value for name in names if isinstance(value := raw.get(name), int) and value > 0), default)
