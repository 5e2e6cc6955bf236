"""What all pages share: templates, style sheets, scripts, and numbers as JSON.

A page is one file that makes no request and runs its own scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from common.errors import clean_texts, strip_control
from common.filesystem import retry_disk, write_atomic_file
from runner.reporting.columns import count_text, loss_text
from runner.reporting.metrics import Curve, choose_points

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

PAGES_DIR = Path(__file__).parent
CHART_LIBRARY, CHART_STYLE = "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"
STYLES = {
    "run": ("run.css", CHART_STYLE),
    "sweep": ("sweep.css", CHART_STYLE),
    "compare": ("run.css", CHART_STYLE, "table.css", "compare.css"),
    "list": ("run.css", "table.css", "list.css"),
}  # of each page, besides page.css
RELOAD_SECONDS = 5  # of a page whose runs train


def render(name: str, data: Any, **context: Any) -> str:
    """Return the page of the template `name` of this folder. `data`: what its scripts read as JSON."""
    created = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    page = _environment().get_template(f"{name}.jinja")
    return page.render(**_assets(name), data_json=json_block(data), created=created, **context)


@cache
def _environment() -> jinja2.Environment:
    """Return an environment that escapes every text and removes its control characters."""
    import jinja2
    from markupsafe import Markup, escape

    def without_control(value: object) -> object:
        # a path is no str, and holds any character
        return value if isinstance(value, Markup) else strip_control(str(value))

    def breakable(key: str) -> Markup:
        """Allow a line break after each dot and underscore of a long key."""
        return Markup(escape(strip_control(key)).replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>")))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES_DIR),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=without_control,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # the scripts of this process fit the templates that it began with
    )
    environment.filters |= {"breakable": breakable, "url": lambda name: quote(name, errors="backslashreplace")}
    environment.filters |= {"loss": loss_text, "count": count_text, "sort_value": sort_value}
    return environment


def sort_value(value: object) -> str:
    """Return the number by which a cell is sorted; empty, which is last, for anything else."""
    if not isinstance(value, int | float):
        return ""
    return "1e300" if value == math.inf else f"{value:.8g}"


@cache
def _assets(name: str) -> dict[str, Any]:
    """Return `scripts`, `css`, and a content security policy that allows these scripts only, by their hash."""
    from markupsafe import Markup

    libraries = [CHART_LIBRARY] if CHART_STYLE in STYLES[name] else []
    texts = [(PAGES_DIR / script).read_text(encoding="utf-8") for script in (*libraries, "charts.js", f"{name}.js")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
    return {
        "scripts": [*map(Markup, texts)],
        "policy": Markup(f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"),
        "css": Markup(
            "\n".join((PAGES_DIR / style).read_text(encoding="utf-8") for style in ("page.css", *STYLES[name]))
        ),
    }


def json_block(content: Any) -> Markup:
    """Return `content` as JSON that cannot end the <script> element it is in; its texts are without control characters,
    as those of the template are.
    """
    from markupsafe import Markup

    return Markup(json.dumps(clean_texts(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def encode_page(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically. Raises OSError if the disk refuses."""
    retry_disk(partial(write_atomic_file, path, encode_page(text)))


def short_number(value: float | None, digits: int = 7) -> float | int | None:
    """Return a number with the digits that a chart needs; None stays None."""
    if value is None:
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.{digits}g}")


def loss_curve(curve: Curve, limit: int, digits: int = 7) -> dict[str, Any] | None:
    """Return axes and loss of about `limit` points, None without any. A loss of None is not finite.

    `tokens` is the tokens per step where that holds for every point.
    """
    kept = choose_points(curve.columns.get("loss", ()), limit)
    if not kept:
        return None
    found = {
        name: [short_number(curve.columns[name][index], 7 if name == "tokens" else digits) for index in kept]
        for name in ("step", "tokens", "seconds", "loss")
    }
    step, tokens = found["step"], found["tokens"]
    per_step = (tokens[-1] or 0) / step[-1] if step[-1] else 0.0
    is_regular = per_step == int(per_step) and all(
        each == per_step * (at or 0) for each, at in zip(tokens, step, strict=True)
    )
    return {**found, "tokens": int(per_step)} if is_regular else found
