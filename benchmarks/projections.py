"""One product for gate and up of a SwiGLU network, or one for each, forward and backward, on the CPU: python
benchmarks/projections.py [--rounds 3] [--write].

In fp32, by the default kernel, with trained and with frozen weights. In 16 bits weights are cast anyway, and joined
meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

from lib.results import report_result, result_parser

SIZES = ((512, 1408), (1024, 2816), (2048, 5632))  # hidden, width
TOKENS = (64, 256)
HEAD = "| network | tokens | weights | joined | separate | separate relative to joined |\n|---|---|---|---|---|---|"


def table(rounds: int) -> str:
    from models.families.decoder import DecoderConfig
    from runner.config.compose import compose_config
    from runner.engine.choices.layer_choices import JOINED, SEPARATE, ProjectionShape, measure_projections

    model = compose_config(["model=minimind_26m", "stage=pretrain"]).model
    assert isinstance(model, DecoderConfig)
    lines = [HEAD]
    for hidden, width in SIZES:
        cfg = dataclasses.replace(model, hidden_size=hidden)
        for tokens in TOKENS:
            for weights in ("trained", "frozen"):
                shape = ProjectionShape(
                    tokens, hidden, width, "float32", "auto", has_bias=cfg.mlp_bias, is_trained=weights == "trained"
                )
                times = [measure_projections(cfg, shape, [JOINED, SEPARATE]) for _ in range(rounds)]
                joined, separate = (
                    statistics.median(each[name] for each in times) * 1000 for name in (JOINED, SEPARATE)
                )
                lines.append(
                    f"| {hidden} x {width} | {tokens} | {weights} | {joined:.1f} | {separate:.1f} | {separate / joined:.2f} |"
                )
    return "\n".join(lines)


def main(args: argparse.Namespace) -> None:
    from runner.engine.device.cpu.spinning import set_wait_policy

    set_wait_policy()  # as train.py does, before torch is imported
    command = f"python benchmarks/projections.py --rounds {args.rounds} --write"
    report_result(
        "projections", "Joined and separate projections on the CPU, ms", command, table(args.rounds), args.write
    )


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="medians over this many (default: 3)")
    main(parser.parse_args())
