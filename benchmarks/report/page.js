"use strict";
// Tables of class "sorts" get a button in each heading; without scripts they stay as they were written.
(() => {
  const value = (cell) => {
    const number = cell.dataset.value;
    if (number !== undefined) return Number(number);
    const words = cell.textContent.trim();
    return words === "" || words === "\u2013" ? null : words;
  };
  // Numbers before words; what has no value comes last in either direction.
  const order = (one, other, sign) => {
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one === "number" && typeof other === "number") return sign * (one - other);
    if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
    return sign * one.localeCompare(other, "en", { numeric: true });
  };
  const sort = (table, head, index) => {
    const falling = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => [value(row.cells[index]), row]);
    rows.sort((one, other) => order(one[0], other[0], falling ? -1 : 1));
    body.append(...rows.map(([, row]) => row));
  };
  for (const table of document.querySelectorAll("table.sorts")) {
    Array.from(table.tHead.rows[0].cells).forEach((head, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, head, index));
      head.append(button);
    });
  }
})();
