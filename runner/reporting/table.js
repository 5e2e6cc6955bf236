// Sorting and filtering of a table, by mouse and keyboard. `sortableTable(table, name)` remembers the order under `name` for as long as the tab is open.
"use strict";
function remembered(name, value) {
  try {
    if (value !== undefined) sessionStorage.setItem(`lm-runner.${name}`, JSON.stringify(value));
    return JSON.parse(sessionStorage.getItem(`lm-runner.${name}`));
  } catch { return null; } // no storage for files in this browser
}

function sortableTable(table, name) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];

  const cellValue = (row, index) => row.cells[index].dataset.value ?? row.cells[index].textContent.trim();
  // A row without a value is last in both directions.
  function compareRows(index, isNumber, sign) {
    return (one, other) => {
      const [a, b] = [cellValue(one, index), cellValue(other, index)];
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * (isNumber ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true }));
    };
  }

  function sort(index, direction) {
    headers.forEach((header, other) => (other === index ? header.setAttribute("aria-sort", direction) : header.removeAttribute("aria-sort")));
    const sign = direction === "ascending" ? 1 : -1;
    body.append(...[...original].sort(compareRows(index, headers[index].dataset.sort === "number", sign)));
    remembered(`${name}.order`, [index, direction]);
  }

  headers.forEach((header, index) => {
    if (!header.dataset.sort) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => sort(index, header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending"));
  });
  const order = remembered(`${name}.order`);
  if (Array.isArray(order) && headers[order[0]]?.dataset.sort) sort(order[0], order[1] === "descending" ? "descending" : "ascending");
  return { rows: original, sort };
}

// Whether each of the words occurs in the row.
function matchesWords(row, words) {
  const text = row.textContent.toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}
