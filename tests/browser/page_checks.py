"""What every page must offer to readers, computed in the browser: contrast, names of controls, and no content beside
the screen.
"""

from __future__ import annotations

from typing import Any

# Text below WCAG AA: contrast 4.5, or 3 for large text (24 px, or bold from 18.66 px). Transparent backgrounds are
# looked up in the parents.
LOW_CONTRAST = """() => {
  const parse = (color) => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return {r, g, b, a}; };
  const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ({r, g, b}) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const over = (top, below) => ({r: top.r * top.a + below.r * (1 - top.a), g: top.g * top.a + below.g * (1 - top.a), b: top.b * top.a + below.b * (1 - top.a), a: 1});
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.a) layers.push(c); if (c.a === 1) break; }
    return layers.reverse().reduce((below, top) => over(top, below), {r: 255, g: 255, b: 255, a: 1});
  };
  const faults = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode());) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.data.trim() || !element.checkVisibility({visibilityProperty: true, opacityProperty: true}) || ["SCRIPT", "STYLE", "OPTION"].includes(element.tagName)) continue;
    const below = background(element), isSvg = element instanceof SVGElement;
    const ink = over(parse(isSvg ? style.fill : style.color), below);
    const [high, low] = [luminance(ink), luminance(below)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < (isLarge ? 3 : 4.5)) faults.add(`${contrast.toFixed(2)} ${element.tagName}.${element.className} ${JSON.stringify(node.data.trim().slice(0, 30))}`);
  }
  return [...faults];
}"""

# Controls without a name for a screen reader, images without a text, ids that exist twice, scrolling boxes that the
# keyboard cannot reach.
UNNAMED = """() => {
  const faults = [];
  const named = (e) => (e.getAttribute("aria-label") || "").trim() || [...(e.labels || [])].some((l) => l.innerText.trim()) || e.title.trim()
    || (e.getAttribute("aria-labelledby") || "").split(" ").some((id) => id && document.getElementById(id)) || (["A", "BUTTON", "SUMMARY"].includes(e.tagName) && e.textContent.trim());
  for (const e of document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']:not(pre)"))
    if (!named(e) && !e.textContent.trim()) faults.push(`no name: ${e.outerHTML.slice(0, 120)}`);
  for (const e of document.querySelectorAll("input, select, textarea")) if (!named(e)) faults.push(`no label: ${e.outerHTML.slice(0, 120)}`);
  for (const e of document.querySelectorAll("svg, canvas, img"))
    if (!e.closest("[aria-label], [aria-hidden=true], [alt]") ) faults.push(`no text for: ${e.outerHTML.slice(0, 120)}`);
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids.filter((id, index) => ids.indexOf(id) !== index))) faults.push(`id twice: ${id}`);
  if (!document.documentElement.lang) faults.push("no language");
  if (document.querySelectorAll("h1").length !== 1) faults.push("not one h1");
  if (!document.querySelector("main")) faults.push("no main");
  let level = 1;
  for (const h of document.querySelectorAll("h1, h2, h3, h4")) { const next = Number(h.tagName[1]); if (next > level + 1) faults.push(`h${next} after h${level}: ${h.textContent}`); level = next; }
  return faults;
}"""

# Elements that reach beyond the right edge of the screen and are in no box that scrolls.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth, faults = [];
  if (document.documentElement.scrollWidth > width) faults.push(`the page is ${document.documentElement.scrollWidth} wide, the screen ${width}`);
  const scrolls = (e) => { for (; e && e !== document.body; e = e.parentElement) if (["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX)) return true; return false; };
  for (const e of document.body.querySelectorAll("*")) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !(e instanceof SVGElement && e.tagName !== "svg") && !scrolls(e)) faults.push(`${e.tagName}.${e.className}: to ${Math.round(box.right)}`);
  }
  return faults.slice(0, 10);
}"""


# Cells of tables whose text reaches beyond the cell, over its neighbour.
OVERPRINTED = """() => [...document.querySelectorAll("td, th")].filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)
  .map((e) => `${e.scrollWidth} of ${e.clientWidth}: ${e.textContent.trim().slice(0, 60)}`).slice(0, 10)"""


def low_contrast(page: Any) -> list[str]:
    return page.evaluate(LOW_CONTRAST)


def unnamed(page: Any) -> list[str]:
    return page.evaluate(UNNAMED)


def overflow(page: Any) -> list[str]:
    return page.evaluate(OVERFLOW)


def overprinted(page: Any) -> list[str]:
    return page.evaluate(OVERPRINTED)


STOP = """() => {
  const e = document.activeElement, seen = window.keyboardStops;
  if (e === document.body || seen.has(e)) return "";
  seen.add(e);
  return `${e.tagName.toLowerCase()} ${e.id || e.textContent.trim().slice(0, 40)}`;
}"""


def keyboard_stops(page: Any, limit: int = 100) -> list[str]:
    """Return the elements that Tab reaches in turn, from the start of the page: tag and id, or the beginning of the
    text.
    """
    page.evaluate(
        "() => { document.activeElement?.blur(); getSelection()?.removeAllRanges(); scrollTo(0, 0); window.keyboardStops = new Set(); }"
    )
    stops: list[str] = []
    for _ in range(limit):
        page.keyboard.press("Tab")
        if not (stop := page.evaluate(STOP)):
            break
        stops.append(stop)
    return stops
