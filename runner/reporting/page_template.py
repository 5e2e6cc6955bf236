"""What the pages of runs and sweeps share: the template environment and the style sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from common.errors import strip_control

if TYPE_CHECKING:
    import jinja2

CSS = Path(__file__).with_name("page.css")


def page_environment() -> jinja2.Environment:
    """Return an environment that escapes every text and removes its control characters."""
    import jinja2
    from markupsafe import Markup, escape

    def without_control(value: object) -> object:
        return strip_control(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def breakable(key: str) -> Markup:
        """Allow a line break after each dot and underscore of a long key."""
        return Markup(escape(strip_control(key)).replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>")))

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=without_control, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": breakable, "url": lambda name: quote(name, errors="backslashreplace")}
    return environment
