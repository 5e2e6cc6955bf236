"""How the sizes of activations grow with the width of a decoder: python benchmarks/coordinate_check.py [--write].

A few steps at one learning rate at several widths, with and without optimizer.mup_base_width. The table has the slope
of log(RMS of the change since the first step) against log(width) for each activation: within 0.1 of 0 is flat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from lib.results import report_result, result_parser

if TYPE_CHECKING:
    from torch import Tensor, nn

BASE, HEAD_DIM, LAYERS = 64, 32, 2
WIDTHS = (64, 128, 256, 512)
STEPS, ROWS, TOKENS, VOCABULARY = 4, 8, 64, 512
LEARNING_RATES = {"adamw": 2e-3, "muon": 2e-2}
FLAT = 0.1  # largest slope


def activations(model: nn.Module, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the embedding, the residual stream after each layer, all logits, and those of the labels.

    A logit that no gradient aims at changes by a sum of random signs, which vanishes with the width: only those of the
    labels show what is learned.
    """
    import torch

    found: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, inputs: object, output: object) -> None:
        found[name] = (output[0] if isinstance(output, tuple) else output).detach().float()

    modules = {"embedding": model.input_layer} | {f"layer {i}": layer for i, layer in enumerate(model.layers)}
    hooks = [module.register_forward_hook(partial(record, name)) for name, module in modules.items()]
    with torch.no_grad():
        found["all logits"] = model(input_ids).logits.float()
        found["logits of labels"] = found["all logits"].gather(-1, labels.unsqueeze(-1))
    for hook in hooks:
        hook.remove()
    return found


def changes(
    width: int, optimizer: str, base_width: int, seed: int = 0, steps: int = STEPS, tied: bool = True
) -> dict[str, float]:
    """Return the RMS of the change of each activation in `steps` steps on random tokens with a structure."""
    import torch

    from models.language_model import create_model
    from runner.config.compose import compose_config
    from runner.engine.optim.groups import build_optimizer
    from runner.engine.optim.mup import scale_initial_weights

    sizes = {"hidden_size": width, "num_attention_heads": width // HEAD_DIM, "num_key_value_heads": max(1, width // HEAD_DIM // 2)}  # fmt: skip
    sizes |= {"head_dim": HEAD_DIM, "intermediate_size": 3 * width, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}  # fmt: skip
    overrides = [f"model.{name}={value}" for name, value in sizes.items()]
    overrides += [f"optimizer={optimizer}", f"optimizer.lr={LEARNING_RATES[optimizer]}", f"optimizer.mup_base_width={base_width}", f"model.tie_word_embeddings={str(tied).lower()}"]  # fmt: skip
    cfg = compose_config(overrides)
    torch.manual_seed(seed)
    model = create_model(cfg.model)
    if base_width:
        scale_initial_weights(cfg.optimizer, model)
    optimizers = build_optimizer(cfg.optimizer, model, LAYERS)
    optimizers.set_lr(cfg.optimizer.lr)
    generator = torch.Generator().manual_seed(seed)  # the same tokens at every width: a walk of small strides
    strides = torch.randint(1, 4, (ROWS, TOKENS + 1), generator=generator)
    tokens = (torch.randint(VOCABULARY, (ROWS, 1), generator=generator) + strides.cumsum(1)) % VOCABULARY
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    before = activations(model, inputs, labels)
    for _ in range(steps):
        (model(inputs, labels, reduction="sum").nll / labels.numel()).backward()
        optimizers.step(torch.zeros(()))
        optimizers.zero_grad()
    return {name: (value - before[name]).square().mean().sqrt().item() for name, value in activations(model, inputs, labels).items()}  # fmt: skip


def slopes(
    optimizer: str, base_width: int, widths: Iterable[int] = WIDTHS, seeds: int = 3, **options: int
) -> dict[str, float]:
    """Return for each activation the slope of log(RMS of its change) against log(width)."""
    logs = [math.log(width) for width in widths]
    runs = [[changes(width, optimizer, base_width, seed, **options) for seed in range(seeds)] for width in widths]
    return {
        name: statistics.linear_regression(
            logs, [statistics.mean(math.log(run[name]) for run in each) for each in runs]
        ).slope
        for name in runs[0][0]
    }


def table() -> str:
    lines, drifts = [], []
    for tied in (True, False):
        for optimizer in LEARNING_RATES:
            for base_width in (0, BASE):
                found = slopes(optimizer, base_width, tied=tied)
                label = f"{optimizer}, {'tied' if tied else 'own'} output weights, {'muP' if base_width else 'without'}"
                lines.append(f"| {label} | {' | '.join(f'{slope:+.2f}' for slope in found.values())} |")
                drifts += [
                    f"- {label}: {name} {slope:+.2f}"
                    for name, slope in found.items()
                    if base_width and abs(slope) > FLAT and name != "all logits"
                ]
    head = f"| slope | {' | '.join(found)} |\n{'|---' * (len(found) + 1)}|"
    text = f"Widths {', '.join(map(str, WIDTHS))}, {STEPS} steps, learning rates {LEARNING_RATES}, mean of 3 seeds.\n\n{head}\n"
    verdict = ["", "Not flat with muP:", *drifts] if drifts else ["", f"With muP every slope is within {FLAT} of 0."]
    return text + "\n".join([*lines, *verdict])


if __name__ == "__main__":
    args = result_parser(__doc__).parse_args()
    report_result("coordinate_check", "Activations over widths", "python benchmarks/coordinate_check.py --write", table(), args.write)  # fmt: skip
