// Charts, filter and comparison of a sweep's page.
"use strict";
(() => {
  const tables = [...document.querySelectorAll("#leaderboard tbody")]; // in the order of data.rows
  const controls = Object.fromEntries(["text", "axis", "validation", "training", "smoothing", "log", "seeds"].map((id) => [id, find(id)]).filter(([, element]) => element));
  const selects = [...document.querySelectorAll("#filters select")];
  const MANY_JOBS = 20, TOP_ROWS = 8, NEAR = 40, MANY_VALUES = 12, MAX_OPTIONS = 40; // NEAR in pixels
  const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000]; // between ticks
  let picked = null; // index of the row that stands out
  let shown = new Set(); // indices of the jobs that the filter lets through
  let chart = null, drawn = [], hovered = null;

  const styleColors = new Map();
  function styleColor(style) {
    if (!styleColors.has(style)) {
      const probe = document.createElement("i");
      probe.className = style;
      document.body.append(probe);
      styleColors.set(style, color("--c", probe));
      probe.remove();
    }
    return styleColors.get(style);
  }

  // --- curves ---------------------------------------------------------------------------------------------------------------------------------------

  for (const job of data.jobs) for (const curve of [job.train, job.eval]) expandTokens(curve);

  function curvesToDraw() {
    const axis = controls.axis.value, weight = Number(controls.smoothing.value), curves = [];
    data.jobs.forEach((job, index) => {
      if (!shown.has(index)) return;
      if (job.train && controls.training.checked) curves.push({ job: index, kind: "training", x: job.train[axis], y: weight ? smooth(job.train.loss, weight) : job.train.loss });
      if (job.eval && controls.validation.checked) curves.push({ job: index, kind: "validation", x: job.eval[axis], y: job.eval.loss });
    });
    const order = (curve) => (rowOf(curve) === picked ? -1 : rowOf(curve));
    return curves.sort((a, b) => order(b) - order(a) || (a.kind < b.kind ? -1 : a.kind > b.kind ? 1 : 0)); // the best are drawn last; validation over training
  }
  const rowOf = (curve) => data.jobs[curve.job].row;

  // Range of the y axis over the visible part. Of whole curves the first fifth may leave the plot, so that differences at the end are seen; and one
  // diverging job leaves the plot instead of flattening the others.
  function lossRange(u) {
    const { min, max } = u.scales.x, isWhole = min === null || min === undefined || (min <= 0 && max >= u.data[0][1]), values = [], tops = [];
    for (const curve of drawn) {
      const inside = curve.y.filter((y, i) => y !== null && (isWhole ? i >= 0.2 * (curve.y.length - 1) : curve.x[i] >= min && curve.x[i] <= max));
      for (const y of inside) values.push(y);
      if (inside.length) tops.push(Math.max(...inside));
    }
    if (!values.length) return { min: 1, max: 2 };
    tops.sort((a, b) => a - b);
    const typical = tops[Math.floor(tops.length / 2)], [low, high] = lossBounds(values, isLog(), true);
    return { min: low, max: isLog() && high > typical * 3 * 1.03 ? typical * 1.03 : high };
  }
  const isLog = () => controls.log.checked && drawn.every((curve) => curve.y.every((y) => y === null || y > 0));

  function paint(u) {
    const { ctx, bbox } = u, ratio = uPlot.pxRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 4 * ratio, bbox.width + 4 * ratio, bbox.height + 4 * ratio);
    ctx.clip();
    ctx.lineJoin = "round";
    for (const curve of drawn) paintCurve(u, curve, ratio);
    ctx.restore();
  }

  function paintCurve(u, curve, ratio) {
    const { ctx, bbox } = u, job = data.jobs[curve.job], isValidation = curve.kind === "validation";
    const emphasis = hovered ? hovered.job : null, isPicked = picked === job.row || emphasis === curve.job;
    const standsBack = (picked !== null || emphasis !== null) && !isPicked;
    ctx.strokeStyle = ctx.fillStyle = styleColor(data.rows[job.row].style);
    ctx.globalAlpha = standsBack ? 0.15 : isValidation ? 1 : drawn.length > 2 * MANY_JOBS ? 0.4 : 0.6;
    ctx.lineWidth = ratio * ((isValidation ? 2 : 1) + (isPicked ? 1.5 : 0));
    const pixels = curve.y.map((y, i) => (y === null ? null : [u.valToPos(curve.x[i], "x", true), u.valToPos(y, "y", true)]));
    ctx.beginPath();
    pixels.forEach((pixel, i) => {
      if (!pixel) return;
      if (i && pixels[i - 1]) ctx.lineTo(...pixel);
      else {
        ctx.moveTo(...pixel);
        if (!pixels[i + 1]) ctx.arc(...pixel, ratio * 1.5, 0, 7); // a single point between gaps
      }
    });
    ctx.stroke();
    if (isValidation && curve.y.length <= 40 && shown.size <= MANY_JOBS) for (const pixel of pixels) if (pixel) dot(ctx, pixel, 2.6 * ratio, true);
    pixels.forEach((pixel, i) => {
      if (!pixel && (i === 0 || pixels[i - 1])) cross(ctx, u.valToPos(curve.x[i], "x", true), bbox.top + 6 * ratio, 4 * ratio); // where a gap begins
    });
    const first = pixels.find((pixel) => pixel);
    if (first && pixels.every((pixel) => !pixel || pixel[1] < bbox.top)) cross(ctx, first[0], bbox.top + 6 * ratio, 4 * ratio); // all of it is above the plot
    if (isValidation && job.lowest !== null) {
      const at = job.eval.step.indexOf(job.lowest);
      if (at >= 0 && pixels[at]) dot(ctx, pixels[at], 6 * ratio, false);
    }
  }
  function dot(ctx, [x, y], radius, filled) {
    ctx.beginPath();
    ctx.arc(x, y, radius, 0, 7);
    if (filled) ctx.fill();
    else ctx.stroke();
  }
  function cross(ctx, x, y, size) {
    ctx.beginPath();
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
    ctx.stroke();
  }

  function nearest(u) {
    const { left, top } = u.cursor;
    let best = null, distance = NEAR;
    if (left < 0) return null;
    for (const curve of drawn) {
      curve.y.forEach((y, i) => {
        if (y === null) return;
        const away = Math.hypot(u.valToPos(curve.x[i], "x") - left, u.valToPos(y, "y") - top);
        if (away < distance) [best, distance] = [{ job: curve.job, kind: curve.kind, i }, away];
      });
    }
    return best;
  }
  // Name the point in the line below the chart and let its curve stand out.
  function show(found) {
    const before = hovered && hovered.job;
    hovered = found;
    if (found) {
      const job = data.jobs[found.job], curve = found.kind === "validation" ? job.eval : job.train, at = (axis) => curve[axis][found.i];
      const loss = at("loss") === null ? "not finite" : at("loss");
      find("hovered").textContent = `${job.label}: ${found.kind} loss ${loss} at step ${at("step").toLocaleString("en")}, ${shortAxis(at("tokens"))} tokens, ${clock(at("seconds"))}`;
    }
    if ((found && found.job) !== before) chart.redraw(false, false);
  }
  const hover = (u) => { if (chart) show(nearest(u)); };

  // Left and right read the points of a curve, up and down go to the curve of the next better or worse job; from the best validation curve on.
  function readByKeys(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }, ranks = { ArrowUp: 1, ArrowDown: -1 };
    if (!drawn.length || !(event.key in steps || event.key in ranks)) return;
    event.preventDefault();
    let index = hovered ? drawn.findIndex((curve) => curve.job === hovered.job && curve.kind === hovered.kind) : -1;
    const isFirst = index < 0, end = (values, i) => Math.max(0, Math.min(values.length - 1, i));
    if (isFirst) index = drawn.length - 1;
    else index = end(drawn, index + (ranks[event.key] || 0));
    const { job, kind, y } = drawn[index];
    show({ job, kind, i: end(y, isFirst ? y.length - 1 : hovered.i + (steps[event.key] || 0)) });
  }

  function drawChart() {
    const place = find("chart");
    if (!place) return;
    if (chart) chart.destroy();
    styleColors.clear();
    chart = hovered = null;
    drawn = curvesToDraw();
    const axis = controls.axis.value;
    const ends = drawn.map((curve) => curve.x[curve.x.length - 1]);
    const options = {
      width: place.clientWidth, height: Math.max(260, Math.min(420, place.clientWidth * 0.6)), legend: { show: false },
      padding: [null, 26, null, null], // half of the last label of the x axis
      series: [{}, { paths: () => null, points: { show: false } }],
      cursor: { points: { show: false }, y: false },
      scales: { x: { time: false }, y: { distr: isLog() ? 3 : 1, auto: false, range: (u, low, high) => (low === null || low === undefined ? [1, 2] : [low, high]) } },
      axes: axesOf(axis, { label: TITLES[axis], labelSize: 18, ...(axis === "seconds" ? { incrs: SECONDS } : {}) }),
      hooks: { draw: [paint], setCursor: [hover], setScale: [(u, key) => { if (key === "x") queueMicrotask(() => { if (u === chart) u.setScale("y", lossRange(u)); }); }] }, // y follows x
    };
    chart = new uPlot(options, [[0, Math.max(1e-9, ...ends)], [1, 2]], place);
    let pressed = 0; // x of the pointer; a drag zooms and picks nothing
    chart.over.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
    chart.over.addEventListener("click", (event) => { if (hovered && Math.abs(event.clientX - pressed) < 4) pick(data.jobs[hovered.job].row); });
    find("smoothing-value").textContent = controls.smoothing.value;
  }

  // --- SVG: effects of settings, parallel coordinates ---------------------------------------------------------------------------------------------

  function svg(name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const titled = (element, text) => { element.append(svg("title", {}, text)); return element; };

  // Losses from the lowest to the highest, or to a typical one where the highest are far above: those are drawn at the upper end.
  function lossSpan(losses) {
    const sorted = [...losses].sort((a, b) => a - b), low = sorted[0], spread = sorted[Math.floor(sorted.length / 2)] - low;
    const highest = sorted[sorted.length - 1], high = spread > 0 && highest - low > 8 * spread ? low + 4 * spread : highest;
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  }
  const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

  function drawEffect(place) {
    const position = data.keys.findIndex((key) => key.key === place.dataset.key), values = data.keys[position].values;
    const jobs = data.jobs.map((job, index) => ({ ...job, index })).filter((job) => shown.has(job.index) && job.values[position] !== null && (job.loss !== null || job.status === "diverged"));
    const losses = jobs.filter((job) => job.loss !== null).map((job) => job.loss);
    const width = 340, height = 190, left = 50, right = 10, top = 12, bottom = 34, inner = width - left - right;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${data.loss} loss by ${place.dataset.key}; the table below has the numbers` });
    place.replaceChildren(picture);
    if (!losses.length) return picture.append(svg("text", { class: "axis-text", x: left, y: height / 2 }, "no completed job yet"));
    const [low, high] = lossSpan(losses), scale = scaleOf(values), margin = values.length > MANY_VALUES ? 0.03 : 0.5 / values.length;
    const x = (value) => left + inner * (margin + (1 - 2 * margin) * scale(value));
    const y = (loss) => top + (height - top - bottom) * Math.max(0, Math.min(1, (high - loss) / (high - low)));
    for (const tick of [low, (low + high) / 2, high]) {
      picture.append(svg("path", { class: "axis-line", d: `M${left} ${y(tick)}H${width - right}` }), svg("text", { class: "axis-text", x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, Number(tick.toPrecision(4))));
    }
    for (const value of ticksOf(values, scale, 5)) {
      picture.append(svg("text", { class: "axis-text", x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, cut(value, Math.max(5, Math.floor(inner / Math.min(5, values.length) / 6)))));
    }
    for (const value of values) {
      const own = jobs.filter((job) => job.values[position] === value && job.loss !== null).map((job) => job.loss);
      const mean = own.reduce((sum, loss) => sum + loss, 0) / own.length, half = Math.min(18, inner / values.length / 2.5);
      if (own.length > 1) picture.append(titled(svg("path", { class: "mean", d: `M${x(value) - half} ${y(mean)}h${2 * half}` }), `${value}: mean ${mean.toPrecision(5)}`));
    }
    for (const job of jobs.sort((a, b) => b.row - a.row)) {
      const at = x(job.values[position]), text = `${job.label}: ${job.loss === null ? "diverged" : job.loss}`;
      if (job.loss === null) picture.append(titled(svg("path", { class: "cross diverged-mark", d: `M${at - 4} ${top}l8 8m0 -8l-8 8` }), text));
      else picture.append(titled(svg("circle", { class: `dot ${data.rows[job.row].style}`, cx: at, cy: y(job.loss), r: picked === job.row ? 6 : 3.5 }), text));
    }
  }

  function drawParallel() {
    const place = find("parallel");
    if (!place) return;
    const axes = data.keys, jobs = data.jobs.map((job, index) => ({ ...job, index })).filter((job) => shown.has(job.index) && (job.loss !== null || job.status === "diverged"));
    const losses = jobs.filter((job) => job.loss !== null).map((job) => job.loss);
    const width = Math.max(place.clientWidth || 0, 110 * (axes.length + 1)), height = 330, top = 40, bottom = 20, side = 60;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", style: `width:${width}px;height:${height}px`, "aria-label": `parallel coordinates of ${jobs.length} jobs; the numbers are in the leaderboard` });
    place.replaceChildren(picture);
    if (!losses.length) return picture.append(svg("text", { class: "axis-text", x: side, y: height / 2 }, "no completed job yet"));
    const [low, high] = lossSpan(losses), x = (index) => side + (width - 2 * side) * index / axes.length;
    const level = (fraction) => height - bottom - (height - top - bottom) * Math.max(0, Math.min(1, fraction));
    const axisY = axes.map(({ values }) => scaleOf(values)), lossY = (loss) => level(loss === null ? 1 : (loss - low) / (high - low));
    [...axes.map(({ key }) => key), `${data.loss} loss`].forEach((title, index) => {
      picture.append(svg("path", { class: "axis-line", d: `M${x(index)} ${top}V${height - bottom}` }));
      picture.append(titled(svg("text", { class: "axis-title", x: x(index), y: 16 + 13 * (index % 2), "text-anchor": "middle" }, cut(title, Math.floor((width - 2 * side) / axes.length / 3.4))), title));
    });
    const label = (at, pixel, text) => svg("text", { class: "axis-text", x: at + 5, y: pixel + 4 }, cut(String(text), 14));
    const labels = svg("g", {});
    axes.forEach(({ values }, index) => {
      for (const value of ticksOf(values, axisY[index], 7)) labels.append(label(x(index), level(axisY[index](value)), value));
    });
    for (const tick of [low, (low + high) / 2, high]) labels.append(label(x(axes.length), lossY(tick), Number(tick.toPrecision(4))));
    for (const job of jobs.sort((a, b) => b.row - a.row)) {
      if (job.values.some((value) => value === null)) continue;
      const points = [...job.values.map((value, index) => `${x(index)} ${level(axisY[index](value))}`), `${x(axes.length)} ${lossY(job.loss)}`];
      const style = job.loss === null ? "diverged-mark" : `${data.rows[job.row].style}${job.row < TOP_ROWS ? " top" : ""}`;
      picture.append(titled(svg("path", { class: `line ${style}${picked === job.row ? " picked" : ""}`, d: `M${points.join("L")}` }), `${job.label}: ${job.loss === null ? "diverged" : job.loss}`));
    }
    picture.append(labels);
    if (picked !== null) picture.classList.add("has-pick");
  }

  // Position of a value on its axis, 0 to 1: evenly while the values are few, else by size or by the logarithm.
  function scaleOf(values) {
    const numbers = values.map(Number);
    if (values.length <= MANY_VALUES || numbers.some((number) => !Number.isFinite(number))) return (value) => (values.length > 1 ? values.indexOf(value) / (values.length - 1) : 0.5);
    const low = Math.min(...numbers), high = Math.max(...numbers), map = low > 0 && high > 10 * low ? Math.log : (number) => number;
    return (value) => (map(Number(value)) - map(low)) / (map(high) - map(low));
  }

  // About `count` of the values, evenly along the axis.
  function ticksOf(values, scale, count) {
    if (values.length <= count) return values;
    const near = (fraction) => values.reduce((best, value) => (Math.abs(scale(value) - fraction) < Math.abs(scale(best) - fraction) ? value : best));
    return [...new Set(Array.from({ length: count }, (_, index) => near(index / (count - 1))))];
  }

  // --- filter, pick, sort -------------------------------------------------------------------------------------------------------------------------

  function filter() {
    shown = new Set();
    data.jobs.forEach((job, index) => {
      const fits = selects.every((select) => !select.value || job.values[Number(select.dataset.key)] === select.value);
      if (fits && matchesWords(`${job.label} ${job.name} ${job.status === "diverged" ? "failed, diverged" : job.status}`, controls.text.value)) shown.add(index);
    });
    const rows = new Set([...shown].map((index) => data.jobs[index].row));
    tables.forEach((table, row) => { table.hidden = !rows.has(row); });
    find("shown").textContent = shown.size === data.jobs.length ? `${data.jobs.length} jobs` : `${shown.size} of ${data.jobs.length} jobs`;
  }

  function pick(row) {
    picked = picked === row ? null : row;
    showPicked();
    if (chart) {
      drawn = curvesToDraw();
      chart.redraw(false, false); // zoomed as it is
    }
    drawSettings();
    remember();
  }
  function drawSettings() {
    document.querySelectorAll(".effect").forEach(drawEffect);
    drawParallel();
  }

  function showPicked() {
    find("leaderboard").classList.toggle("points-only", Boolean(controls.seeds) && !controls.seeds.checked);
    tables.forEach((table, row) => {
      table.classList.toggle("picked", row === picked);
      table.querySelector("button.pick").setAttribute("aria-pressed", String(row === picked));
    });
  }

  // --- two jobs -----------------------------------------------------------------------------------------------------------------------------------

  function drawDiff() {
    const [first, second] = ["first-job", "second-job"].map((id) => Number(find(id).value)), place = find("diff");
    const value = (coded, job) => (coded.of[job] < 0 ? "–" : coded.values[coded.of[job]]);
    const loss = (job) => (data.jobs[job].loss === null ? data.jobs[job].status : String(data.jobs[job].loss));
    const rows = Object.entries(data.settings).map(([key, coded]) => [key, value(coded, first), value(coded, second)]).filter(([, a, b]) => a !== b);
    data.keys.forEach(({ key }, index) => {
      const values = [first, second].map((job) => data.jobs[job].values[index] ?? "–");
      if (!(key in data.settings) && values[0] !== values[1]) rows.unshift([key, ...values]);
    });
    if (!rows.length) return place.replaceChildren(first === second ? "The same job twice." : "No setting differs, as far as their configs can be read.");
    const table = document.createElement("table");
    const add = (parent, cells, tag) => {
      const line = document.createElement("tr");
      cells.forEach((text, index) => {
        const cell = document.createElement(index === 0 || tag === "th" ? "th" : "td");
        cell.scope = tag === "th" ? "col" : index === 0 ? "row" : "";
        if (!cell.scope) cell.removeAttribute("scope");
        cell.textContent = text;
        line.append(cell);
      });
      parent.append(line);
    };
    add(table.createTHead(), ["setting", data.jobs[first].label, data.jobs[second].label], "th");
    const body = table.createTBody();
    rows.forEach((row) => add(body, row, "td"));
    add(body, [`${data.loss} loss`, loss(first), loss(second)], "td");
    place.replaceChildren(table);
  }

  function option(value, text) {
    const element = document.createElement("option");
    element.value = value;
    element.textContent = text;
    return element;
  }

  // --- state that survives a reload ---------------------------------------------------------------------------------------------------------------

  const name = `sweep.${data.id}`;
  const fields = () => Object.fromEntries([...Object.values(controls), ...document.querySelectorAll("#diff-section select"), ...selects].map((element) => [element.id || `key-${element.dataset.key}`, element]));
  function remember() {
    rememberControls(name, fields());
    remembered(`${name}.picked`, picked === null ? "" : data.rows[picked].label);
  }
  function recall() {
    recallControls(name, fields());
    const row = data.rows.findIndex((each) => each.label === remembered(`${name}.picked`));
    if (row >= 0) picked = row;
    sortableTable(find("leaderboard"), name, tables);
  }

  function redraw() {
    filter();
    showPicked();
    drawChart();
    drawSettings();
    remember();
  }

  for (const select of selects) {
    const { values } = data.keys[Number(select.dataset.key)];
    if (values.length > MAX_OPTIONS) select.parentElement.hidden = true;
    else for (const value of values) select.append(option(value, value));
  }
  for (const id of ["first-job", "second-job"]) {
    const select = find(id);
    if (!select) continue;
    const byRow = data.jobs.map((job, index) => [job.row, index]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    for (const [row, index] of byRow) select.append(option(index, `${data.rows[row].rank ? `${data.rows[row].rank}. ` : ""}${data.jobs[index].label}`));
    select.selectedIndex = Math.min(id === "first-job" ? 0 : 1, byRow.length - 1);
    select.addEventListener("input", () => { drawDiff(); remember(); });
  }
  for (const id of ["filters", "diff-section"]) if (find(id)) find(id).hidden = false;
  if (find("chart")) {
    find("chart").addEventListener("keydown", readByKeys);
    find("chart").addEventListener("focusout", () => show(null));
  }
  recall();
  redraw();
  if (find("diff")) drawDiff();
  [...Object.values(controls), ...selects].forEach((element) => element.addEventListener("input", redraw));
  find("reset").addEventListener("click", () => {
    controls.text.value = "";
    selects.forEach((select) => { select.value = ""; });
    picked = null;
    redraw();
  });
  tables.forEach((table, row) => table.querySelector("button.pick").addEventListener("click", () => pick(row)));
  redrawOnChange(redraw);
  reloadWhile(() => !hovered && (document.activeElement === null || document.activeElement === document.body) && String(getSelection()) === "", "The sweep may have ended: its terminal says so.");
  window.lmRunner = { data, curves: () => drawn, shown: () => [...shown], picked: () => picked, chart: () => chart };
})();
