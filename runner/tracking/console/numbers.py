"""Numbers of a run as short text."""

from __future__ import annotations

from collections.abc import Mapping

MetricValues = Mapping[str, int | float | None]

# How a metric is printed; one that is not listed is printed as `name value`.
VALUE_FORMATS = {
    "loss": "loss {:.3f}",
    "lr": "lr {:.1e}",
    "grad_norm": "gnorm {:.2f}",
    "perplexity": "perplexity {:.4g}",
}
BAR_FIELDS = ("loss", "lr", "tokens_per_second")
HIDDEN_FIELDS = ("epoch", "loss_tokens", "tokens", "tokens_per_second", "data_wait", "save_stall", "peak_memory")
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_values(numbers: MetricValues, validation: str) -> str:
    """Return `loss 3.412 | val 3.50@100 | lr 4.9e-04 | 41.2k tok/s`; `validation` is inserted after the loss."""
    parts = []
    for name, value in numbers.items():
        if name in HIDDEN_FIELDS:
            continue
        parts.append(f"{name} not finite" if value is None else VALUE_FORMATS.get(name, name + " {:.4g}").format(value))
        if name == "loss" and validation:
            parts.append(validation)
    speed = numbers.get("tokens_per_second")
    if speed is not None:
        parts.append(f"{format_rate(speed)} tok/s")
    return " | ".join(parts)


def format_rate(per_second: float) -> str:
    """Return `950` or `41.2k`."""
    return f"{per_second / 1000:.1f}k" if per_second >= 1000 else f"{per_second:.0f}"


def remaining_seconds(
    first: tuple[int | float, float], last: tuple[int | float, float], total_steps: int
) -> float | None:
    """Return the seconds from the `last` logged step to the last step of the run, at the mean pace since the `first`
    one of this attempt.

    Both are (step, seconds), evaluations and saves included: they come again. None where no step lies between.
    """
    steps, seconds = last[0] - first[0], last[1] - first[1]
    return seconds / steps * max(0, total_steps - last[0]) if steps > 0 else None


def format_seconds(seconds: float) -> str:
    """Return `00:18:20`."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"


def format_size(size: float) -> str:
    """Return `612 MiB` for a number of bytes."""
    unit = 0
    while size >= 1024 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {BYTE_UNITS[unit]}" if size >= 100 or unit == 0 else f"{size:.3g} {BYTE_UNITS[unit]}"
