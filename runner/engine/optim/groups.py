"""Optimizers, parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from common.errors import UserError
from runner.engine.device.mesh import distribute_like
from runner.engine.optim.config import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class OptimizerGroup:
    """One optimizer or two (Muon for the matrices, AdamW for the rest), used as one; state goes by parameter name."""

    def __init__(self, parts: list[Optimizer], names: dict[nn.Parameter, str]) -> None:
        self.parts, self.names = parts, names

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.names)

    def set_lr(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["lr_scale"]

    def step(self, missed: Tensor) -> None:
        """Update what learns, or nothing where `missed` is 1. That is decided where the weights are: nobody waits for it."""
        for part in self.parts:
            part.found_inf = missed  # type: ignore[attr-defined]  # by this name torch's fused optimizers know it: weights, moments and counts stay
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """{"<parameter>/<key>": tensor}, e.g. "model.norm.weight/exp_avg": what survives, without hyper-parameters."""
        return {f"{name}/{key}": value for part in self.parts for p, name in self.names.items() for key, value in part.state.get(p, {}).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict()` gave. torch's own loader goes by position and overrides lr: neither is wanted here."""
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for word, value in state.items():
            name, key = word.rsplit("/", 1)
            by_name[name][key] = value
        unknown = set(by_name) - set(self.names.values())
        if unknown:
            raise UserError(
                "the checkpoint holds optimizer state of parameters that do not learn here",
                ", ".join(sorted(unknown)[:3]),
                "resume with the stage and model the run was started with",
            )
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    if self.names[p] in by_name:
                        part.state[p] = {key: distribute_like(value.to(p.device, copy=True), like=p) for key, value in by_name[self.names[p]].items()}


def build_optimizer(cfg: OptimizerConfig, model: nn.Module, num_layers: int) -> OptimizerGroup:
    """AdamW (https://arxiv.org/abs/1711.05101) over all that learns; or Muon (https://kellerjordan.github.io/posts/muon)
    for the hidden matrices and AdamW for embeddings, head, norms and biases. These last do not decay."""
    from runner.engine.optim.adamw import AdamW
    from runner.engine.optim.muon import Muon

    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p, name in names.items() if p.ndim == 2 and not _is_embedding(name)]
    others = [p for p in names if p not in set(matrices)]
    betas = (cfg.betas[0], cfg.betas[1])

    def groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
        by_scale: dict[float, list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            by_scale[cfg.layer_decay ** (num_layers + 1 - _depth(names[p], num_layers))].append(p)
        return [{"params": ps, "weight_decay": weight_decay, "lr_scale": scale} for scale, ps in by_scale.items()]

    if cfg.name == "adamw":
        return OptimizerGroup([AdamW(groups(matrices, cfg.weight_decay) + groups(others, 0.0), lr=cfg.lr, betas=betas, eps=cfg.eps, fused=True)], names)
    muon = Muon(groups(matrices, cfg.weight_decay), lr=cfg.lr, momentum=cfg.momentum)
    rest = [AdamW(groups(others, 0.0), lr=cfg.lr, betas=betas, eps=cfg.eps, fused=True)] if others else []
    return OptimizerGroup([muon, *rest], names)


def _is_embedding(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


def _depth(name: str, num_layers: int) -> int:
    """0 for the embedding, 1 + i for layer i, num_layers + 1 for what comes after the last layer."""
    if ".layers." in name:
        return 1 + int(name.split(".layers.")[1].split(".")[0])
    return 0 if "embed_tokens" in name else num_layers + 1
