// The layer x head grid of thumbnails: one button a head, arrow keys walk it.

import { largestOf, paint } from "./color.js";

export class Grid {
  // layers: [{layer, heads}]; events: onPick(layer, head)
  constructor(host, layers, events) {
    this.events = events;
    this.cells = new Map();
    this.layers = layers;
    this.logarithmic = true;
    this.dark = false;
    const document = host.ownerDocument;
    this.table = document.createElement("div");
    this.table.className = "tl-grid";
    this.table.setAttribute("role", "grid");
    this.table.setAttribute("aria-label", "Layers (down) and heads (across)");
    const most = Math.max(...layers.map((one) => one.heads));
    this.table.style.setProperty("--tl-heads", most);
    this.table.append(this.row(document, "", Array.from({ length: most }, (_, head) => `${head}`)));
    for (const { layer, heads } of layers) {
      const row = document.createElement("div");
      row.className = "tl-grid-row";
      row.setAttribute("role", "row");
      row.append(label(document, `${layer}`, "rowheader"));
      for (let head = 0; head < heads; head++) row.append(this.button(document, layer, head));
      this.table.append(row);
    }
    host.append(this.table);
    this.table.addEventListener("keydown", (event) => this.key(event));
  }

  row(document, first, names) {
    const row = document.createElement("div");
    row.className = "tl-grid-row tl-grid-head";
    row.setAttribute("role", "row");
    row.append(label(document, first, "columnheader"), ...names.map((name) => label(document, name, "columnheader")));
    return row;
  }

  button(document, layer, head) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "tl-thumb";
    button.tabIndex = -1;
    button.title = `layer ${layer}, head ${head}`;
    button.setAttribute("role", "gridcell");
    button.setAttribute("aria-label", button.title);
    const canvas = document.createElement("canvas");
    button.append(canvas);
    button.addEventListener("click", () => this.events.onPick(layer, head));
    this.cells.set(`${layer}.${head}`, { button, canvas, layer, head, values: null });
    return button;
  }

  // images: heads x size x size of one layer.
  fill(layer, images, size) {
    for (const cell of this.cells.values()) {
      if (cell.layer !== layer) continue;
      cell.values = images.subarray(cell.head * size * size, (cell.head + 1) * size * size);
      cell.size = size;
      this.repaint(cell);
    }
  }

  clear() {
    for (const cell of this.cells.values()) {
      cell.values = null;
      cell.canvas.getContext("2d").clearRect(0, 0, cell.canvas.width, cell.canvas.height);
    }
  }

  restyle({ logarithmic, dark, diverging }) {
    Object.assign(this, { logarithmic, dark, diverging });
    for (const cell of this.cells.values()) if (cell.values) this.repaint(cell);
  }

  repaint({ canvas, values, size }) {
    const width = Math.round(Math.sqrt(values.length));
    canvas.width = width;
    canvas.height = width;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(width, width);
    const { logarithmic, dark, diverging } = this;
    paint(values, pixels.data, { largest: largestOf(values), logarithmic, dark, diverging });
    context.putImageData(pixels, 0, 0);
    void size;
  }

  pick(layer, head) {
    for (const cell of this.cells.values()) {
      const chosen = cell.layer === layer && cell.head === head;
      cell.button.classList.toggle("tl-chosen", chosen);
      cell.button.setAttribute("aria-selected", String(chosen));
      cell.button.tabIndex = chosen ? 0 : -1;
      if (chosen) cell.button.scrollIntoView?.({ block: "nearest" });
    }
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const cell = [...this.cells.values()].find((one) => one.button === event.target);
    if (!step || !cell) return;
    event.preventDefault();
    const at = this.layers.findIndex((one) => one.layer === cell.layer) + step[0];
    const next = this.layers[at] && this.cells.get(`${this.layers[at].layer}.${cell.head + step[1]}`);
    if (!next) return;
    next.button.focus();
    this.events.onPick(next.layer, next.head);
  }
}

function label(document, text, role) {
  const element = document.createElement("div");
  element.className = "tl-grid-label";
  element.setAttribute("role", role);
  element.textContent = text;
  return element;
}
