// Filter, sorting and choice of the list of runs. The table is complete without this script.
"use strict";
(() => {
  const controls = { filter: find("filter"), status: find("status"), stage: find("stage"), jobs: find("jobs") };
  const rows = [...find("runs").tBodies[0].rows], boxes = [...document.querySelectorAll("input[name=run]")];

  function filter() {
    let shown = 0;
    for (const row of rows) {
      const { status, stage, kind } = row.dataset;
      row.hidden = (kind === "job" && !controls.jobs.checked) || (controls.status.value && status !== controls.status.value)
        || (controls.stage.value && stage !== controls.stage.value) || !matchesFilter(row.textContent, controls.filter.value);
      shown += !row.hidden;
    }
    find("count").textContent = `${shown} of ${rows.length} shown`;
    rememberControls("list.controls", controls);
  }

  function choose() {
    const runs = boxes.filter((box) => box.checked);
    remembered("list.chosen", runs.map((box) => box.value));
    if (find("compare")) {
      find("compare").disabled = runs.length < 1;
      find("compare").textContent = runs.length ? `compare ${runs.length}` : "compare";
    } else {
      find("command-box").hidden = !runs.length;
      find("command").value = `${data.command} run=${runs.map((box) => box.dataset.argument).join(",")}`;
    }
  }

  sortableTable(find("runs"), "list");
  recallControls("list.controls", controls);
  const before = new Set(remembered("list.chosen") || []);
  boxes.forEach((box) => { box.checked = before.has(box.value); box.addEventListener("input", choose); });
  Object.values(controls).forEach((control) => control.addEventListener("input", filter));
  find("no-submit")?.addEventListener("submit", (event) => event.preventDefault());
  find("copy")?.addEventListener("click", () => {
    find("command").select();
    if (navigator.clipboard) navigator.clipboard.writeText(find("command").value).catch(() => {});
  });
  filter();
  choose();
  reloadWhile(() => !document.querySelector("input:focus, select:focus, button:focus, a:focus"));
})();
