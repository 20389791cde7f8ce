// Elements, tables that change only where a value did, and drawings. Every text of the region is set
// by textContent: names and reasons come from clients.

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, className = "", text = "") {
  const item = document.createElement(tag);
  if (className) item.className = className;
  if (text) item.textContent = text;
  return item;
}

export function setText(item, text) {
  if (item.textContent !== text) item.textContent = text;
}

export function setClass(item, className) {
  if (item.className !== className) item.className = className;
}

function setNumber(item, name, value) {
  const text = `${value}`;
  if (item.style.getPropertyValue(name) !== text) item.style.setProperty(name, text);
}

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value >= 100 || at === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[at]}`;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(2)} s`;
}

export function tokens(value) {
  if (value == null) return "–";
  return Math.round(value).toLocaleString("en");
}

export function percent(value) {
  return value == null ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

/** A table of rows by key. A column has title, className, and either text(row) or draw(cell, row). */
export class Table {
  constructor(place, columns, { empty, order }) {
    this.place = place;
    this.columns = columns;
    this.order = order;
    this.rows = new Map();
    const head = make("div", "row head");
    head.setAttribute("role", "row");
    for (const column of columns) {
      const cell = make("div", column.className, column.title);
      cell.setAttribute("role", "columnheader");
      head.append(cell);
    }
    this.body = make("div", "body");
    this.body.setAttribute("role", "rowgroup");
    this.empty = make("p", "empty", empty);
    place.append(head, this.body);
    place.after(this.empty);
  }

  set(key, row) {
    let item = this.rows.get(key);
    if (!item) {
      item = { at: make("div", "row"), cells: [] };
      item.at.setAttribute("role", "row");
      for (const column of this.columns) {
        const cell = make("div", column.className);
        cell.setAttribute("role", "cell");
        cell.dataset.title = column.title;
        item.at.append(cell);
        item.cells.push(cell);
      }
      this.rows.set(key, item);
      item.isNew = true;
    }
    item.row = row;
    this.columns.forEach((column, index) => {
      if (column.draw) column.draw(item.cells[index], row);
      else setText(item.cells[index], column.text(row) ?? "–");
    });
  }

  delete(key) {
    this.rows.get(key)?.at.remove();
    this.rows.delete(key);
  }

  /** Put new rows in their places. */
  sort() {
    const fresh = [...this.rows.values()].some((item) => item.isNew);
    this.empty.hidden = this.rows.size > 0;
    this.place.hidden = this.rows.size === 0;
    if (!fresh) return;
    const sorted = [...this.rows.values()].sort((a, b) => this.order(a.row, b.row));
    let next = this.body.firstChild;
    for (const item of sorted) {
      item.isNew = false;
      if (item.at === next) next = next.nextSibling;
      else this.body.insertBefore(item.at, next);
    }
  }
}

/** A share from 0 to 1 as a bar, with its words beside it. */
export function meter(cell, share, words) {
  if (!cell.firstChild) {
    const bar = make("span", "meter");
    bar.setAttribute("aria-hidden", "true");
    cell.append(bar, make("span", "words"));
  }
  const value = Math.max(0, Math.min(1, share || 0));
  setNumber(cell.firstChild, "--share", value.toFixed(3));
  setText(cell.lastChild, words);
}

/** The parts of a whole as a bar; `parts` are [name, seconds], classes name their colours. */
export function bar(cell, parts, whole, longest, classOf) {
  const key = JSON.stringify([parts, whole, longest]);
  if (cell.dataset.key === key) return;
  cell.dataset.key = key;
  const words = parts.map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
  const line = make("span", "bar");
  line.setAttribute("role", "img");
  line.setAttribute("aria-label", words || "no time to first token");
  line.title = words;
  setNumber(line, "--share", longest > 0 ? (whole / longest).toFixed(3) : 0);
  // Weights that sum to less than 1 would leave a part of the bar empty.
  const sum = parts.reduce((most, [, value]) => most + value, 0);
  for (const [name, value] of parts) {
    const part = make("span", classOf(name));
    setNumber(part, "--part", ((100 * value) / sum).toFixed(2));
    line.append(part);
  }
  cell.replaceChildren(line, make("span", "words", seconds(whole)));
}

/** A short time series as a line: `points` are numbers, oldest first. */
export function spark(cell, points) {
  const most = Math.max(...points, 1e-9);
  const step = 100 / Math.max(points.length - 1, 1);
  const path = points.map((value, at) => `${at ? "L" : "M"}${(at * step).toFixed(1)} ${(23 - (22 * value) / most).toFixed(1)}`);
  if (!cell.firstChild) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 100 24");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.append(document.createElementNS(SVG, "path"));
    cell.append(svg);
  }
  cell.firstChild.firstChild.setAttribute("d", path.join(""));
}

function shape(tag, attributes, className, text = "") {
  const item = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) item.setAttribute(name, value);
  if (className) item.setAttribute("class", className);
  if (text) item.textContent = text;
  return item;
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** Prefill clusters on the left, PD clusters on the right, and the links between them. */
export function map(place, clusters, links, words) {
  const width = Math.max(280, Math.min(place.clientWidth, 1000));
  const boxWidth = Math.min(240, width * 0.36);
  const sides = [clusters.filter((row) => row.kind === "prefill"), clusters.filter((row) => row.kind !== "prefill")];
  const most = Math.max(sides[0].length, sides[1].length, 1);
  const height = most * 84 + 4;
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const told = links.map((row) => `${row.source} to ${row.target} ${row.condition || "not measured"}`);
  svg.setAttribute("aria-label", `${clusters.length} clusters. Links: ${told.join("; ") || "none"}.`);
  const at = new Map();
  sides.forEach((side, right) => {
    const room = height / Math.max(side.length, 1);
    side.forEach((row, index) => {
      at.set(row.name, { x: right ? width - boxWidth - 1 : 1, y: room * (index + 0.5), row });
    });
  });
  for (const row of links) {
    const from = at.get(row.source), to = at.get(row.target);
    if (!from || !to) continue;
    const x1 = from.x + boxWidth, x2 = to.x, middle = (x1 + x2) / 2;
    const kind = `link ${row.condition || "unknown"}`;
    svg.append(shape("path", { d: `M${x1} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${x2} ${to.y}` }, kind));
    if (links.length <= 6) {
      const y = (from.y + to.y) / 2;
      svg.append(shape("text", { x: middle, y: y - 9, "text-anchor": "middle" }, kind, row.condition || "not measured"));
      if (row.achieved_bytes_per_s != null) {
        svg.append(shape("text", { x: middle, y: y + 18, "text-anchor": "middle" }, "small", `${bytes(row.achieved_bytes_per_s)}/s`));
      }
    }
  }
  for (const { x, y, row } of at.values()) {
    const state = row.healthy ? "good" : "bad";
    const letters = Math.floor((boxWidth - 30) / 7.2);
    svg.append(shape("rect", { x, y: y - 34, width: boxWidth, height: 68, rx: 8 }, `cluster ${state}`));
    svg.append(shape("circle", { cx: x + 14, cy: y - 17, r: 4 }, state));
    svg.append(shape("text", { x: x + 25, y: y - 12 }, "name", cut(row.name, letters)));
    words(row).forEach((text, line) => {
      svg.append(shape("text", { x: x + 12, y: y + 7 + line * 17 }, "small", cut(text, letters + 3)));
    });
  }
  place.replaceChildren(svg);
}
