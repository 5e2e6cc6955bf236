"""Write docs/images/*.png, the pictures of README and docs, from a real run and a real sweep: `python
scripts/pictures.py`.

Trains both below --folder (what is there already is not trained again), copies the terminal of the run out of tmux
while it trains and at its end, and opens the pages in chromium by Playwright's Python package. Needs tmux and chromium.
`--only run sweep` writes some of the pictures again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 200_000  # of a picture
COLUMNS, ROWS = 100, 34  # of the terminal
RUN = 'run.name=first-run train.eval_every=16 train.log_every=4 \'train.sample_prompts=["It was","Tolo"]\''
SWEEP = "--multirun optimizer.lr=1e-3,5e-3,2e-2 seed=1,2 train.max_steps=120 train.batch_size=2 data.max_length=128 train.eval_every=12 train.log_every=4 train.sample_every=0"
CONSOLE_HTML = '<body style="margin:0"><pre style="margin:0;padding:14px 16px;display:inline-block;background:{background};color:{foreground};font:13px/1.4 monospace">{code}</pre></body>'
DONE = 'echo "exit code $?"'


@dataclass(frozen=True)
class Picture:
    """The top of a page, down to the bottom of the last element that `until` selects, at most `height` pixels."""

    folder: str
    width: int
    scheme: str
    until: str
    height: int


PICTURES = {
    "run": Picture("run", 1280, "light", "figure[data-chart='2']", 1500),
    "run-phone": Picture("run", 390, "dark", "figure[data-chart='0']", 1400),
    "sweep": Picture("sweep", 1280, "light", "main > *", 1500),
}
CONSOLES = {"console": "training.ansi", "console-end": "end.ansi"}


def train_run(folder: Path) -> None:
    """Train the run in a terminal; write what the terminal shows in the middle and at the end as text with escape
    sequences.
    """
    if (folder / "end.ansi").is_file():
        return
    shutil.rmtree(folder / "run", ignore_errors=True)
    python = shlex.quote(os.path.relpath(sys.executable, ROOT))
    command = f"{python} runner/train.py hydra.run.dir={shlex.quote(str(folder / 'run'))} {RUN}"
    tmux = ["tmux", "-L", f"pictures-{os.getpid()}"]
    shell = f"cd {shlex.quote(str(ROOT))}; PS1='$ ' exec bash --norc --noprofile"
    subprocess.run([*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), shell], check=True)
    try:
        subprocess.run([*tmux, "send-keys", f"clear; {command}; {DONE}", "Enter"], check=True)
        wait_for(lambda: logged_steps(folder / "run") >= 160)
        (folder / "training.ansi").write_text(screen(tmux))
        wait_for(lambda: "exit code 0" in screen(tmux))
        (folder / "end.ansi").write_text(screen(tmux))
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def screen(tmux: list[str]) -> str:
    return subprocess.run([*tmux, "capture-pane", "-p", "-e"], check=True, capture_output=True, text=True).stdout


def logged_steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return 4 * metrics.read_text().count('"kind": "train"') if metrics.is_file() else 0


def wait_for(is_done: Any, seconds: float = 900) -> None:
    until = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > until:
            raise SystemExit("error: the run did not get there; look at its train.log")
        time.sleep(0.2)


def train_sweep(folder: Path) -> None:
    if not (folder / "sweep" / "report.html").is_file():
        command = f"{shlex.quote(sys.executable)} runner/train.py {SWEEP} hydra.sweep.dir={shlex.quote(str(folder / 'sweep'))}"
        print(command, flush=True)
        subprocess.run(command, shell=True, cwd=ROOT, check=True)


def photograph(folder: Path, names: list[str]) -> None:
    from playwright.sync_api import sync_playwright

    path = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in names:
            picture = PICTURES.get(name)
            content = (
                page_picture(browser, folder, picture) if picture else console_picture(browser, folder / CONSOLES[name])
            )
            target = IMAGES / f"{name}.png"
            target.write_bytes(fewer_colours(content))
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes", flush=True)
            if target.stat().st_size > MAX_BYTES:
                raise SystemExit(f"error: {target.name} has more than {MAX_BYTES:,} bytes; lower its height")
        browser.close()


def page_picture(browser: Any, folder: Path, picture: Picture) -> bytes:
    page = browser.new_page(viewport={"width": picture.width, "height": 900}, color_scheme=picture.scheme)
    page.goto((folder / picture.folder / "report.html").as_uri())
    bottom = page.locator(picture.until).last.bounding_box()
    height = min(picture.height, bottom["y"] + bottom["height"] + 12)
    return page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": picture.width, "height": height})


def console_picture(browser: Any, path: Path) -> bytes:
    """Draw a terminal's text with its colours."""
    import io

    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    text = "\n".join(line for line in path.read_text().rstrip().split("\n") if "exit code 0" not in line)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text.replace(f"; {DONE}", "").replace("clear; ", "")), soft_wrap=True)
    page = browser.new_page(viewport={"width": 1000, "height": 900}, device_scale_factor=1.5)
    page.set_content(console.export_html(theme=MONOKAI, inline_styles=True, code_format=CONSOLE_HTML))
    return page.locator("pre").screenshot()


def fewer_colours(content: bytes) -> bytes:
    """Return a PNG with a palette of 128 colours, a third of the size."""
    import io

    from PIL import Image

    small = io.BytesIO()
    Image.open(io.BytesIO(content)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the run and the sweep; default: a temporary one")
    parser.add_argument("--only", nargs="+", choices=[*CONSOLES, *PICTURES], default=[*CONSOLES, *PICTURES])
    arguments = parser.parse_args()
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="pictures-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    IMAGES.mkdir(exist_ok=True)
    if {*arguments.only} - {"sweep"}:
        train_run(folder)
    if "sweep" in arguments.only:
        train_sweep(folder)
    photograph(folder, arguments.only)


if __name__ == "__main__":
    main()
