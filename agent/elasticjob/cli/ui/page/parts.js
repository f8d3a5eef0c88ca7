// Parts that several sections use.

import { el } from "./dom.js";
import { phaseClass, phaseMark } from "./format.js";

export function badge(phase) {
  const word = phase || "no status";
  return el("span", { class: `badge ${phaseClass(phase)}` },
    el("span", { "aria-hidden": "true" }, `${phaseMark(phase)} `), word);
}

export function section(id, title, ...content) {
  return el("section", { key: id, id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), content);
}

// Return a table that scrolls by itself. `columns`: names; `rows`: {key, cells}; a cell is text or descriptions. The
// first cell of a row is its header. Columns in `numbers`, by index, are aligned at the right.
export function table(caption, columns, rows, numbers = []) {
  const style = (column) => (numbers.includes(column) ? "number" : null);
  const head = columns.map((name, column) => el("th", { scope: "col", class: style(column) }, name));
  const body = rows.map(({ key, cells }) => el("tr", { key },
    cells.map((cell, column) => (column === 0
      ? el("th", { scope: "row", class: style(column) }, cell)
      : el("td", { class: style(column) }, cell)))));
  return el("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

export function facts(pairs) {
  const given = pairs.filter((pair) => pair && pair[1] !== "" && pair[1] !== undefined);
  return el("dl", { class: "facts" }, given.map(([name, value]) => el("div", { key: name }, el("dt", {}, name), el("dd", {}, value))));
}
