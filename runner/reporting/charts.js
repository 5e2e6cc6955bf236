// What the pages share: number formats, smoothing, axes, controls that are remembered, reloading, tables that are sorted. No request is made.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const color = (name, of = document.documentElement) => getComputedStyle(of).getPropertyValue(name).trim();
const isNumber = (value) => value !== null && value !== undefined;
const FONT = "12px system-ui, sans-serif";
const TITLES = { step: "step", tokens: "tokens", seconds: "training time (hours:minutes:seconds)" };

// --- numbers ----------------------------------------------------------------------------------------------------------------------------------------

function clock(seconds) {
  const part = (value) => String(Math.floor(value)).padStart(2, "0");
  return `${part(seconds / 3600)}:${part(seconds / 60 % 60)}:${part(seconds % 60)}`;
}

function shortAxis(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${unit}`;
  return Math.abs(value) > 0 && Math.abs(value) < 1e-2 ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(4)));
}

// Exponential mean; a missing value leaves a gap and does not change the mean.
function smooth(values, weight) {
  let total = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = total * weight + value;
    norm = norm * weight + 1;
    return total / norm;
  });
}

// Two records may have equal tokens or times: uPlot.join needs x values that rise.
function rising(values) {
  let last = -Infinity;
  return values.map((value) => (last = value > last ? value : last + Math.max(1e-6, Math.abs(last) * 1e-9)));
}

// `tokens` of a curve may be the tokens per step.
function expandTokens(curve) {
  if (curve && typeof curve.tokens === "number") curve.tokens = curve.step.map((step) => step * curve.tokens);
}

// --- axes -------------------------------------------------------------------------------------------------------------------------------------------

function axesOf(axis, xOptions = {}, size = 62, text = shortAxis) {
  const line = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: FONT }, isTime = axis === "seconds";
  return [{ ...line, labelFont: FONT, space: isTime ? 80 : 50, values: (u, values) => values.map((value) => (isTime ? clock(value) : shortAxis(value))), ...xOptions },
          { ...line, size, values: (u, values) => values.map((value) => (value === null ? "" : text(value))) }];
}

// Whether the axis may be logarithmic. The ticks of uPlot end at none of much smaller values.
const MIN_OF_LOG = 1e-15;
const fitsLog = (values) => values.every((value) => value === null || value >= MIN_OF_LOG);

// Range of the y axis of a loss. Where it `cuts`, the first, high values leave the plot, so that differences at the end are seen.
function lossBounds(values, isLog, cuts) {
  if (!values.length) return [1, 2]; // 0 has no logarithm
  const sorted = [...values].sort((a, b) => a - b), low = sorted[0], at = (share) => sorted[Math.floor(sorted.length * share)];
  let high = sorted[sorted.length - 1];
  if (isLog && low > 0) {
    const lowest = low * 0.97, digit = lowest / 10 ** Math.floor(Math.log10(lowest));
    return [digit < 9.5 ? lowest : low * 0.9, high * 1.03]; // from 0.097 the ticks of uPlot would never end
  }
  if (cuts) high = Math.min(high, Math.max(at(0.95), low + 3 * (at(0.5) - low)));
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
  return [low - pad, high + pad];
}

// Losses of the curves that are shown: in the visible part, or all where it has none; and whether all of the x axis is visible.
function visibleLosses(u) {
  const end = u.data[0].length - 1, [i0, i1] = u.series[0].idxs || [0, end]; // scales.x is that of the zoom before
  const part = (from, to) => u.data.slice(1).flatMap((column, index) => (u.series[index + 1].show ? column.slice(from, to).filter(isNumber) : []));
  const visible = part(i0, i1 + 1);
  return [visible.length ? visible : part(0), i0 === 0 && i1 === end];
}

// --- state ------------------------------------------------------------------------------------------------------------------------------------------

function remembered(name, value, storage = "sessionStorage") {
  try {
    if (value !== undefined) window[storage].setItem(`lm-runner.${name}`, JSON.stringify(value));
    return JSON.parse(window[storage].getItem(`lm-runner.${name}`));
  } catch { return null; } // no storage for files in this browser
}

function rememberControls(name, controls, storage) {
  remembered(name, Object.fromEntries(Object.entries(controls).map(([id, control]) => [id, control.type === "checkbox" ? control.checked : control.value])), storage);
}

// Set the controls as they were; return whether they are known.
function recallControls(name, controls, storage) {
  const stored = Object(remembered(name, undefined, storage));
  for (const [id, control] of Object.entries(controls)) {
    const before = control.value;
    if (!(id in stored)) continue;
    if (control.type === "checkbox") control.checked = stored[id] === true;
    else control.value = stored[id];
    if (control.tagName === "SELECT" && control.selectedIndex < 0) control.value = before;
  }
  return Object.keys(stored).length > 0;
}

// Draw again when the width or the color scheme changes.
function redrawOnChange(redraw) {
  let width = window.innerWidth;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } });
}

// Load a page again while its runs train, but not while somebody uses it; say when it was not written for long.
function reloadWhile(isIdle, ended = "", prepare = () => {}) {
  if (data.reload) setInterval(() => {
    const age = Date.now() / 1000 - data.written, note = find("stale");
    if (note) {
      note.hidden = age < data.stale;
      note.textContent = note.hidden ? "" : `This page was last written ${clock(age)} ago (hours:minutes:seconds). ${ended}`;
    }
    if (isIdle()) { prepare(); location.reload(); }
  }, data.reload * 1000);
}

// --- tables -----------------------------------------------------------------------------------------------------------------------------------------

// Sort a table by its headers with a button or data-sort, by mouse and keyboard. The order is remembered under `name` for as long as the tab is open.
// A group is a row, or a body whose rows stay together.
function sortableTable(table, name, groups = [...table.tBodies[0].rows]) {
  const headers = [...table.tHead.rows[0].cells], parent = groups.length ? groups[0].parentElement : table;
  function cellValue(group, index) {
    const cell = (group.cells ? group : group.rows[0]).cells[index], text = cell.dataset.value ?? cell.dataset.v ?? cell.textContent.trim();
    return headers[index].dataset.sort !== "text" && text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  }
  const compare = (a, b) => (typeof a !== typeof b ? (typeof a === "number" ? -1 : 1) : typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));

  function sort(index, direction) {
    headers.forEach((header, other) => (other === index ? header.setAttribute("aria-sort", direction) : header.removeAttribute("aria-sort")));
    const sign = direction === "ascending" ? 1 : -1, keyed = groups.map((group) => [cellValue(group, index), group]);
    keyed.sort(([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : sign * compare(a, b))); // a row without a value is last in both directions
    parent.append(...keyed.map(([, group]) => group));
    remembered(`${name}.order`, [index, direction]);
  }

  headers.forEach((header, index) => {
    let button = header.querySelector("button");
    if (!button && !header.dataset.sort) return;
    if (!button) {
      button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
    }
    button.addEventListener("click", () => sort(index, header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending"));
  });
  const order = remembered(`${name}.order`), [index, direction] = Array.isArray(order) ? order : [];
  if (headers[index]?.querySelector("button")) sort(index, direction === "descending" ? "descending" : "ascending");
}

// Whether each of the words, or its number in another spelling (5e-3 for 0.005), occurs in the text. No word is NaN, the number of 2.5.1.
function matchesFilter(text, words) {
  const lower = text.toLowerCase(), numbers = (lower.match(/\d[\d.]*(e[-+]?\d+)?/g) || []).map(Number);
  return words.toLowerCase().split(/\s+/).every((word) => lower.includes(word) || numbers.some((number) => number === Number(word)));
}
