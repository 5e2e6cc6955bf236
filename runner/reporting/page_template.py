"""What the pages of runs and sweeps share: templates, style sheet, and settings as text.

Settings of a saved config as the text that a page shows.

What the pages of runs and sweeps share: the template environment, the style sheet, and one file that makes no request
and runs its own scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from common.errors import strip_control


def flatten_settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each setting, values as they are typed: null, true, 0.001."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flatten_settings(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

CSS = Path(__file__).with_name("page.css")
RELOAD_SECONDS = 5  # of a page whose runs train
VENDOR = Path(__file__).with_name("run_page") / "vendor"
CHART_LIBRARY, CHART_STYLE = VENDOR / "uPlot.iife.min.js", VENDOR / "uPlot.min.css"


def page_environment() -> jinja2.Environment:
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
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=without_control,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "url": lambda name: quote(name, errors="backslashreplace")}
    return environment


def load_template(path: Path, scripts: Iterable[Path], styles: Iterable[Path]) -> jinja2.Template:
    """Return the template in `path` with `scripts`, `css` and `policy`, a content security policy that allows these
    scripts only, by their hash.
    """
    from markupsafe import Markup

    texts = [script.read_text(encoding="utf-8") for script in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
    environment = page_environment()
    environment.globals |= {
        "scripts": [Markup(text) for text in texts],
        "policy": Markup(f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"),
        "css": Markup("\n".join(style.read_text(encoding="utf-8") for style in styles)),
    }
    return environment.from_string(path.read_text(encoding="utf-8"))


def json_block(content: Any) -> Markup:
    """Return `content` as JSON that cannot end the <script> element it is in; its texts are without control characters,
    as those of the template are.
    """
    from markupsafe import Markup

    return Markup(json.dumps(_without_control(content), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _without_control(content: Any) -> Any:
    if isinstance(content, str):
        return strip_control(content)
    if isinstance(content, dict):
        return {_without_control(key): _without_control(value) for key, value in content.items()}
    return [_without_control(value) for value in content] if isinstance(content, list | tuple) else content


def short_number(value: float | None) -> float | int | None:
    """Return a number with the seven digits that a chart needs; None stays None."""
    if value is None:
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.7g}")
