"""Which layers of a model get an adapter: `stage.lora.targets`, with the names that PEFT gives to target_modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from common.errors import UserError
from common.limits.patterns import match_patterns
from models.layers.adapter import is_adaptable, is_transposed
from models.layers.chunked_loss import LMHead

ALL_LINEAR = "all-linear"  # in stage.lora.targets, as in PEFT
PATTERN = "re:"  # a target that is a regular expression of a whole path, as PEFT's target_modules is if it is a string
MAX_LISTED_LAYERS = 6  # names that a message has


class LinearLayers(NamedTuple):
    adaptable: dict[str, nn.Module]  # by path
    heads: frozenset[str]  # paths of output layers, which all-linear leaves out
    refused: dict[str, str]  # path of a layer, or of a weight of one, that computes products without an adapter -> reason
    unused: frozenset[str] = frozenset()  # paths of adaptable layers that text does not use: no target selects them, an adapter of others may have them

    @property
    def selectable(self) -> dict[str, nn.Module]:
        """Layers that targets select from, by path."""
        return {path: layer for path, layer in self.adaptable.items() if path not in self.unused}


def linear_layers(model: nn.Module, output_layer: nn.Module | None = None) -> LinearLayers:
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
            if module is output_layer or isinstance(module, LMHead):
                heads.add(path)
        elif isinstance(module, nn.Linear) or is_transposed(module):
            refused[path] = f"is a {type(module).__name__}, which may compute more than a product"
        elif not isinstance(module, _ConvNd):
            stacked = (name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3)
            refused |= {f"{path}.{name}": "is one weight of all experts, not a linear layer of each" for name in stacked}
    return LinearLayers(adaptable, frozenset(heads), refused)


def select_layers(layers: LinearLayers, targets: list[str]) -> dict[str, nn.Module]:
    """Return the layers that `targets` name, in the order of the model. Raises UserError for a target that names none."""
    if ALL_LINEAR in targets and len(targets) > 1:
        raise _error(layers, targets, f"{ALL_LINEAR} stands alone in stage.lora.targets")
    if not targets:
        raise _error(layers, targets, "stage.lora.targets is empty")
    matched = _matched_paths(layers, targets)
    selectable = layers.selectable
    unknown = [target for target in targets if matched[target].isdisjoint(selectable)]
    if unknown:
        for target in unknown:
            reasons = layers.refused | dict.fromkeys(sorted(layers.unused), "is not used by text: it would get no gradient")
            if reason := next((f"{path} {reason}" for path, reason in reasons.items() if path in matched[target]), None):
                raise _error(layers, targets, f"stage.lora.targets has {target}, but {reason}")
        raise _error(layers, targets, f"unknown layers in stage.lora.targets: {', '.join(unknown)}")
    named = set().union(*matched.values())
    return {path: layer for path, layer in selectable.items() if path in named}


def left_out_warning(layers: LinearLayers, targets: list[str]) -> str | None:
    """Return a line that names what all-linear leaves out beside the output layer; None for nothing."""
    left_out = {path.rsplit(".", 1)[-1]: reason for path, reason in layers.refused.items() if path not in layers.heads and "shares its weight" not in reason}
    if targets != [ALL_LINEAR] or not left_out:
        return None
    name, reason = next(iter(left_out.items()))
    return f"stage.lora.targets=[{ALL_LINEAR}] leaves out {', '.join(list(left_out)[:MAX_LISTED_LAYERS])}: {name} {reason}; its weights stay as they are"


def short_names(others: Iterable[str], paths: set[str]) -> list[str]:
    """Return what names exactly `paths`: last parts of the paths if none of the `others` has one, else the paths."""
    names = {path.rsplit(".", 1)[-1] for path in paths}
    named = {path for path in others if path.rsplit(".", 1)[-1] in names}
    return sorted(names if named <= paths else paths)


def _matched_paths(layers: LinearLayers, targets: list[str]) -> dict[str, set[str]]:
    """Return the paths of layers, adaptable and refused ones, that each target names. Patterns may be those of a run or an adapter of others."""
    paths = [*layers.adaptable, *layers.refused]
    found = {target: {path for path in paths if path == target or path.endswith(f".{target}")} for target in targets}
    if ALL_LINEAR in targets:
        found[ALL_LINEAR] = set(layers.selectable) - layers.heads
    if patterns := [target for target in targets if target.startswith(PATTERN)]:
        try:
            rows = match_patterns([pattern.removeprefix(PATTERN) for pattern in patterns], paths)
        except ValueError as error:
            raise UserError(f"stage.lora.targets: {error}", f"stage.lora.targets={targets}", f"e.g. stage.lora.targets=['{PATTERN}.*(q|v)_proj']") from error
        found |= {pattern: {path for path, is_match in zip(paths, row, strict=True) if is_match} for pattern, row in zip(patterns, rows, strict=True)}
    return found


def _error(layers: LinearLayers, targets: list[str], message: str) -> UserError:
    allowed = sorted({path.rsplit(".", 1)[-1] for path in layers.selectable})
    fix = (
        f"stage.lora.targets=[{ALL_LINEAR}] is every linear layer but the output layer, or e.g. stage.lora.targets=[{allowed[-1]}]"
        if allowed
        else "stage.lora=null"
    )
    return UserError(f"{message}; adapters can be added to {', '.join(allowed) or 'no layer of this model'}", f"stage.lora.targets={targets}", fix)
