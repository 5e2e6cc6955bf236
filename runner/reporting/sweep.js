// Charts, heat map, filter and comparison of a sweep's page.
"use strict";
(() => {
  const tables = [...document.querySelectorAll("#leaderboard tbody")]; // in the order of data.rows
  const controls = Object.fromEntries(["text", "axis", "validation", "training", "smoothing", "log", "seeds", "all-columns", "heat-rows", "heat-columns", "heat-over"].map((id) => [id, find(id)]).filter(([, element]) => element));
  const selects = [...document.querySelectorAll("#filters select")];
  const MANY_CURVES = 40, TOP_ROWS = 8, NEAR = 40, MANY_VALUES = 12, MAX_OPTIONS = 40, MAX_LANES = 32, OTHER_ROWS = "sx"; // NEAR in pixels
  const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000]; // between ticks
  let picked = null; // index of the row that stands out
  let shown = new Set(); // indices of the jobs that the filter lets through
  let chart = null, drawn = [], hovered = null;

  const make = (tag, fields = {}, ...children) => { const element = Object.assign(document.createElement(tag), fields); element.append(...children); return element; };
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

  for (const job of data.jobs) {
    job.label ??= data.rows[job.row].label;
    for (const curve of [job.train, job.eval]) expandTokens(curve);
  }

  // A curve per job and kind, or one of the mean of a point's seeds; the seeds of the picked point are drawn, too.
  function curvesToDraw() {
    const kinds = [["training", "train"], ["validation", "eval"]].filter(([kind]) => controls[kind].checked), curves = [];
    data.rows.forEach((_, row) => {
      const own = data.jobs.map((job, index) => ({ ...job, index })).filter((job) => job.row === row && shown.has(job.index));
      for (const [kind, name] of kinds) {
        const known = own.filter((job) => job[name]);
        if (known.length > 1) curves.push(meanCurve(row, kind, known, name));
        if (known.length === 1 || row === picked) for (const job of known) curves.push(jobCurve(job, kind, name, known.length > 1));
      }
    });
    const order = (curve) => (curve.row === picked ? -1 : curve.row);
    return curves.sort((a, b) => order(b) - order(a) || (a.kind < b.kind ? -1 : a.kind > b.kind ? 1 : 0)); // the best are drawn last; validation over training
  }
  const smoothed = (kind, loss) => (kind === "training" && Number(controls.smoothing.value) ? smooth(loss, Number(controls.smoothing.value)) : loss);

  function jobCurve(job, kind, name, isSeed) {
    const lowest = kind === "validation" && job.lowest !== null ? job.eval.step.indexOf(job.lowest) : -1;
    return { ...job[name], row: job.row, job: job.index, isSeed, kind, x: job[name][controls.axis.value], y: smoothed(kind, job[name].loss), lowest, isPaused: job.status === "paused", lost: [] };
  }

  // Mean of the completed seeds, as in the leaderboard; before one is completed, of those that may still be. It ends where the first of them ends.
  function meanCurve(row, kind, jobs, name) {
    const sound = [["completed"], ["running", "paused", "interrupted", "new"], null].map((statuses) => jobs.filter((job) => !statuses || statuses.includes(job.status))).find((found) => found.length);
    const curves = sound.map((job) => job[name]), longest = curves.reduce((a, b) => (b.step.length > a.step.length ? b : a));
    const from = Math.max(...curves.map(({ step }) => step[0])), to = Math.min(...curves.map(({ step }) => step[step.length - 1]));
    const grid = longest.step.filter((step) => step >= from && step <= to);
    const reduced = (columns, reduce) => grid.map((_, i) => (columns.every((column) => column[i] !== null) ? reduce(columns.map((column) => column[i])) : null));
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const losses = curves.map((curve) => resampled(curve.step, smoothed(kind, curve.loss), grid));
    const axes = Object.fromEntries(["tokens", "seconds"].map((axis) => [axis, reduced(curves.map((curve) => resampled(curve.step, curve[axis], grid)), mean)]));
    const axis = controls.axis.value, y = reduced(losses, mean), lost = jobs.filter((job) => job.status === "diverged" && !sound.includes(job)).map((job) => job[name][axis][job[name].step.length - 1]);
    return { ...axes, step: grid, loss: y, row, job: null, seeds: sound.length, kind, x: axis === "step" ? grid : axes[axis], y, low: reduced(losses, (values) => Math.min(...values)), high: reduced(losses, (values) => Math.max(...values)), lowest: -1, isPaused: sound.every((job) => job.status === "paused"), lost };
  }

  // Values of a curve at the steps of `grid`, in order and within it; null beside a gap.
  function resampled(steps, values, grid) {
    let i = 0;
    return grid.map((step) => {
      while (steps[i] < step && i < steps.length - 1) i += 1;
      if (steps[i] === step || i === 0) return values[i];
      if (values[i] === null || values[i - 1] === null) return null;
      return values[i - 1] + (values[i] - values[i - 1]) * (step - steps[i - 1]) / (steps[i] - steps[i - 1]);
    });
  }

  // Range of the y axis over the visible part. Of whole curves the first fifth may leave the plot, so that differences at the end are seen; and one
  // diverging job leaves the plot instead of flattening the others.
  function lossRange(u) {
    const { min, max } = u.scales.x, isWhole = min === null || min === undefined || (min <= 0 && max >= u.data[0][1]), values = [], tops = [];
    for (const curve of drawn) {
      const inside = isWhole ? curve.y.filter((y, i) => y !== null && i >= 0.2 * (curve.y.length - 1)) : visiblePart(curve, min, max);
      for (const y of inside) values.push(y);
      if (inside.length) tops.push(Math.max(...inside));
    }
    if (!values.length) return { min: 1, max: 2 };
    tops.sort((a, b) => a - b);
    const typical = tops[Math.floor(tops.length / 2)], [low, high] = lossBounds(values, isLog(), true);
    return { min: low, max: isLog() && high > typical * 3 * 1.03 ? typical * 1.03 : high };
  }
  // Values of a curve between two x, and where its line crosses them.
  function visiblePart({ x, y }, min, max) {
    const ends = [min, max].filter((end) => end > x[0] && end < x[x.length - 1]);
    return [...y.filter((_, i) => x[i] >= min && x[i] <= max), ...resampled(x, y, ends)].filter(isNumber);
  }
  const isLog = () => controls.log.checked && drawn.every((curve) => fitsLog(curve.y));

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
    const { ctx, bbox } = u, isValidation = curve.kind === "validation", { style } = data.rows[curve.row];
    const emphasis = hovered ? hovered.curve.row : null, standsOut = picked === curve.row || emphasis === curve.row;
    const standsBack = (picked !== null || emphasis !== null) && !standsOut, isOther = style === OTHER_ROWS && !standsOut, { isSeed } = curve;
    ctx.strokeStyle = ctx.fillStyle = styleColor(style);
    const alpha = standsBack ? 0.12 : isOther ? 0.3 : isValidation ? 1 : isSeed ? 0.3 : 0.6, at = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
    const pixels = curve.y.map((y, i) => (y === null ? null : at(curve.x[i], y)));
    if (curve.low && !standsBack && !isOther && (isValidation || !controls.validation.checked)) {
      ctx.globalAlpha = 0.18;
      paintBand(ctx, pixels.map((pixel, i) => pixel && [at(curve.x[i], curve.low[i]), at(curve.x[i], curve.high[i])]));
    }
    ctx.globalAlpha = alpha;
    ctx.lineWidth = ratio * (isSeed || !isValidation || isOther ? 1 : 2) + ratio * (standsOut && !isSeed ? 1.5 : 0) + (isSeed && isNamed(curve) ? ratio : 0);
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
    if (isValidation && !isOther && !isSeed && curve.y.length <= 40 && drawn.length <= MANY_CURVES) for (const pixel of pixels) if (pixel) dot(ctx, pixel, 2.6 * ratio, true);
    const mark = (x) => cross(ctx, x, bbox.top + 6 * ratio, 4 * ratio), first = pixels.find((pixel) => pixel), last = pixels[pixels.length - 1];
    pixels.forEach((pixel, i) => { if (!pixel && (i === 0 || pixels[i - 1])) mark(at(curve.x[i], 0)[0]); }); // where a gap begins
    for (const x of curve.lost) mark(at(x, 0)[0]); // where a seed diverged that is not in the mean
    if (first && pixels.every((pixel) => !pixel || pixel[1] < bbox.top)) mark(first[0]); // all of it is above the plot
    if (pixels[curve.lowest]) dot(ctx, pixels[curve.lowest], 6 * ratio, false);
    if (curve.isPaused && last) for (const side of [-2.5, 2.5]) ctx.fillRect(last[0] + (side - 1) * ratio, last[1] - 6 * ratio, 2.5 * ratio, 12 * ratio);
  }
  // `spans`: of each point the pixels of its lowest and highest value, or null
  function paintBand(ctx, spans) {
    ctx.beginPath();
    for (let i = 1; i < spans.length; i += 1) {
      if (!spans[i - 1] || !spans[i]) continue;
      const [a, b] = spans[i - 1], [c, d] = spans[i];
      ctx.moveTo(...a);
      for (const corner of [c, d, b]) ctx.lineTo(...corner);
    }
    ctx.fill();
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

  // The curve whose line is nearest to the pointer, and the nearer of the two points at the ends of that part of it.
  function nearest(u) {
    const { left, top } = u.cursor;
    let best = null, distance = NEAR;
    if (left < 0) return null;
    for (const curve of drawn) {
      let before = null;
      curve.y.forEach((y, i) => {
        const at = y === null ? null : [u.valToPos(curve.x[i], "x") - left, u.valToPos(y, "y") - top];
        const away = at ? Math.hypot(...closest(before || at, at)) : Infinity;
        if (away <= distance) [best, distance] = [{ curve, i: before && Math.hypot(...before) < Math.hypot(...at) ? i - 1 : i }, away];
        before = at;
      });
    }
    return best;
  }
  // Point of the line from a to b that is closest to the origin.
  function closest([ax, ay], [bx, by]) {
    const dx = bx - ax, dy = by - ay, share = Math.max(0, Math.min(1, -(ax * dx + ay * dy) / (dx * dx + dy * dy || 1)));
    return [ax + share * dx, ay + share * dy];
  }
  const isNamed = (curve) => hovered !== null && hovered.curve.row === curve.row && hovered.curve.job === curve.job && hovered.curve.kind === curve.kind;
  // Name the point in the line below the chart and let its curve stand out.
  function show(found) {
    const isSame = found ? isNamed(found.curve) : hovered === null;
    hovered = found;
    find("hovered").textContent = found ? pointText(found) : "\u00a0";
    if (!isSame) chart.redraw(false, false);
  }
  function pointText({ curve, i }) {
    const digits = (value) => Number(value.toPrecision(5)), loss = curve.loss[i];
    const text = loss === null ? "not finite" : curve.job !== null ? loss : `${digits(loss)} (${digits(curve.low[i])} to ${digits(curve.high[i])})`;
    const mean = curve.job === null ? ` mean of ${curve.seeds} seeds,${curve.kind === "training" && Number(controls.smoothing.value) ? " smoothed" : ""}` : "";
    const tokens = curve.tokens[i] === null ? "" : `, ${shortAxis(curve.tokens[i])} tokens`, time = curve.seconds[i] === null ? "" : `, ${clock(curve.seconds[i])}`;
    return `${curve.job === null ? data.rows[curve.row].label : data.jobs[curve.job].label}:${mean} ${curve.kind} loss ${text} at step ${curve.step[i].toLocaleString("en")}${tokens}${time}`;
  }
  const hover = (u) => { if (u === chart) show(nearest(u)); };

  // Left and right read the points of a curve, up and down go to the curve of the next better or worse point; from the best validation curve on.
  function readByKeys(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }, ranks = { ArrowUp: 1, ArrowDown: -1 };
    if (!drawn.length || !(event.key in steps || event.key in ranks)) return;
    event.preventDefault();
    let index = drawn.findIndex(isNamed);
    const isFirst = index < 0, end = (values, i) => Math.max(0, Math.min(values.length - 1, i));
    if (isFirst) index = drawn.length - 1;
    else index = end(drawn, index + (ranks[event.key] || 0));
    const curve = drawn[index];
    show({ curve, i: end(curve.y, isFirst ? curve.y.length - 1 : hovered.i + (steps[event.key] || 0)) });
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
      hooks: { draw: [paint], setCursor: [hover], setScale: [(u, key) => { if (key === "y") hover(u); else queueMicrotask(() => { if (u === chart) u.setScale("y", lossRange(u)); }); }] }, // y follows x
    };
    chart = new uPlot(options, [[0, Math.max(1e-9, ...ends)], [1, 2]], place);
    let pressed = 0; // x of the pointer; a drag zooms and picks nothing
    chart.over.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
    chart.over.addEventListener("click", (event) => { if (hovered && Math.abs(event.clientX - pressed) < 4) pick(hovered.curve.row); });
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
  const shortened = (value, length) => cut(value.length > length && Number.isFinite(Number(value)) ? String(Number(Number(value).toPrecision(3))) : value, length);

  // A chart with a loss axis in `place`; its `picture`, the y of a loss, and the pixels of the plot. Null where there is no loss.
  function lossPlot(place, label, losses) {
    const width = 340, height = 190, left = 50, right = width - 10, top = 12, bottom = height - 34;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    place.replaceChildren(picture);
    if (!losses.length) return picture.append(svg("text", { class: "axis-text", x: left, y: height / 2 }, "no completed job yet")), null;
    const [low, high] = lossSpan(losses), y = (loss) => top + (bottom - top) * Math.max(0, Math.min(1, (high - loss) / (high - low)));
    for (const tick of [low, (low + high) / 2, high]) {
      picture.append(svg("path", { class: "axis-line", d: `M${left} ${y(tick)}H${right}` }), svg("text", { class: "axis-text", x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, Number(tick.toPrecision(4))));
    }
    return { picture, y, left, inner: right - left, top, tickX: (x, text) => xTick(picture, x, bottom + 16, width, text) };
  }
  // A label below an axis, centered as far as the picture reaches.
  function xTick(picture, x, y, width, text) {
    const half = 2 + String(text).length * 3.7; // pixels
    picture.append(svg("text", { class: "axis-text", x: Math.max(half, Math.min(width - half, x)), y, "text-anchor": "middle" }, text));
  }

  function drawEffect(place) {
    const position = data.keys.findIndex((key) => key.key === place.dataset.key), values = data.keys[position].values;
    const jobs = data.jobs.map((job, index) => ({ ...job, index })).filter((job) => shown.has(job.index) && job.values[position] !== null && (job.loss !== null || job.status === "diverged"));
    const plot = lossPlot(place, `${data.loss} loss by ${place.dataset.key}; the table below has the numbers`, jobs.map((job) => job.loss).filter(isNumber));
    if (!plot) return;
    const { picture, y, left, inner, top } = plot, scale = scaleOf(values), margin = values.length > MANY_VALUES ? 0.03 : 0.5 / values.length;
    const x = (value) => left + inner * (margin + (1 - 2 * margin) * scale(value));
    for (const value of ticksOf(values, scale, 5)) plot.tickX(x(value), shortened(value, Math.max(5, Math.floor(inner / Math.min(5, values.length) / 8))));
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

  // At most three lines of about `length` characters, broken after dots and underscores.
  function wrapped(text, length) {
    const lines = [""];
    for (const part of text.match(/[^._ ]*[._ ]?/g)) {
      if (lines[lines.length - 1].length + part.length > length && lines[lines.length - 1]) lines.push("");
      lines[lines.length - 1] += part;
    }
    return [...lines.slice(0, 2), lines.slice(2).join("")].filter(Boolean).map((line) => cut(line, length + 2));
  }

  function drawParallel() {
    const place = find("parallel");
    if (!place) return;
    const axes = data.keys, jobs = data.jobs.map((job, index) => ({ ...job, index })).filter((job) => shown.has(job.index) && (job.loss !== null || job.status === "diverged"));
    const losses = jobs.filter((job) => job.loss !== null).map((job) => job.loss);
    const width = Math.max(place.clientWidth || 0, 110 * (axes.length + 1)), height = 350, top = 60, bottom = 20, side = 60;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", style: `width:${width}px;height:${height}px`, "aria-label": `parallel coordinates of ${jobs.length} jobs; the numbers are in the leaderboard` });
    place.replaceChildren(picture);
    if (!losses.length) return picture.append(svg("text", { class: "axis-text", x: side, y: height / 2 }, "no completed job yet"));
    const [low, high] = lossSpan(losses), x = (index) => side + (width - 2 * side) * index / axes.length;
    const level = (fraction) => height - bottom - (height - top - bottom) * Math.max(0, Math.min(1, fraction));
    const axisY = axes.map(({ values }) => scaleOf(values)), lossY = (loss) => level(loss === null ? 1 : (loss - low) / (high - low));
    [...axes.map(({ key }) => key), `${data.loss} loss`].forEach((title, index) => {
      picture.append(svg("path", { class: "axis-line", d: `M${x(index)} ${top}V${height - bottom}` }));
      const heading = svg("text", { class: "axis-title", "text-anchor": "middle" });
      wrapped(title, 12).forEach((line, number, { length }) => heading.append(svg("tspan", { x: x(index), y: top - 8 - 13 * (length - 1 - number) }, line)));
      picture.append(titled(heading, title));
    });
    const label = (at, pixel, text) => svg("text", { class: "axis-text", x: at + 5, y: pixel + 4 }, text);
    const labels = svg("g", {});
    axes.forEach(({ values }, index) => {
      for (const value of ticksOf(values, axisY[index], 7)) labels.append(label(x(index), level(axisY[index](value)), shortened(value, 12)));
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

  // --- heat map, history, timeline ------------------------------------------------------------------------------------------------------------------

  const channels = (name) => { const hex = color(name).slice(1); return [0, 1, 2].map((i) => parseInt(hex.length === 3 ? hex[i] + hex[i] : hex.slice(2 * i, 2 * i + 2), 16)); };

  function drawHeat() {
    const place = find("heat");
    if (!place) return;
    const focused = [...place.querySelectorAll("button")].indexOf(document.activeElement);
    const keys = ["heat-rows", "heat-columns"].map((id) => Number(controls[id].value)), [across, down] = [data.keys[keys[1]], data.keys[keys[0]]];
    if (across === down) return place.replaceChildren("Choose two different settings.");
    const points = data.rows.map((row, index) => ({ index, jobs: data.jobs.filter((job, at) => job.row === index && shown.has(at)) })).filter(({ jobs }) => jobs.length);
    const cells = down.values.map((value) => across.values.map((other) => heatCell(points.filter(({ jobs }) => jobs[0].values[keys[0]] === value && jobs[0].values[keys[1]] === other))));
    const ranked = [...new Set(cells.flat().map((cell) => cell.loss).filter(isNumber))].sort((a, b) => a - b), best = Math.min(...cells.flat().map((cell) => cell.order ?? Infinity)), [paper, ink] = [channels("--paper"), channels("--c0")];
    const head = make("tr", {}, make("td"), ...across.values.map((value) => make("th", { scope: "col" }, value)));
    const lines = cells.map((line, number) => make("tr", {}, make("th", { scope: "row" }, down.values[number]), ...line.map((cell) => {
      if (cell.loss === null) return make("td", { className: cell.status }, cell.text);
      const isBest = cell.order === best, share = isBest ? 1 : 0.55 * (1 - ranked.indexOf(cell.loss) / ranked.length); // more would make the text hard to read
      const button = make("button", { type: "button", className: isBest ? "best" : "", title: cell.title, ariaPressed: String(picked === cell.row) }, cell.loss.toPrecision(4), cell.note);
      button.style.background = `rgb(${paper.map((value, i) => Math.round(value + share * (ink[i] - value)))})`;
      button.addEventListener("click", () => pick(cell.row));
      return make("td", {}, button);
    })));
    place.replaceChildren(make("p", { className: "dim" }, `rows: ${down.key}; columns: ${across.key}`), make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines)));
    place.querySelectorAll("button")[focused]?.focus();
  }

  // Loss of the points with two values: the lowest, or the mean. A point with a seed that diverged has none, as in the leaderboard.
  function heatCell(points) {
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const jobs = points.flatMap((point) => point.jobs), diverged = jobs.filter((job) => job.status === "diverged").length;
    const losses = points.filter((point) => point.jobs.every((job) => job.status !== "diverged") && point.jobs.some((job) => job.loss !== null))
      .map((point) => [mean(point.jobs.map((job) => job.loss).filter(isNumber)), point.index]).sort(([a], [b]) => a - b);
    const status = ["diverged", "running", "paused", "interrupted", "failed"].find((each) => jobs.some((job) => job.status === each)) ?? (jobs.length ? "waiting" : "–");
    const paused = status === "paused" && data.rows[points.find((point) => data.rows[point.index].paused)?.index];
    if (!losses.length) return { loss: null, status, text: paused ? `${paused.paused}${isNumber(paused.loss) ? `: ${paused.loss.toPrecision(4)}` : ""}` : status };
    const isMean = controls["heat-over"].value === "mean", count = losses.length, loss = isMean ? mean(losses.map(([each]) => each)) : losses[0][0], { rank } = data.rows[losses[0][1]];
    const isRanked = (isMean ? losses : losses.slice(0, 1)).every(([, row]) => data.rows[row].rank);
    return { loss, row: losses[0][1], order: !isRanked ? null : isMean ? loss : rank, note: `${isRanked ? "" : "*"}${diverged ? ` ✕${diverged}` : ""}`, title: `${isMean && count > 1 ? `mean of ${count} points; the best: ` : ""}${data.rows[losses[0][1]].label}${diverged ? `; ${diverged} diverged` : ""}` };
  }

  function drawHistory() {
    const place = find("history");
    if (!place) return;
    const ended = data.jobs.filter((job, index) => shown.has(index) && job.span && ["completed", "failed", "diverged"].includes(job.status)).sort((a, b) => a.span[1] - b.span[1]);
    const plot = lossPlot(place, "loss of the best job so far by the number of ended jobs", ended.map((job) => job.loss).filter(isNumber));
    if (!plot) return;
    const { picture, y, left, inner, top } = plot, x = (index) => left + inner * (0.03 + 0.94 * (ended.length > 1 ? index / (ended.length - 1) : 0.5));
    const line = picture.appendChild(svg("path", { class: "so-far" }));
    let best = null, path = "";
    ended.forEach((job, index) => {
      if (job.loss !== null && (best === null || job.loss < best)) {
        path += best === null ? `M${x(index)} ${y(job.loss)}` : `H${x(index)}V${y(job.loss)}`;
        best = job.loss;
      }
      if (job.loss !== null) picture.append(titled(svg("circle", { class: `dot ${data.rows[job.row].style}`, cx: x(index), cy: y(job.loss), r: picked === job.row ? 5 : 2.5 }), `${index + 1}. ${job.label}: ${job.loss}`));
      else picture.append(titled(svg("path", { class: "cross diverged-mark", d: `M${x(index) - 3} ${top}l6 6m0 -6l-6 6` }), `${index + 1}. ${job.label}: ${job.status}`));
    });
    line.setAttribute("d", `${path}H${x(ended.length - 1)}`);
    for (const index of new Set([0, Math.floor((ended.length - 1) / 2), ended.length - 1])) plot.tickX(x(index), index + 1);
  }

  // A bar per job; jobs that ran at the same time are below each other.
  function drawTimeline() {
    const place = find("timeline");
    if (!place) return;
    const jobs = data.jobs.filter((job, index) => shown.has(index) && job.span).sort((a, b) => a.span[0] - b.span[0]), lanes = [], end = Math.max(1, ...jobs.map((job) => job.span[1]));
    const bars = jobs.map((job) => {
      let lane = lanes.findIndex((until) => until <= job.span[0]);
      if (lane < 0) lane = lanes.length < MAX_LANES ? lanes.length : lanes.indexOf(Math.min(...lanes));
      lanes[lane] = job.span[1];
      return [job, lane];
    });
    const width = 340, tall = Math.max(6, Math.min(26, 140 / lanes.length)), height = 12 + tall * lanes.length, left = 6, x = (seconds) => left + (width - 2 * left) * seconds / end;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height + 22}`, role: "img", "aria-label": `timeline of ${jobs.length} jobs` });
    for (const [job, lane] of bars) {
      const from = x(job.span[0]), long = Math.max(1, x(job.span[1]) - from - 0.5), y = 6 + lane * tall, isBad = ["failed", "diverged"].includes(job.status);
      picture.append(titled(svg("rect", { class: `bar ${job.status}${picked === job.row ? " picked" : ""}`, x: from, width: long, y: y + (isBad ? tall / 2 : 0), height: (isBad ? 0.5 : 0.9) * tall }), `${job.label}: ${job.status}, ${clock(job.span[0])} to ${clock(job.span[1])}`));
    }
    for (const share of [0, 0.5, 1]) xTick(picture, x(share * end), height + 16, width, clock(share * end));
    const counts = ["completed", "running", "paused", "interrupted", "diverged", "failed"].map((status) => [status, jobs.filter((job) => job.status === status).length]).filter(([, count]) => count);
    place.replaceChildren(picture, make("p", { className: "dim" }, ...counts.flatMap(([status, count], index) => [index ? " · " : "", make("b", { className: status }, "■ "), `${count} ${status}`])));
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
      if (fits && matchesFilter(`${job.label} ${job.name} ${job.status === "diverged" ? "failed, diverged" : job.status}`, controls.text.value)) shown.add(index);
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
    for (const draw of [drawParallel, drawHeat, drawHistory, drawTimeline]) draw();
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
    const line = (cells) => make("tr", {}, ...cells.map((text, index) => make(index ? "td" : "th", index ? {} : { scope: "row" }, text)));
    const head = make("tr", {}, ...["setting", data.jobs[first].label, data.jobs[second].label].map((text) => make("th", { scope: "col" }, text)));
    place.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...[...rows, [`${data.loss} loss`, loss(first), loss(second)]].map(line))));
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
    else for (const value of values) select.append(make("option", { value, textContent: value }));
  }
  for (const id of ["first-job", "second-job"]) {
    const select = find(id);
    if (!select) continue;
    const byRow = data.jobs.map((job, index) => [job.row, index]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    for (const [row, index] of byRow) select.append(make("option", { value: index, textContent: `${data.rows[row].rank ? `${data.rows[row].rank}. ` : ""}${data.jobs[index].label}` }));
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
  tables.forEach((table, row) => {
    const button = table.querySelector("button.pick");
    button.ariaLabel = `pick ${data.rows[row].label} out in the charts`;
    button.addEventListener("click", () => pick(row));
  });
  redrawOnChange(redraw);
  reloadWhile(() => !hovered && (document.activeElement === null || document.activeElement === document.body) && String(getSelection()) === "", "The sweep may have ended: its terminal says so.");
  window.lmRunner = { data, curves: () => drawn, shown: () => [...shown], picked: () => picked, chart: () => chart };
})();
