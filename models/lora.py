"""LoRA: which layers get an adapter, and adapters that are added, disabled, loaded and merged.

`stage.lora.targets` chooses the layers, with the names that PEFT gives to target_modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from common.errors import UserError
from common.limits import machine_memory, match_patterns
from models.config import LoraConfig
from models.language_model import LanguageModel
from models.layers.adapter import LoraLayer, adapt, is_adaptable, is_transposed, weight_shape
from models.layers.chunked_loss import LMHead

ALL_LINEAR = "all-linear"  # in stage.lora.targets, as in PEFT
PATTERN = "re:"  # a target that is a regular expression of a whole path, as PEFT's target_modules is if it is a string
MAX_LISTED_LAYERS = 6  # names that a message has
# PEFT takes layers of these names for experts in many models that store all experts as one weight (deepseek_v3)
NAMES_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}


class LinearLayers(NamedTuple):
    adaptable: dict[str, nn.Module]  # by path
    heads: frozenset[str]  # paths of output layers, which all-linear leaves out
    # path of a layer, or of a weight of one, that no target selects -> reason; an adapter of others may have those that
    # are adaptable
    refused: dict[str, str]

    @property
    def selectable(self) -> dict[str, nn.Module]:
        """Layers that targets select from, by path."""
        return {path: layer for path, layer in self.adaptable.items() if path not in self.refused}


def linear_layers_of(model: LanguageModel) -> LinearLayers:
    output_layer = model.output_layer
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    adaptable, heads, refused = {}, set(), {}
    for path, module in model.named_modules():
        if ".lora." in path:
            continue
        if is_adaptable(module):
            if any(module.weight is embedding for embedding in embeddings):
                refused[path] = "shares its weight with the embedding, which merging would change"
                continue
            adaptable[path] = module
            if not model.is_used_by_text(path):
                refused[path] = "is not used by text: it would get no gradient"
            if module is output_layer or isinstance(module, LMHead):
                heads.add(path)
        elif isinstance(module, nn.Linear) or is_transposed(module):
            refused[path] = f"is a {type(module).__name__}, which may compute more than a product"
        elif not isinstance(module, _ConvNd):
            stacked = (name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3)
            refused |= {
                f"{path}.{name}": "has three dimensions, as weights of all experts have: it is no linear layer"
                for name in stacked
            }
    return LinearLayers(adaptable, frozenset(heads), refused)


def select_layers(layers: LinearLayers, targets: list[str]) -> dict[str, nn.Module]:
    """Return the layers that `targets` name, in the order of the model.

    Raises UserError for a target that names none.
    """
    if ALL_LINEAR in targets and len(targets) > 1:
        raise _error(layers, targets, f"{ALL_LINEAR} stands alone in stage.lora.targets")
    if not targets:
        raise _error(layers, targets, "stage.lora.targets is empty")
    matched = _matched_paths(layers, targets)
    selectable = layers.selectable
    unknown = [target for target in targets if matched[target].isdisjoint(selectable)]
    for target in unknown:
        for path, reason in layers.refused.items():
            if path in matched[target]:
                raise _error(layers, targets, f"stage.lora.targets has {target}, but {path} {reason}")
    if unknown:
        raise _error(layers, targets, f"unknown layers in stage.lora.targets: {', '.join(unknown)}")
    named = set().union(*matched.values())
    return {path: layer for path, layer in selectable.items() if path in named}


def lora_warnings(model: LanguageModel, cfg: LoraConfig) -> list[str]:
    """Return a line that names what all-linear leaves out beside the output layer, and one for adapters that PEFT
    reads as others.
    """
    layers, warnings = linear_layers_of(model), []
    left_out = {
        last_name(path): reason
        for path, reason in layers.refused.items()
        if path not in layers.adaptable and "shares its weight" not in reason
    }
    if cfg.targets == [ALL_LINEAR] and left_out:
        names, name = ", ".join(list(left_out)[:MAX_LISTED_LAYERS]), next(iter(left_out))
        warnings.append(
            f"stage.lora.targets=[{ALL_LINEAR}] leaves out {names}: {name} {left_out[name]}; its weights stay as they are"
        )
    misread = sorted(NAMES_OF_EXPERTS & {last_name(path) for path in lora_layers(model)})
    if misread and "gate_up_proj" in left_out:
        warnings.append(
            f"PEFT may read adapters of {', '.join(misread)} as those of experts: for PEFT leave these targets out, or export format=merged"
        )
    return warnings


def last_name(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def short_names(others: Iterable[str], paths: set[str]) -> list[str]:
    """Return what names exactly `paths`: last parts of the paths if none of the `others` has one, else the paths."""
    names = {last_name(path) for path in paths}
    named = {path for path in others if last_name(path) in names}
    return sorted(names if named <= paths else paths)


def _matched_paths(layers: LinearLayers, targets: list[str]) -> dict[str, set[str]]:
    """Return the paths of layers, adaptable and refused ones, that each target names.

    Patterns may be those of a run or an adapter of others.
    """
    paths = [*(layers.adaptable | layers.refused)]
    found = {target: {path for path in paths if path == target or path.endswith(f".{target}")} for target in targets}
    if ALL_LINEAR in targets:
        found[ALL_LINEAR] = set(layers.selectable) - layers.heads
    if patterns := [target for target in targets if target.startswith(PATTERN)]:
        try:
            rows = match_patterns([pattern.removeprefix(PATTERN) for pattern in patterns], paths)
        except ValueError as error:
            raise UserError(
                f"stage.lora.targets: {error}",
                f"stage.lora.targets={targets}",
                f"""e.g. "stage.lora.targets=['{PATTERN}.*(q|v)_proj']\"""",
            ) from error
        found |= {
            pattern: {path for path, is_match in zip(paths, row, strict=True) if is_match}
            for pattern, row in zip(patterns, rows, strict=True)
        }
    return found


