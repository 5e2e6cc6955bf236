"""Sizes of the model of a run, from modules without memory: nothing is loaded, and no weight is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelConfig
from models.families.decoder import DecoderConfig
from runner.engine.config import Config
from runner.engine.optim.config import OptimizerConfig

# numbers of state per number of (hidden matrices, other parameters)
OPTIMIZER_NUMBERS = {"adamw": (2, 2), "muon": (1, 2)}


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
    adapter_numbers: int  # per token, in the adapters of a layer; 0: all weights are trained
    vocab: int  # V
    layer: LayerSizes
    optimizer_known: bool  # False: the state of this optimizer is taken to be that of AdamW

    def optimizer_numbers(self, optimizer: OptimizerConfig) -> int:
        of_matrices, of_others = OPTIMIZER_NUMBERS.get(optimizer.name, (2, 2))
        return of_matrices * self.matrices + of_others * (self.trained - self.matrices)


def model_facts(cfg: Config) -> ModelSizes:
    """Raises UserError as training would, e.g. for weights that do not fit into the memory of this machine."""
    import torch

    from models.language_model import create_model, trained_parameters
    from runner.engine.objectives.config import prepare_stage

    with torch.device("meta"):
        model = create_model(cfg.model)
        objective = prepare_stage(cfg.stage, model, cfg.init_from)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    hidden_matrices = {
        name
        for name, p in model.named_parameters()
        if p.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
    }
    trained = trained_parameters(model)
    matrices = [sizes[name] for name in hidden_matrices & trained.keys()]
    layer, lora = layer_sizes(cfg.model), cfg.stage.lora
    inactive = 1 - layer.experts_per_token / layer.experts if layer.experts else 0
    adapted = {name.split(".lora.")[0].rsplit(".", 1)[-1] for name in sizes if ".lora." in name}
    return ModelSizes(
        parameters=sum(sizes.values()),
        trained=sum(p.numel() for p in trained.values()),
        active=sum(sizes.values()) - round(inactive * sum(sizes[name] for name in sizes if ".experts." in name)),
        matrices=sum(matrices),
        largest_matrix=max(matrices, default=0),
        quantized=sum(sizes[name] for name in hidden_matrices - trained.keys()) if lora and lora.quantize else 0,
        reference=sum(p.numel() for extra in objective.extra_models for p in extra.parameters()),
        adapter_numbers=len(adapted) * lora.rank if lora else 0,
        vocab=cfg.model.vocab_size,
        layer=layer,
        optimizer_known=cfg.optimizer.name in OPTIMIZER_NUMBERS,
    )


def layer_sizes(model: ModelConfig) -> LayerSizes:
    is_decoder = isinstance(model, DecoderConfig)
    fields = vars(model) if is_decoder else model.to_hf_config()
    text = fields.get("text_config")  # of a multimodal model
    fields = fields | text if isinstance(text, dict) else fields

    def first(*names: str, default: int = 1) -> int:
        """Return the first positive number: families of transformers have names of their own."""
        values = (fields.get(name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), default)

    hidden = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head")
    head_width = first("head_dim", default=hidden // heads)
    experts = first("num_experts", "num_local_experts", "n_routed_experts", default=0)
    per_token = first("num_experts_per_tok", "moe_topk", "num_experts_per_token")
    of_experts = ("moe_intermediate_size",) if experts else ()
    return LayerSizes(
        layers=model.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        queries=heads * head_width,
        keys=first("num_key_value_heads", default=heads) * head_width,
        mlp=first(*of_experts, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        experts=experts,
        experts_per_token=per_token if experts else 1,
        qk_norm=bool(fields.get("qk_norm", True)),
        is_exact=is_decoder,
    )
