// Charts of a run's page.
"use strict";
(() => {
  const controls = Object.fromEntries(["axis", "smoothing", "log", "whole"].map((name) => [name, find(name)]).filter(([, element]) => element));
  const cursor = uPlot.sync("run");
  const state = Object(remembered(`page.${location.pathname}`)); // of this page in this tab: zoom, hidden curves, opened parts, focus, scroll position
  let charts = [];
  let isDrawing = false;

  function bytes(value) {
    const unit = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, value)) / 10)));
    return `${Number((value / 1024 ** unit).toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  }

  // The digits of metrics.jsonl, at most seven.
  function exact(value) {
    const short = Number(value.toPrecision(7));
    return short && Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
  }

  const axisText = (value) => (controls.axis.value === "seconds" ? clock(value) : Math.round(value).toLocaleString("en"));

  // Join the records of training and evaluation on one x axis: [x, ...columns]; undefined where a record lacks the field, null where it is not finite.
  function join(parts) {
    return uPlot.join(parts.map((part) => [part.x, ...part.columns]), parts.map((part) => part.columns.map(() => 2)));
  }

  function lossRange(u) {
    const [values, isWhole] = visibleLosses(u);
    const [low, high] = lossBounds(values, controls.log.checked, isWhole && !controls.whole.checked), highest = values.reduce((a, b) => Math.max(a, b), -Infinity);
    u.highest = highest > high ? highest : null;
    return [low, high];
  }

  // Name the highest value that lies above the plot.
  function sayClipped(u) {
    const text = isNumber(u.highest) ? `· up to ${exact(u.highest)} above the plot` : "";
    const place = u.root.closest("figure").querySelector(".clipped");
    if (place.textContent !== text) place.textContent = text;
  }

  // Index of the value that is shown for x: the one at x, else the newest one before it, else the first.
  function nearestValue(u, index, hovered) {
    const column = u.data[index];
    for (let i = hovered; i >= 0; i--) if (column[i] !== undefined) return i;
    const first = column.findIndex((value) => value !== undefined);
    return first < 0 ? hovered : first;
  }

  // `0.8131`, with its step where that is not the one at the cursor.
  function legendText(text, u, value, index, at) {
    if (!isNumber(at)) return "–";
    const shown = isNumber(value) ? text(value) : "not finite", own = u.cursor.idx;
    return isNumber(own) && at !== own ? `${shown} @${axisText(u.data[0][at])}` : shown;
  }

  function seriesOf(chart, axis, weight) {
    const parts = [], series = [{ label: TITLES[axis], value: (u, value) => (isNumber(value) ? axisText(value) : "–") }];
    const value = legendText.bind(null, chart.bytes ? bytes : exact);
    const add = (label, options) => series.push({ label, value, show: !(state.hidden || []).includes(label), ...options });
    chart.fields.forEach((field, index) => {
      const stroke = color(`--c${index}`);
      if (data.train[field]) {
        const columns = [data.train[field]];
        add(field, { stroke, width: weight ? 1 : 2, alpha: weight ? 0.35 : 1, points: { show: columns[0].length < 3 } });
        if (weight) {
          columns.push(smooth(data.train[field], weight));
          add(`${field}, smoothed`, { stroke, width: 2, points: { show: false } });
        }
        parts.push({ x: rising(data.train[axis]), columns });
      }
      // the numbers of the first of several sets are there by its name, too
      if (data.eval[field] && !Object.keys(data.eval).some((name) => name.startsWith(`${field}/`))) {
        const cut = field.lastIndexOf("/"), set = cut > 0 && data.eval[field.slice(0, cut)] ? field.slice(cut + 1) : undefined, evalColor = color(`--c${set === undefined ? index + 2 : 1 + ((index + 2) % 3)}`);
        const dash = set !== undefined && index > 3 ? [6, 4] : []; // a set beyond the third
        add(set === undefined ? `validation ${field}` : `validation ${set} ${field.slice(0, cut)}`, { stroke: evalColor, width: 2, dash, points: { show: true, size: 6, fill: evalColor } });
        parts.push({ x: rising(data.eval[axis]), columns: [data.eval[field]] });
      }
    });
    return [parts, series];
  }

  function draw(figure) {
    const chart = data.charts[Number(figure.dataset.chart)], axis = controls.axis.value;
    const [parts, series] = seriesOf(chart, axis, chart.smooth ? Number(controls.smoothing.value) : 0);
    if (!parts.length) return null;
    const isLog = controls.log.checked && chart.log && parts.every((part) => part.columns.every(fitsLog));
    const isLoss = chart.fields[0].split("/")[0] === "loss";
    const options = {
      width: figure.clientWidth, height: 260, series, legend: { live: true },
      cursor: { sync: { key: cursor.key }, focus: { prox: 24 }, dataIdx: (u, index, hovered) => (index ? nearestValue(u, index, hovered) : hovered) },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, ...(isLoss ? { range: lossRange } : {}) } },
      axes: axesOf(axis, {}, chart.bytes ? 74 : 62, chart.bytes ? bytes : shortAxis),
      hooks: { draw: [markAttempts, isLoss ? markBest : () => {}, isLoss ? sayClipped : () => {}], setScale: [keepZoom], setSeries: [keepHidden] },
    };
    const place = figure.querySelector(".plot");
    place.replaceChildren();
    const plot = new uPlot(options, join(parts), place);
    nameLegend(plot);
    return plot;
  }

  // The names in the legend hide and show their curve, with the keyboard too.
  function nameLegend(u) {
    u.root.querySelectorAll(".u-legend .u-series th").forEach((name, index) => {
      if (!index) return;
      const toggle = () => name.setAttribute("aria-pressed", String(u.series[index].show));
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      name.addEventListener("click", toggle);
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
      toggle();
    });
  }

  function keepHidden(u, index, options) {
    if (isDrawing || index === null || options.show === undefined) return;
    const { label, show } = u.series[index];
    state.hidden = [...(state.hidden || []).filter((name) => name !== label), ...(show ? [] : [label])];
  }

  function keepZoom(u, scale) {
    if (isDrawing || scale !== "x") return;
    const x = u.data[0], { min, max } = u.scales.x;
    state.zoom = min > x[0] || max < x[x.length - 1] ? { axis: controls.axis.value, min, max } : null;
  }

  // A dashed line where a later attempt resumed.
  function markAttempts(u) {
    if (controls.axis.value !== "step") return;
    onCanvas(u, (context) => {
      context.strokeStyle = color("--wait");
      context.setLineDash([4, 4]);
      for (const step of data.attempts) {
        const x = u.valToPos(step, "x", true);
        context.beginPath();
        context.moveTo(x, u.bbox.top);
        context.lineTo(x, u.bbox.top + u.bbox.height);
        context.stroke();
      }
    });
  }

  // A ring around the lowest validation loss, of several sets that of the first.
  function markBest(u) {
    const index = u.series.findIndex((series) => /^validation .*loss$/.test(series.label));
    if (index >= 0 && !u.series[index].show) return;
    if (index < 0) return;
    const values = u.data[index].map((value) => (isNumber(value) ? value : Infinity)), best = values.reduce((a, value, i) => (value < values[a] ? i : a), 0);
    if (values[best] === Infinity) return;
    onCanvas(u, (context) => {
      context.strokeStyle = color("--ink");
      context.lineWidth = 2 * devicePixelRatio;
      context.beginPath();
      context.arc(u.valToPos(u.data[0][best], "x", true), u.valToPos(values[best], "y", true), 7 * devicePixelRatio, 0, 2 * Math.PI);
      context.stroke();
    }, 9 * devicePixelRatio);
  }

  function onCanvas(u, paint, margin = 0) {
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left - margin, u.bbox.top - margin, u.bbox.width + 2 * margin, u.bbox.height + 2 * margin);
    u.ctx.clip();
    paint(u.ctx);
    u.ctx.restore();
  }

  function redraw() {
    isDrawing = true;
    charts.forEach((chart) => chart && chart.destroy());
    charts = [...document.querySelectorAll("figure[data-chart]")].map(draw);
    if (state.zoom && state.zoom.axis === controls.axis.value) charts.forEach((chart) => chart && chart.setScale("x", { min: state.zoom.min, max: state.zoom.max }));
    else state.zoom = null;
    if (controls.smoothing) find("smoothing-value").textContent = controls.smoothing.value;
    queueMicrotask(() => queueMicrotask(() => { isDrawing = false; })); // uPlot applies scales in a microtask
  }

  function zoomTo(min, max) {
    charts.forEach((chart) => {
      if (!chart) return;
      const x = chart.data[0], whole = x[x.length - 1] - x[0];
      if (min < max && max - min < 1e-6 * whole) return; // axes of a smaller part have no ticks: uPlot would look for them without end
      chart.setScale("x", min < max ? { min: Math.max(min, x[0]), max: Math.min(max, x[x.length - 1]) } : { min: x[0], max: x[x.length - 1] });
    });
  }

  // Keys on a chart: arrows, Home and End move the cursor, + and - zoom around it, 0 and Escape reset.
  function onKey(u, event) {
    const x = u.data[0], last = x.length - 1, { min, max } = u.scales.x, now = u.cursor.idx;
    const first = Math.max(0, x.findIndex((value) => value >= min)), step = event.shiftKey ? 10 : 1;
    const moves = { ArrowRight: isNumber(now) ? now + step : first, ArrowLeft: isNumber(now) ? now - step : last, Home: 0, End: last };
    if (event.key in moves) {
      const index = Math.min(last, Math.max(0, moves[event.key]));
      if (x[index] < min || x[index] > max) zoomTo(x[index] - (max - min) / 2, x[index] + (max - min) / 2);
      queueMicrotask(() => moveCursor(u, index));
    } else if (["+", "="].includes(event.key)) zoomTo(...around(u, (max - min) / 4));
    else if (event.key === "-") zoomTo(...around(u, max - min));
    else if (["0", "Escape"].includes(event.key)) zoomTo(1, 0);
    else return;
    event.preventDefault();
  }

  function around(u, half) {
    const { min, max } = u.scales.x, middle = isNumber(u.cursor.idx) ? u.data[0][u.cursor.idx] : (min + max) / 2;
    return [middle - half, middle + half];
  }

  function moveCursor(u, index) {
    u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: u.over.clientHeight / 2 }, true, true);
    const parts = [...u.root.querySelectorAll(".u-legend .u-series")].map((row) => [...row.children].map((cell) => cell.textContent.trim()).join(" "));
    u.root.closest("figure").querySelector(".spoken").textContent = parts.join(", ");
  }

  function rememberState() {
    state.open = [...document.querySelectorAll("details[open][id]")].map((element) => element.id);
    state.focus = document.activeElement.id || null;
    state.chart = document.activeElement.closest?.("figure[data-chart]")?.dataset.chart ?? null;
    state.scroll = [scrollX, scrollY];
    remembered(`page.${location.pathname}`, state);
  }

  function restorePage() {
    for (const id of state.open || []) {
      const element = find(id);
      if (element && element.tagName === "DETAILS") element.open = true;
    }
    const focused = state.focus ? find(state.focus) : isNumber(state.chart) ? document.querySelector(`figure[data-chart="${Number(state.chart)}"] .plot`) : null;
    if (focused) focused.focus({ preventScroll: true });
    if (state.scroll) { history.scrollRestoration = "manual"; scrollTo(...state.scroll); }
  }

  // Load the page of a run that trains again, but not while somebody reads a value, drags, or selects text.
  function keepLive() {
    let isPressed = false;
    const isIdle = () => !charts.some((chart) => chart && chart.cursor.left >= 0 && chart.cursor.idx !== null) && !isPressed && document.getSelection().isCollapsed;
    addEventListener("pointerdown", () => { isPressed = true; });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { isPressed = false; });
    document.addEventListener("focusout", () => charts.forEach((chart) => chart && chart.setCursor({ left: -10, top: -10 })));
    reloadWhile(isIdle, "The run may have ended: the terminal and train.log say so.", rememberState);
  }

  function addCopyButtons() {
    if (!navigator.clipboard) return;
    for (const box of document.querySelectorAll(".command")) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "copy";
      button.setAttribute("aria-label", `copy: ${box.querySelector("p").textContent}`);
      button.addEventListener("click", () => navigator.clipboard.writeText(box.querySelector("code").textContent).then(() => { button.textContent = "copied"; }, () => { button.textContent = "not allowed"; }));
      box.append(button);
    }
  }

  addCopyButtons();
  if (controls.axis) {
    recallControls("run", controls, "localStorage");
    redraw();
    for (const element of Object.values(controls)) element.addEventListener("input", () => { rememberControls("run", controls, "localStorage"); redraw(); });
    document.querySelectorAll("figure[data-chart] .plot").forEach((place, index) => place.addEventListener("keydown", (event) => { if (charts[index] && event.target === place) onKey(charts[index], event); }));
    redrawOnChange(redraw);
  }
  restorePage();
  addEventListener("pagehide", rememberState);
  if (data.reload) keepLive();
  window.lmRunner = { data, charts: () => charts.filter(Boolean) };
})();
