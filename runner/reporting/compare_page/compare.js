// One chart with the losses of several runs. The numbers are in the JSON element #data; no request is made.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const controls = { axis: element("axis"), kinds: element("kinds"), smoothing: element("smoothing"), log: element("log") };
  const boxes = [...document.querySelectorAll("input[data-show]")].sort((a, b) => a.dataset.show - b.dataset.show);
  const rows = [...document.querySelectorAll("tr[data-run]")].sort((a, b) => a.dataset.run - b.dataset.run);
  const readout = element("readout"), hint = readout.textContent;
  let chart = null, curves = []; // curves: of each series after x, {run, kind, at: x -> value}

  const color = (name, of = document.documentElement) => getComputedStyle(of).getPropertyValue(name).trim();

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
    const whole = Math.floor(seconds), part = (value) => String(value).padStart(2, "0");
    return `${part(Math.floor(whole / 3600))}:${part(Math.floor(whole / 60) % 60)}:${part(whole % 60)}`;
  }

  function shortAxis(value) {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${unit}`;
    return Math.abs(value) > 0 && Math.abs(value) < 1e-2 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
  }

  // Two records may have equal tokens or times: uPlot.join needs x values that rise.
  function rising(values) {
    let last = -Infinity;
    return values.map((value) => (last = value > last ? value : last + Math.max(1e-6, Math.abs(last) * 1e-9)));
  }

  // Range of the y axis: all values but the first, high ones of each curve, so that the ends of the curves are seen.
  function lossRange() {
    const values = curves.flatMap((curve) => curve.values.filter((value) => value !== null)).sort((a, b) => a - b);
    if (!values.length) return [0, 1];
    const low = values[0], middle = values[Math.floor(values.length / 2)];
    let high = values[values.length - 1];
    if (controls.log.checked && low > 0) return [low * 0.97, high * 1.03];
    high = Math.min(high, Math.max(values[Math.floor(values.length * 0.95)], low + 3 * (middle - low)));
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    return [low - pad, high + pad];
  }

  function zoomedRange(u) {
    const x = u.scales.x, isWhole = u.data[0].length === 0 || (x.min <= u.data[0][0] && x.max >= u.data[0][u.data[0].length - 1]);
    if (isWhole) return lossRange();
    const values = curves.flatMap((curve) => curve.values.filter((value, index) => value !== null && curve.x[index] >= x.min && curve.x[index] <= x.max));
    if (!values.length) return lossRange();
    const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    return controls.log.checked && low > 0 ? [low * 0.97, high * 1.03] : [low - pad, high + pad];
  }

  function chosenCurves() {
    const axis = controls.axis.value, weight = Number(controls.smoothing.value), kinds = controls.kinds.value === "both" ? ["train", "eval"] : [controls.kinds.value];
    return kinds.flatMap((kind) => data.runs.flatMap((run, index) => {
      const columns = run[kind];
      if (!boxes[index].checked || !columns.loss.length) return [];
      return [{ run: index, kind, x: rising(columns[axis]), values: kind === "train" && weight ? smooth(columns.loss, weight) : columns.loss }];
    }));
  }

  function series(curve) {
    const swatch = rows[curve.run].querySelector(".swatch path");
    const dash = color("--d", swatch), isEval = curve.kind === "eval";
    return {
      label: `${data.runs[curve.run].label}, ${isEval ? "evaluation" : "training"}`, stroke: color("--c", swatch), width: isEval ? 2.25 : 1.25, alpha: isEval || controls.kinds.value === "train" ? 1 : 0.7,
      dash: dash === "none" ? [] : dash.split(" ").map(Number), points: { show: curve.values.length < 3 || (isEval && curve.values.length * curves.length <= 400), size: 5 },
    };
  }

  function focus(u, index) {
    rows.forEach((row) => row.classList.remove("focused"));
    const curve = index ? curves[index - 1] : null;
    if (!curve) { readout.textContent = hint; return; }
    rows[curve.run].classList.add("focused");
    const wanted = u.posToVal(u.cursor.left, "x");
    let nearest = 0;
    curve.x.forEach((x, position) => { if (curve.values[position] !== null && Math.abs(x - wanted) < Math.abs(curve.x[nearest] - wanted)) nearest = position; });
    const raw = data.runs[curve.run][curve.kind], axis = controls.axis.value, value = raw.loss[nearest], x = raw[axis][nearest];
    const place = axis === "seconds" ? clock(x) : `${axis} ${x.toLocaleString("en")}`;
    readout.textContent = `${data.runs[curve.run].label}: ${curve.kind === "eval" ? "evaluation" : "training"} loss ${value === null ? "not finite" : value} at ${place}`;
  }

  function redraw() {
    chart?.destroy();
    curves = chosenCurves();
    const axis = controls.axis.value, place = element("plot"), isLog = controls.log.checked && curves.every((curve) => curve.values.every((value) => value === null || value > 0));
    const line = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const titles = { step: "step", tokens: "tokens", seconds: "training time (hours:minutes:seconds)" };
    place.replaceChildren();
    element("smoothing-value").textContent = controls.smoothing.value;
    remembered("compare", Object.fromEntries(Object.entries(controls).map(([name, control]) => [name, control.type === "checkbox" ? control.checked : control.value])));
    if (!curves.length) { place.textContent = "No curve is chosen, or nothing is logged yet."; chart = null; return; }
    const options = {
      width: place.clientWidth, height: 360, legend: { show: false }, focus: { alpha: 0.25 }, cursor: { focus: { prox: 20 } },
      series: [{}, ...curves.map(series)], scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range: zoomedRange } },
      axes: [{ ...line, label: titles[axis], labelSize: 22, labelFont: "12px system-ui, sans-serif", values: (u, values) => values.map((value) => (axis === "seconds" ? clock(value) : shortAxis(value))), space: axis === "seconds" ? 80 : 50 },
             { ...line, size: 56, values: (u, values) => values.map((value) => (value === null ? "" : shortAxis(value))) }],
      hooks: { setSeries: [focus] },
    };
    chart = new uPlot(options, uPlot.join(curves.map((curve) => [curve.x, curve.values]), curves.map(() => [2])), place);
  }

  function recall() {
    const stored = remembered("compare");
    const isLarge = data.runs.length > 6 && data.runs.some((run) => run.eval.loss.length);
    if (!stored || typeof stored !== "object") { controls.kinds.value = isLarge ? "eval" : "both"; return; }
    for (const [name, control] of Object.entries(controls)) {
      if (control.type === "checkbox") control.checked = stored[name] === true;
      else if (stored[name] !== undefined) control.value = stored[name];
      if (control.tagName === "SELECT" && control.selectedIndex < 0) control.selectedIndex = 0;
    }
  }

  function filter() {
    const words = element("filter").value;
    rows.forEach((row) => { row.hidden = !matchesWords(row, words); });
    const shown = rows.filter((row) => !row.hidden).length;
    element("count").textContent = shown === rows.length ? "" : `${shown} of ${rows.length} runs`;
  }

  function showRows(isShown) {
    boxes.forEach((box, index) => { if (!rows[index].hidden) box.checked = isShown; });
    redraw();
  }

  sortableTable(element("runs"), "compare");
  recall();
  redraw();
  Object.values(controls).forEach((control) => control.addEventListener("input", redraw));
  boxes.forEach((box) => box.addEventListener("input", redraw));
  element("filter").addEventListener("input", filter);
  element("show-all").addEventListener("click", () => showRows(true));
  element("show-none").addEventListener("click", () => showRows(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = window.innerWidth;
  addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } });
  if (data.reload) {
    const isIdle = () => !(chart && chart.cursor.left >= 0) && !document.querySelector("input:focus, select:focus, button:focus") && boxes.every((box) => box.checked);
    setInterval(() => { if (isIdle()) location.reload(); }, data.reload * 1000);
  }
  window.lmRunner = { data, chart: () => chart, curves: () => curves };
})();
