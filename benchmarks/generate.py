"""Speed of generation: python benchmarks/generate.py [--models minimind_26m+minimind_64m] [--tokens N] [--rounds N] [--write].

Greedy answers of random weights, by models/generate.py and by transformers.generate of the same weights, in turns in one
process, uncompiled; all answers must be equal. Prompts: one, eight of equal length, eight of different lengths.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from lib.results import report_result, result_parser

GOAL = 1.0  # tokens per second relative to transformers
PROMPTS = {"1": [16], "8": [16] * 8, "8 of 9 to 44 tokens": range(9, 45, 5)}
Answers = list[list[int]]


def generators(model_name: str, tokens: int) -> tuple[Callable[[Answers], Answers], Callable[[Answers], Answers]]:
    """Return functions of prompts: the answers of this program and those of transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from models.generate import generate
    from models.language_model import create_model
    from runner.config.compose import compose_config

    torch.manual_seed(0)
    model = create_model(compose_config([f"model={model_name}"]).model).eval()
    model.prepare(is_packed=False)
    reference = Qwen3ForCausalLM(Qwen3Config(**model.cfg.to_hf_config())).eval()
    reference.load_state_dict(model.state_dict(), strict=False)
    reference.tie_weights()

    def own(prompts: Answers) -> Answers:
        return generate(
            model,
            prompts,
            max_new_tokens=tokens,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            stop_ids=[],
        )

    def of_transformers(prompts: Answers) -> Answers:
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            return reference.generate(ids, attention_mask=mask, **options)[:, length:].tolist()

    return own, of_transformers


def table_rows(model_name: str, tokens: int, rounds: int) -> Iterator[str]:
    import torch

    functions = generators(model_name, tokens)
    random = torch.Generator().manual_seed(1)
    for name, lengths in PROMPTS.items():
        prompts = [torch.randint(3, 6400, (length,), generator=random).tolist() for length in lengths]
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(-1, rounds):  # one warmup round
            answers = []
            for generate, times in zip(functions, seconds, strict=True):
                started = time.perf_counter()
                answers.append(generate(prompts))
                if number >= 0:
                    times.append(time.perf_counter() - started)
            if answers[0] != answers[1]:
                raise RuntimeError(f"{model_name}, {name} prompts: other answers than transformers")
        speeds = [len(prompts) * tokens / statistics.median(times) for times in seconds]
        ratio = statistics.median(other / own for own, other in zip(*seconds, strict=True))
        yield f"| {model_name} | {name} | {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio:.2f} |"


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--models", default="minimind_26m+minimind_64m")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    lines = [
        f"Tokens per second of greedy answers of {args.tokens} tokens, fp32; relative: median of {args.rounds} pairs, goal at least {GOAL}.",
        "",
        "| model | prompts | models/generate.py | transformers.generate | relative |",
        "|---|---|---|---|---|",
    ]
    lines += [row for name in args.models.split("+") for row in table_rows(name, args.tokens, args.rounds)]
    command = (
        f"python benchmarks/generate.py --models {args.models} --tokens {args.tokens} --rounds {args.rounds} --write"
    )
    report_result("generate", "Speed of generation beside transformers", command, "\n".join(lines), args.write)
