"""Adapters of a model: freeze it, add adapters to chosen linear layers, switch, load and merge them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.limits.memory import machine_memory
from models.config import LoraConfig
from models.language_model import LanguageModel
from models.layers.adapter import LoraLayer, adapt, weight_shape
from models.lora_targets import LinearLayers, left_out_warning, linear_layers, select_layers

CALLED_TOKENS = 16  # of the forward pass that finds adapters without effect


def add_lora(model: nn.Module, cfg: LoraConfig, name: str = "default") -> None:
    """Freeze `model` in place and add an active adapter to every layer that `cfg.targets` names."""
    add_adapters(model, dict.fromkeys(select_layers(linear_layers_of(model), cfg.targets), cfg), name)


def add_adapters(model: nn.Module, settings: Mapping[str, LoraConfig], name: str = "default") -> None:
    """Freeze `model` in place and add an active adapter to the layers at the paths of `settings`. Raises KeyError if there is no such layer."""
    adaptable = linear_layers_of(model).adaptable
    layers = {path: adaptable[path] for path in settings}
    numbers, memory = sum(cfg.rank * sum(weight_shape(layers[path])) for path, cfg in settings.items()), machine_memory()
    if 4 * numbers > memory:
        rank = max(cfg.rank for cfg in settings.values())
        message = f"adapters of rank {rank:,} have {numbers:,} parameters, more than fit into {memory / 2**30:,.1f} GiB of memory"
        raise UserError(message, f"stage.lora.rank={rank}", "e.g. stage.lora.rank=8")
    model.requires_grad_(False)
    for path, layer in layers.items():
        adapt(layer).add(name, settings[path])
    use_adapter(model, name)


def check_adapters_are_called(model: LanguageModel) -> None:
    """Raise UserError if a forward pass reads the weight of an adapted layer without calling the layer, as state-space mixers of transformers do.

    Experts may have no token in it. The state of torch's random generators is kept.
    """
    layers = lora_layers(model)
    called: set[str] = set()
    hooks = [layer.register_forward_hook(partial(_record, called, path)) for path, layer in layers.items()]
    device = next(model.parameters()).device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            model(torch.arange(CALLED_TOKENS, device=device)[None] % model.cfg.vocab_size, lengths=torch.tensor([CALLED_TOKENS], device=device))
    finally:
        for hook in hooks:
            hook.remove()
    silent = sorted({path.rsplit(".", 1)[-1] for path in layers if path not in called and ".experts." not in path and model.is_used_by_text(path)})
    if silent:
        others = sorted({path.rsplit(".", 1)[-1] for path in called} - set(silent))
        fix = f"stage.lora.targets=[{','.join(others)}]" if others else "stage.lora=null"
        raise UserError(f"adapters of {', '.join(silent)} would have no effect: this model reads their weights without calling them", "stage.lora.targets", fix)


def _record(called: set[str], path: str, *_: object) -> None:
    called.add(path)


def lora_warnings(model: nn.Module, cfg: LoraConfig | None) -> list[str]:
    """Return a line about weights of a kind that all-linear leaves out; [] for none."""
    warning = None if cfg is None else left_out_warning(linear_layers_of(model), cfg.targets)
    return [warning] if warning else []


def linear_layers_of(model: nn.Module) -> LinearLayers:
    layers = linear_layers(model, getattr(model, "output_layer", None))
    is_used = getattr(model, "is_used_by_text", lambda path: True)  # of a LanguageModel
    return layers._replace(unused=frozenset(path for path in layers.adaptable if not is_used(path)))


def use_adapter(model: nn.Module, name: str | None) -> None:
    """Activate adapter `name` in every layer that has one and no adapter in the others; None: in no layer. Raises UserError if no layer has it."""
    names = sorted({own for layer in lora_layers(model).values() for own in layer.lora})
    if name is not None and name not in names:
        raise UserError(f"no layer has an adapter named {name}", f"adapter={name}", f"adapters: {', '.join(names) or 'none'}")
    for layer in lora_layers(model).values():
        layer.active_adapter = name if name is not None and name in layer.lora else None


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Within the context `model` is its base model in evaluation mode: the reference of a preference stage."""
    layers, training = list(lora_layers(model).values()), model.training
    active = [layer.active_adapter for layer in layers]
    use_adapter(model, None)
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for layer, name in zip(layers, active, strict=True):
            layer.active_adapter = name


def merge_adapters(model: nn.Module) -> None:
    """Add the active adapters to the weights and remove them."""
    for layer in lora_layers(model).values():
        layer.merge()


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".lora." in name}


def load_adapter(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load all adapter parameters. Raises KeyError with the names that are missing, unknown or of another shape."""
    own = adapter_state_dict(model)
    wrong = sorted(name for name in own.keys() | state.keys() if name not in own or name not in state or own[name].shape != state[name].shape)
    if wrong:
        raise KeyError(f"adapters differ in {len(wrong)} tensors: {', '.join(wrong[:4])}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(state[name])


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with adapters by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
