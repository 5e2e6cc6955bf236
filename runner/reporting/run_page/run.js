// Charts of a run's page. The numbers are in the JSON element #data; no request is made.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const controls = { axis: document.getElementById("axis"), smoothing: document.getElementById("smoothing"), log: document.getElementById("log") };
  const titles = { step: "step", tokens: "tokens", seconds: "training time (hours:minutes:seconds)" };
  const cursor = uPlot.sync("run");
  let charts = [];

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

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

  function clock(seconds) {
    const whole = Math.floor(seconds);
    const part = (value) => String(value).padStart(2, "0");
    return `${part(Math.floor(whole / 3600))}:${part(Math.floor(whole / 60) % 60)}:${part(whole % 60)}`;
  }

  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e4 || (size && size < 1e-3)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  }

  function shortAxis(value) {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${unit}`;
    return Math.abs(value) > 0 && Math.abs(value) < 1e-2 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
  }

  // Join the records of training and evaluation on one x axis: [x, ...columns], null where a record lacks the field.
  function join(parts) {
    return uPlot.join(parts.map((part) => [part.x, ...part.columns]), parts.map((part) => part.columns.map(() => 2)));
  }

  // Times of two records may be equal: uPlot.join needs x values that rise.
  function rising(values) {
    let last = -Infinity;
    return values.map((value) => (last = value > last ? value : last + 1e-6));
  }

  // Range of the y axis: all values from the point on where half of the decrease is done, so that overfitting at the end is seen.
  function lossRange(u, low, high) {
    const finite = (column) => column.filter((value) => value !== null && value !== undefined);
    const shown = finite(u.data.slice(1).flat());
    if (!shown.length) return [0, 1];
    const [i0, i1] = u.series[0].idxs || [0, u.data[0].length - 1];
    const visible = finite(u.data.slice(1).map((column) => column.slice(i0, i1 + 1)).flat());
    const values = visible.length ? visible : shown;
    low = Math.min(...values);
    high = Math.max(...values);
    const isWhole = i0 === 0 && i1 === u.data[0].length - 1;
    if (isWhole && !controls.log.checked) {
      const sorted = [...values].sort((a, b) => a - b);
      high = Math.min(high, Math.max(sorted[Math.floor(sorted.length * 0.95)], low + 3 * (sorted[Math.floor(sorted.length / 2)] - low)));
    }
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    return controls.log.checked && low > 0 ? [low * 0.97, high * 1.03] : [low - pad, high + pad];
  }

  function draw(figure) {
    const axis = controls.axis.value;
    const weight = figure.dataset.smooth === undefined ? 0 : Number(controls.smoothing.value);
    const fields = figure.dataset.fields.split(" ");
    const parts = [], series = [{ label: titles[axis], value: (u, value) => (value === null ? "–" : axis === "seconds" ? clock(value) : value.toLocaleString("en")) }];
    fields.forEach((field, index) => {
      const stroke = color(`--c${index}`);
      if (data.train[field]) {
        const columns = [data.train[field]];
        series.push({ label: `${field}`, stroke, width: weight ? 1 : 2, alpha: weight ? 0.35 : 1, points: { show: columns[0].length < 3 }, value: (u, value) => short(value) });
        if (weight) {
          columns.push(smooth(data.train[field], weight));
          series.push({ label: `${field}, smoothed`, stroke, width: 2, points: { show: false }, value: (u, value) => short(value) });
        }
        parts.push({ x: rising(data.train[axis]), columns });
      }
      if (data.eval[field]) {
        const evalColor = color(`--c${index + 2}`);
        series.push({ label: `validation ${field}`, stroke: evalColor, width: 2, spanGaps: true, points: { show: true, size: 6, fill: evalColor }, value: (u, value) => short(value) });
        parts.push({ x: rising(data.eval[axis]), columns: [data.eval[field]] });
      }
    });
    if (!parts.length) return null;
    const isLog = controls.log.checked && figure.dataset.log !== undefined && parts.every((part) => part.columns.every((column) => column.every((value) => value === null || value > 0)));
    const line = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const options = {
      width: figure.clientWidth, height: 260, series, cursor: { sync: { key: cursor.key }, focus: { prox: 24 } },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, ...(figure.dataset.fields === "loss" ? { range: lossRange } : {}) } },
      axes: [{ ...line, values: (u, values) => values.map((value) => (axis === "seconds" ? clock(value) : shortAxis(value))), space: axis === "seconds" ? 80 : 50 },
             { ...line, size: 56, values: (u, values) => values.map((value) => (value === null ? "" : shortAxis(value))) }],
      hooks: { draw: [markAttempts] },
    };
    const place = figure.querySelector(".plot");
    place.replaceChildren();
    return new uPlot(options, join(parts), place);
  }

  // A dashed line where a later attempt resumed.
  function markAttempts(u) {
    if (controls.axis.value !== "step") return;
    const context = u.ctx;
    context.save();
    context.strokeStyle = color("--wait");
    context.setLineDash([4, 4]);
    for (const step of data.attempts) {
      const x = u.valToPos(step, "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      context.beginPath();
      context.moveTo(x, u.bbox.top);
      context.lineTo(x, u.bbox.top + u.bbox.height);
      context.stroke();
    }
    context.restore();
  }

  function redraw() {
    charts.forEach((chart) => chart.destroy());
    charts = [...document.querySelectorAll("figure[data-fields]")].map(draw).filter(Boolean);
    document.getElementById("smoothing-value").textContent = controls.smoothing.value;
    for (const [name, element] of Object.entries(controls)) remember(name, element);
  }

  const key = (name) => `lm-runner.${name}`;
  function remember(name, element) {
    try { localStorage.setItem(key(name), element.type === "checkbox" ? String(element.checked) : element.value); } catch { /* no storage for files in this browser */ }
  }
  function recall() {
    for (const [name, element] of Object.entries(controls)) {
      let value = null;
      try { value = localStorage.getItem(key(name)); } catch { return; }
      if (value === null) continue;
      if (element.type === "checkbox") element.checked = value === "true";
      else element.value = value;
      if (element.tagName === "SELECT" && element.selectedIndex < 0) element.selectedIndex = 0;
    }
  }

  recall();
  redraw();
  Object.values(controls).forEach((element) => element.addEventListener("input", redraw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = window.innerWidth;
  addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } });
  if (data.reload) {
    const isIdle = () => !charts.some((chart) => chart.cursor.idx !== null && chart.cursor.left >= 0) && !document.querySelector("input:focus, select:focus, details[open]");
    setInterval(() => { if (isIdle()) location.reload(); }, data.reload * 1000);
  }
  window.lmRunner = { data, charts: () => charts };
})();
