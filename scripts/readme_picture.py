"""Write docs/images/sweep.svg, the picture of the README, from the report of a sweep: `python scripts/readme_picture.py SWEEP_DIR`.

The sweep that it shows:
python runner/train.py --multirun optimizer.lr=1e-3,5e-3 train.accumulation_steps=1,4 train.eval_every=16 train.sample_every=0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "images" / "sweep.svg"
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_LINE = 400, 270, 18


def picture(html: str, css: str) -> str:
    """Return one SVG with the panels over steps and over loss tokens side by side, and the legend of `html` below."""
    panels = re.findall(r'<svg viewBox="0 0 400 270"[^>]*aria-label="loss over (?:steps|loss tokens)">(.*?)</svg>', html, re.DOTALL)
    legend = re.search(r'<ul class="legend">(.*?)</ul>', html, re.DOTALL)
    entries = re.findall(r'<svg class="swatch" viewBox="0 0 26 8"[^>]*>(.*?)</svg>(.*?)</li>', legend[1] if legend else "", re.DOTALL)
    unique = list(dict.fromkeys((swatch, re.sub(r"<[^>]+>", "", text).strip()) for swatch, text in entries))
    height = PANEL_HEIGHT + LEGEND_LINE * ((len(unique) + 1) // 2) + 10
    parts = [f'<g transform="translate({index * PANEL_WIDTH} 0)">{panel}</g>' for index, panel in enumerate(panels)]
    for index, (swatch, text) in enumerate(unique):
        x, y = 46 + index % 2 * PANEL_WIDTH, PANEL_HEIGHT + 8 + index // 2 * LEGEND_LINE
        parts.append(f'<g transform="translate({x} {y})">{swatch}<text x="34" y="8">{text}</text></g>')
    style = css.replace("figure svg", "svg") + "svg { background: var(--paper); font: 11px system-ui, sans-serif } text { fill: var(--ink) }"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * PANEL_WIDTH} {height}"><style>{style}</style>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    page = (Path(sys.argv[1]) / "report.html").read_text(encoding="utf-8")
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(picture(page, (ROOT / "runner" / "reporting" / "report.css").read_text(encoding="utf-8")), encoding="utf-8")
