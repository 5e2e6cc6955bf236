// One chart with the losses of several runs.
"use strict";
(() => {
  const controls = { axis: find("axis"), kinds: find("kinds"), smoothing: find("smoothing"), log: find("log") };
  const inOrder = (selector, order) => [...document.querySelectorAll(selector)].sort((a, b) => order(a) - order(b));
  const boxes = inOrder("input[data-show]", (box) => box.dataset.show), rows = inOrder("tr[data-run]", (row) => row.dataset.run);
  const readout = find("readout"), hint = readout.textContent, names = { eval: "evaluation", train: "training" };
  let chart = null, curves = []; // curves: of each series after x, {run, kind, x, values}
  for (const run of data.runs) for (const kind of ["train", "eval"]) expandTokens(run[kind]);

  function lossRange(u) {
    const [values, isWhole] = visibleLosses(u);
    return lossBounds(values, controls.log.checked, isWhole);
  }

  function chosenCurves() {
    const axis = controls.axis.value, weight = Number(controls.smoothing.value), kinds = controls.kinds.value === "both" ? ["train", "eval"] : [controls.kinds.value];
    return kinds.flatMap((kind) => data.runs.flatMap((run, index) => {
      const columns = run[kind];
      if (!boxes[index].checked || !columns) return [];
      return [{ run: index, kind, x: rising(columns[axis]), values: kind === "train" && weight ? smooth(columns.loss, weight) : columns.loss }];
    }));
  }

  function series(curve) {
    const swatch = rows[curve.run].querySelector(".swatch path"), dash = color("--d", swatch), isEval = curve.kind === "eval";
    return {
      label: `${data.runs[curve.run].label}, ${names[curve.kind]}`, stroke: color("--c", swatch), width: isEval ? 2.25 : 1.25, alpha: isEval || controls.kinds.value === "train" ? 1 : 0.7,
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
    const raw = data.runs[curve.run][curve.kind], axis = controls.axis.value, x = raw[axis][nearest];
    const place = axis === "seconds" ? clock(x) : `${axis} ${x.toLocaleString("en")}`;
    readout.textContent = `${data.runs[curve.run].label}: ${names[curve.kind]} loss ${raw.loss[nearest] ?? "not finite"} at ${place}`;
  }

  function redraw() {
    chart?.destroy();
    chart = null;
    curves = chosenCurves();
    const axis = controls.axis.value, place = find("plot"), isLog = controls.log.checked && curves.every((curve) => fitsLog(curve.values));
    place.replaceChildren();
    find("smoothing-value").textContent = controls.smoothing.value;
    rememberControls("compare", controls);
    if (!curves.length) { place.textContent = "No curve is chosen, or nothing is logged yet."; return; }
    chart = new uPlot({
      width: place.clientWidth, height: 360, legend: { show: false }, focus: { alpha: 0.25 }, cursor: { focus: { prox: 20 } },
      series: [{}, ...curves.map(series)], scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range: lossRange } },
      axes: axesOf(axis, { label: TITLES[axis], labelSize: 22 }), hooks: { setSeries: [focus] },
    }, uPlot.join(curves.map((curve) => [curve.x, curve.values]), curves.map(() => [2])), place);
  }

  function filter() {
    rows.forEach((row) => { row.hidden = !matchesFilter(row.textContent, find("filter").value); });
    const shown = rows.filter((row) => !row.hidden).length;
    find("count").textContent = shown === rows.length ? "" : `${shown} of ${rows.length} runs`;
  }

  function showRows(isShown) {
    boxes.forEach((box, index) => { if (!rows[index].hidden) box.checked = isShown; });
    redraw();
  }

  sortableTable(find("runs"), "compare");
  if (!recallControls("compare", controls) && data.runs.length > 6 && data.runs.some((run) => run.eval)) controls.kinds.value = "eval";
  redraw();
  Object.values(controls).forEach((control) => control.addEventListener("input", redraw));
  boxes.forEach((box) => box.addEventListener("input", redraw));
  find("filter").addEventListener("input", filter);
  find("show-all").addEventListener("click", () => showRows(true));
  find("show-none").addEventListener("click", () => showRows(false));
  redrawOnChange(redraw);
  reloadWhile(() => !(chart && chart.cursor.left >= 0) && !document.querySelector("input:focus, select:focus, button:focus") && boxes.every((box) => box.checked));
  window.lmRunner = { data, chart: () => chart, curves: () => curves };
})();