def _error(layers: LinearLayers, targets: list[str], message: str) -> UserError:
    allowed = sorted({last_name(path) for path in layers.selectable})
    fix = (
        f"stage.lora.targets=[{ALL_LINEAR}] is every linear layer but the output layer, or e.g. stage.lora.targets=[{allowed[-1]}]"
        if allowed
        else "stage.lora=null"
    )
    return UserError(
        f"{message}; adapters can be added to {', '.join(allowed) or 'no layer of this model'}",
        f"stage.lora.targets={targets}",
        fix,
    )


CALLED_TOKENS = 16  # of the forward pass that finds adapters without effect


def add_lora(model: LanguageModel, cfg: LoraConfig) -> None:
    """Freeze `model` in place and add an adapter to every layer that `cfg.targets` names."""
    add_adapters(model, dict.fromkeys(select_layers(linear_layers_of(model), cfg.targets), cfg))


def add_adapters(model: LanguageModel, settings: Mapping[str, LoraConfig]) -> None:
    """Freeze `model` in place and add an adapter to the layers at the paths of `settings`.

    Raises KeyError if there is no such layer.
    """
    adaptable = linear_layers_of(model).adaptable
    layers = {path: adaptable[path] for path in settings}
    numbers, memory = (
        sum(cfg.rank * sum(weight_shape(layers[path])) for path, cfg in settings.items()),
        machine_memory(),
    )
    if 4 * numbers > memory:
        rank = max(cfg.rank for cfg in settings.values())
        message = f"adapters of rank {rank:,} have {numbers:,} parameters, more than fit into {memory / 2**30:,.1f} GiB of memory"
        raise UserError(message, f"stage.lora.rank={rank}", "e.g. stage.lora.rank=8")
    model.requires_grad_(False)
    for path, layer in layers.items():
        adapt(layer).add(settings[path])


def check_adapters_are_called(model: LanguageModel) -> None:
    """Raise UserError if a forward pass reads the weight of an adapted layer without calling the layer, as state-space
    mixers of transformers do.

    Experts may have no token in it. The state of torch's random generators is kept.
    """
    layers = lora_layers(model)
    called: set[str] = set()
    hooks = [layer.register_forward_hook(lambda *_, path=path: called.add(path)) for path, layer in layers.items()]
    device = next(model.parameters()).device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            model(
                torch.arange(CALLED_TOKENS, device=device)[None] % model.cfg.vocab_size,
                lengths=torch.tensor([CALLED_TOKENS], device=device),
            )
    finally:
        for hook in hooks:
            hook.remove()
    silent = sorted(
        {
            last_name(path)
            for path in layers
            if path not in called and ".experts." not in path and model.is_used_by_text(path)
        }
    )
    if silent:
        others = sorted({last_name(path) for path in called} - set(silent))
        fix = f"stage.lora.targets=[{','.join(others)}]" if others else "stage.lora=null"
        raise UserError(
            f"adapters of {', '.join(silent)} would have no effect: this model reads their weights without calling them",
            "stage.lora.targets",
            fix,
        )


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Within the context `model` is its base model in evaluation mode: the reference of a preference stage."""
    layers, training = lora_layers(model).values(), model.training
    for layer in layers:
        layer.is_enabled = False
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for layer in layers:
            layer.is_enabled = True


def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights and remove them."""
    for layer in lora_layers(model).values():
        layer.merge()


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the adapters by name; {} without adapters."""
    return {name: p for name, p in model.named_parameters() if ".lora." in name}


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with adapters by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
