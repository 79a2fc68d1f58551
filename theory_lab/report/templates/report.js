"use strict";
// Sorting and choosing rows. Without it the page shows every row.

for (const table of document.querySelectorAll("table.data")) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);
  const controls = document.querySelector(`.controls[data-table="${table.id}"]`);
  const more = document.querySelector(`.more[data-table="${table.id}"]`);
  let sorted = rows;
  let most = more === null ? Infinity : Number(more.dataset.most);

  heads.forEach((head, column) => {
    // The title stays plain text: Chromium leaves buttons out of the heads that it repeats on paper.
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-label", `Sort by ${head.textContent}`);
    head.append(button);
    button.addEventListener("click", () => {
      const was = head.getAttribute("aria-sort");
      const next = was === null ? "ascending" : was === "ascending" ? "descending" : null;
      for (const other of heads) other.removeAttribute("aria-sort");
      if (next !== null) head.setAttribute("aria-sort", next);
      order(column, next);
    });
  });

  // A number sorts by its full value, everything else as text; what has no value comes last either way.
  function order(column, direction) {
    sorted = rows;
    if (direction !== null) {
      const numeric = heads[column].classList.contains("number");
      const sign = direction === "ascending" ? 1 : -1;
      const compare = new Intl.Collator("en", { numeric: true }).compare;
      const keyed = rows.map((row) => {
        const cell = row.cells[column];
        if (!numeric) return [row, cell.textContent];
        return [row, cell.dataset.v === undefined ? NaN : Number(cell.dataset.v.replace("inf", "Infinity"))];
      });
      keyed.sort(([, a], [, b]) => {
        if (!numeric) return sign * compare(a, b);
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return a === b ? 0 : sign * (a < b ? -1 : 1);
      });
      sorted = keyed.map(([row]) => row);
    }
    cut();
    body.append(...sorted);
  }

  function cut() {
    let shown = 0;
    for (const row of sorted) {
      if (!row.hidden) shown += 1;
      row.classList.toggle("later", !row.hidden && shown > most);
    }
    if (more !== null) {
      more.hidden = shown <= most;
      more.textContent = `Show the other ${shown - most} rows`;
    }
  }

  if (controls === null) continue;
  const search = controls.querySelector("input");
  const selects = Array.from(controls.querySelectorAll("select"));
  const count = controls.querySelector("output");
  let texts = null;

  function choose() {
    texts ??= rows.map((row) => Array.from(row.cells, (cell) => cell.textContent).join(" ").toLowerCase());
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, index) => {
      const fits = words.every((word) => texts[index].includes(word)) && selects.every(
        (select) => select.value === "" || row.cells[Number(select.dataset.column)].textContent === select.value);
      row.hidden = !fits;
      shown += Number(fits);
    });
    cut();
    count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
  }

  more.addEventListener("click", () => {
    const first = sorted.find((row) => row.classList.contains("later"));
    most = Infinity;
    cut();
    first.tabIndex = -1;
    first.focus();
  });
  search.addEventListener("input", choose);
  for (const select of selects) select.addEventListener("change", choose);
  controls.querySelector(".reset").addEventListener("click", () => {
    search.value = "";
    for (const select of selects) select.value = "";
    choose();
  });
  controls.hidden = false;
  choose();
}
