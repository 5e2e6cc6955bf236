// Filter, sorting and choice of the list of runs. The table is complete without this script; no request is made but the reload of a served list.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const controls = { filter: element("filter"), status: element("status"), stage: element("stage"), jobs: element("jobs") };
  const { rows } = sortableTable(element("runs"), "list");
  const boxes = [...document.querySelectorAll("input[name=run]")];
  const chosen = () => boxes.filter((box) => box.checked);
  const valueOf = (control) => (control.type === "checkbox" ? control.checked : control.value);

  function filter() {
    let shown = 0;
    for (const row of rows) {
      const { status, stage, kind } = row.dataset;
      row.hidden = (kind === "job" && !controls.jobs.checked) || (controls.status.value && status !== controls.status.value)
        || (controls.stage.value && stage !== controls.stage.value) || !matchesWords(row, controls.filter.value);
      shown += !row.hidden;
    }
    element("count").textContent = `${shown} of ${rows.length} shown`;
    remembered("list.controls", Object.fromEntries(Object.entries(controls).map(([name, control]) => [name, valueOf(control)])));
  }

  function choose() {
    const runs = chosen();
    remembered("list.chosen", runs.map((box) => box.value));
    if (element("compare")) {
      element("compare").disabled = runs.length < 1;
      element("compare").textContent = runs.length ? `compare ${runs.length}` : "compare";
    } else {
      element("command-box").hidden = !runs.length;
      element("command").value = `${data.command} run=${runs.map((box) => box.dataset.argument).join(",")}`;
    }
  }

  const stored = remembered("list.controls");
  if (stored) for (const [name, control] of Object.entries(controls)) {
    if (control.type === "checkbox") control.checked = stored[name] === true;
    else if (typeof stored[name] === "string") control.value = stored[name];
    if (control.tagName === "SELECT" && control.selectedIndex < 0) control.selectedIndex = 0;
  }
  const before = new Set(remembered("list.chosen") || []);
  boxes.forEach((box) => { box.checked = before.has(box.value); box.addEventListener("input", choose); });
  Object.values(controls).forEach((control) => control.addEventListener("input", filter));
  element("no-submit")?.addEventListener("submit", (event) => event.preventDefault());
  element("copy")?.addEventListener("click", () => {
    element("command").select();
    if (navigator.clipboard) navigator.clipboard.writeText(element("command").value).catch(() => {});
  });
  filter();
  choose();
  if (data.reload) setInterval(() => { if (!document.querySelector("input:focus, select:focus, button:focus, a:focus")) location.reload(); }, data.reload * 1000);
})();
