// One map on a canvas: the picture, tokens or positions along its axes, profiles, a crosshair, pan and zoom.

import { magnitude, number, paint, palette } from "./color.js";

const GUTTER = { left: 84, top: 72, right: 44, bottom: 44 };
const FONT = "11px system-ui, sans-serif";
const TOKEN_PIXELS = 12;

// Tokens as they are drawn: white space made visible, and never markup, for a canvas only draws text.
export function shown(token, most = 14) {
  const text = token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");
  const characters = [...text];
  return characters.length > most ? characters.slice(0, most - 1).join("") + "…" : text;
}

function ticks(begin, end, most) {
  const raw = (end - begin) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1)));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) ?? 10 * power);
  const out = [];
  for (let at = Math.ceil(begin / step) * step; at < end; at += step) out.push(at);
  return out;
}

export class MapView {
  // events: onMove(window), onHover(cell or null)
  constructor(host, pane, events) {
    this.pane = pane;
    this.events = events;
    this.picture = null;
    this.window = null;
    this.cursor = null;
    this.dark = false;
    this.logarithmic = true;
    this.largest = 1;
    const document = host.ownerDocument;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "tl-map";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "attention map");
    this.image = document.createElement("canvas");
    host.append(this.canvas);
    this.listen();
  }

  describe(text) {
    this.canvas.setAttribute(
      "aria-label",
      `${text}. Arrow keys pan, plus and minus zoom, 0 shows everything, Shift and arrow keys move the crosshair.`,
    );
  }

  resize(width) {
    const size = Math.max(120, Math.floor(width - GUTTER.left - GUTTER.right));
    this.plot = { x: GUTTER.left, y: GUTTER.top, size };
    const ratio = globalThis.devicePixelRatio || 1;
    const height = size + GUTTER.top + GUTTER.bottom;
    this.canvas.style.width = `${size + GUTTER.left + GUTTER.right}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round((size + GUTTER.left + GUTTER.right) * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.ratio = ratio;
    this.draw();
  }

  // Most pixels that the plot can show.
  get resolution() {
    return Math.max(16, Math.min(768, Math.round(this.plot.size * this.ratio)));
  }

  // Of this.picture: {rows: [a, b], columns: [a, b], shape: [R, C], data, exact}
  repaint() {
    const { picture, image } = this;
    if (picture) {
      const [rows, columns] = picture.shape;
      image.width = columns;
      image.height = rows;
      const context = image.getContext("2d");
      const pixels = context.createImageData(columns, rows);
      paint(picture.data, pixels.data, {
        largest: this.largest,
        logarithmic: this.logarithmic,
        diverging: this.pane.diverging,
        dark: this.dark,
      });
      context.putImageData(pixels, 0, 0);
      this.profiles = profilesOf(picture);
    }
    this.draw();
  }

  // Canvas coordinates of a query and a key.
  y(row) {
    const { rows } = this.window;
    return this.plot.y + ((row - rows[0]) / (rows[1] - rows[0])) * this.plot.size;
  }

  x(column) {
    const { columns } = this.window;
    return this.plot.x + ((column - columns[0]) / (columns[1] - columns[0])) * this.plot.size;
  }

  // The query and key under a point of the canvas, as real numbers; null outside the plot.
  at(px, py) {
    const u = (px - this.plot.x) / this.plot.size;
    const v = (py - this.plot.y) / this.plot.size;
    if (u < 0 || u >= 1 || v < 0 || v >= 1 || !this.window) return null;
    const { rows, columns } = this.window;
    return { row: rows[0] + v * (rows[1] - rows[0]), column: columns[0] + u * (columns[1] - columns[0]) };
  }

  // The picture's cell at a query and key: the ranges it covers, and its value.
  cell(row, column) {
    const { picture } = this;
    if (!picture) return null;
    const r = index(row, picture.rows, picture.shape[0]);
    const c = index(column, picture.columns, picture.shape[1]);
    if (r < 0 || c < 0) return null;
    return {
      rows: edges(r, picture.rows, picture.shape[0]),
      columns: edges(c, picture.columns, picture.shape[1]),
      value: picture.data[r * picture.shape[1] + c],
      exact: picture.exact,
    };
  }

  // Whether a query at `row` can see the key at `column`.
  sees(row, column) {
    const { causal, offset, span } = this.sight ?? {};
    const place = Math.floor(row) + (offset ?? 0);
    const key = Math.floor(column);
    return !(causal && key > place) && !(span && key <= place - span);
  }

  draw() {
    if (!this.plot || !this.window) return;
    const { plot, canvas } = this;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const ink = style.getPropertyValue("--tl-ink").trim() || "#222";
    const faint = style.getPropertyValue("--tl-faint").trim() || "#888";
    const unseen = style.getPropertyValue("--tl-unseen").trim() || "#e6e6e6";
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.font = FONT;
    context.save();
    context.beginPath();
    context.rect(plot.x, plot.y, plot.size, plot.size);
    context.clip();
    if (this.picture) {
      const { rows, columns } = this.picture;
      context.imageSmoothingEnabled = false;
      const [x, y] = [this.x(columns[0]), this.y(rows[0])];
      context.drawImage(this.image, x, y, this.x(columns[1]) - x, this.y(rows[1]) - y);
    }
    this.shade(context, unseen);
    this.crosshair(context, ink);
    context.restore();
    context.strokeStyle = faint;
    context.strokeRect(plot.x - 0.5, plot.y - 0.5, plot.size + 1, plot.size + 1);
    this.axes(context, ink, faint);
    this.drawProfiles(context, ink);
  }

  // What no query may see: the future, and what lies beyond a sliding window.
  shade(context, color) {
    const { causal, offset, span } = this.sight ?? {};
    const { rows, columns } = this.window;
    context.fillStyle = color;
    // Beyond the end of the text that this model read.
    const { x, y, size } = this.plot;
    const read = this.tokens?.length ?? Infinity;
    if (rows[1] > read) context.fillRect(x, Math.max(y, this.y(read)), size, size);
    if (columns[1] > read) context.fillRect(Math.max(x, this.x(read)), y, size, size);
    const [top, bottom] = [this.y(rows[0]), this.y(rows[1])];
    const edge = (row, shift) => this.x(row + shift);
    if (causal) {
      // A step of one pixel a query: at close zooms the staircase of the diagonal shows.
      context.beginPath();
      const far = this.plot.x + this.plot.size + 1;
      this.stairs(context, rows, (row) => edge(row, offset + 1), far, top, bottom);
      context.fill();
    }
    if (span) {
      context.beginPath();
      this.stairs(context, rows, (row) => edge(row, offset + 1 - span), this.plot.x - 1, top, bottom);
      context.fill();
    }
  }

  stairs(context, rows, edge, far, top, bottom) {
    const close = this.plot.size / (rows[1] - rows[0]) > 2;
    context.moveTo(far, top);
    if (close) {
      for (let row = Math.floor(rows[0]); row < rows[1]; row++) {
        context.lineTo(edge(row), this.y(row));
        context.lineTo(edge(row), this.y(row + 1));
      }
    } else {
      context.lineTo(edge(rows[0]), top);
      context.lineTo(edge(rows[1]), bottom);
    }
    context.lineTo(far, bottom);
    context.closePath();
  }

  crosshair(context, ink) {
    if (!this.cursor) return;
    const cell = this.cell(this.cursor.row, this.cursor.column);
    const middle = (pair) => (pair[0] + pair[1]) / 2;
    const x = this.x(cell ? middle(cell.columns) : this.cursor.column);
    const y = this.y(cell ? middle(cell.rows) : this.cursor.row);
    context.strokeStyle = ink;
    context.globalAlpha = 0.35;
    context.beginPath();
    context.moveTo(x, this.plot.y);
    context.lineTo(x, this.plot.y + this.plot.size);
    context.moveTo(this.plot.x, y);
    context.lineTo(this.plot.x + this.plot.size, y);
    context.stroke();
    context.globalAlpha = 1;
  }

  axes(context, ink, faint) {
    const { plot, window, tokens } = this;
    const pixels = plot.size / (window.rows[1] - window.rows[0]);
    context.textBaseline = "middle";
    if (pixels >= TOKEN_PIXELS && tokens) {
      context.textAlign = "right";
      for (let row = Math.max(0, Math.ceil(window.rows[0] - 0.5)); row < window.rows[1] && row < tokens.length; row++) {
        const y = this.y(row + 0.5);
        if (y < plot.y || y > plot.y + plot.size) continue;
        context.fillStyle = this.cursor && Math.floor(this.cursor.row) === row ? ink : faint;
        context.fillText(shown(tokens[row]), plot.x - 5, y, GUTTER.left - 8);
      }
      context.textAlign = "left";
      const columns = window.columns;
      for (let c = Math.max(0, Math.ceil(columns[0] - 0.5)); c < columns[1] && c < tokens.length; c++) {
        const x = this.x(c + 0.5);
        if (x < plot.x || x > plot.x + plot.size) continue;
        context.fillStyle = this.cursor && Math.floor(this.cursor.column) === c ? ink : faint;
        context.save();
        context.translate(x, plot.y - 5);
        context.rotate(-Math.PI / 2);
        context.fillText(shown(tokens[c]), 0, 0, GUTTER.top - 8);
        context.restore();
      }
      return;
    }
    context.strokeStyle = faint;
    context.fillStyle = ink;
    for (const row of ticks(...window.rows, plot.size / 60)) {
      const y = this.y(row);
      line(context, plot.x - 5, y, plot.x, y);
      context.textAlign = "right";
      context.fillText(row.toLocaleString("en"), plot.x - 8, y);
    }
    for (const column of ticks(...window.columns, plot.size / 80)) {
      const x = this.x(column);
      line(context, x, plot.y - 5, x, plot.y);
      context.textAlign = "center";
      context.fillText(column.toLocaleString("en"), x, plot.y - 12);
    }
    context.fillStyle = faint;
    context.textAlign = "center";
    context.fillText("key position", plot.x + plot.size / 2, plot.y - 32);
    context.save();
    context.translate(plot.x - 62, plot.y + plot.size / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("query position", 0, 0);
    context.restore();
  }

  // Bars beside the plot: what its columns, and its rows, come to.
  drawProfiles(context, ink) {
    const { picture, plot, profiles } = this;
    if (!picture || !profiles) return;
    const length = GUTTER.right - 12;
    const colors = palette(this.pane.diverging, this.dark);
    const color = (value) => {
      const at = this.pane.diverging && value < 0 ? 0.2 : this.pane.diverging ? 0.8 : 0.6;
      const from = 3 * Math.round(at * (colors.length / 3 - 1));
      return `rgb(${colors[from]}, ${colors[from + 1]}, ${colors[from + 2]})`;
    };
    const draw = (values, span, place, bar) => {
      const largest = Math.max(...values.map(Math.abs), 0);
      values.forEach((value, i) => {
        // Always linear: bars are read by their length.
        const size = (Math.abs(value) / largest) * length;
        if (!(size > 0)) return;
        const [from, to] = edges(i, span, values.length).map(place);
        context.fillStyle = color(value);
        bar(from, Math.max(0.5, to - from), size);
      });
    };
    context.save();
    context.beginPath();
    context.rect(plot.x, plot.y, plot.size + GUTTER.right, plot.size + GUTTER.bottom);
    context.clip();
    const right = plot.x + plot.size + 4;
    const below = plot.y + plot.size + 4;
    context.beginPath();
    context.rect(plot.x, below, plot.size, length);
    context.rect(right, plot.y, length, plot.size);
    context.clip();
    draw(profiles.columns, picture.columns, (c) => this.x(c), (x, width, size) => context.fillRect(x, below, width, size));
    draw(profiles.rows, picture.rows, (r) => this.y(r), (y, height, size) => context.fillRect(right, y, size, height));
    context.restore();
    context.fillStyle = ink;
  }

  zoom(factor, around) {
    const middle = around ?? {
      row: (this.window.rows[0] + this.window.rows[1]) / 2,
      column: (this.window.columns[0] + this.window.columns[1]) / 2,
    };
    const scaled = (span, center) => [center + (span[0] - center) * factor, center + (span[1] - center) * factor];
    this.events.onMove({
      rows: scaled(this.window.rows, middle.row),
      columns: scaled(this.window.columns, middle.column),
    });
  }

  pan(rows, columns) {
    const moved = (span, by) => [span[0] + by, span[1] + by];
    this.events.onMove({ rows: moved(this.window.rows, rows), columns: moved(this.window.columns, columns) });
  }

  // What lies under a pointer that has not moved, after the map did.
  hoverAgain() {
    if (this.pointer) this.hover(this.at(...this.pointer));
  }

  hover(place) {
    this.events.onHover(this, place);
  }

  listen() {
    const { canvas } = this;
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener(
      "wheel",
      (event) => {
        const place = this.at(...point(event));
        if (!place) return;
        event.preventDefault();
        this.zoom(1.0015 ** Math.max(-400, Math.min(400, event.deltaY * (event.deltaMode ? 30 : 1))), place);
      },
      { passive: false },
    );
    let grip = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.at(...point(event))) return;
      grip = point(event);
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("tl-dragging");
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = point(event);
      if (grip) {
        const scale = (span) => (span[1] - span[0]) / this.plot.size;
        this.pan((grip[1] - now[1]) * scale(this.window.rows), (grip[0] - now[0]) * scale(this.window.columns));
        grip = now;
      }
      this.pointer = now;
      this.hover(this.at(...now));
    });
    const release = () => {
      grip = null;
      canvas.classList.remove("tl-dragging");
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.hover(null);
    });
    canvas.addEventListener("dblclick", (event) => {
      const place = this.at(...point(event));
      if (place) this.zoom(event.shiftKey ? 2 : 0.5, place);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const size = (span) => span[1] - span[0];
    if (step && event.shiftKey) {
      const { rows, columns } = this.window;
      const from = this.cursor ?? { row: (rows[0] + rows[1]) / 2, column: (columns[0] + columns[1]) / 2 };
      const shape = this.picture?.shape ?? [64, 64];
      const row = from.row + (step[0] * size(this.picture?.rows ?? rows)) / shape[0];
      const column = from.column + (step[1] * size(this.picture?.columns ?? columns)) / shape[1];
      const inside = (value, span) => Math.min(Math.max(value, span[0]), span[1] - 1e-6);
      this.hover({ row: inside(row, rows), column: inside(column, columns) });
    } else if (step) this.pan(step[0] * 0.1 * size(this.window.rows), step[1] * 0.1 * size(this.window.columns));
    else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.5, this.cursor);
    else if (event.key === "-" || event.key === "_") this.zoom(1.5, this.cursor);
    else if (event.key === "0") this.events.onFit();
    else return;
    event.preventDefault();
  }
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

// Pixel i of `count` over a span covers begin + floor(i n / count) up to begin + floor((i + 1) n / count).
export function edges(i, [begin, end], count) {
  const n = end - begin;
  return [begin + Math.floor((i * n) / count), begin + Math.floor(((i + 1) * n) / count)];
}

function index(place, [begin, end], count) {
  const at = Math.floor(place);
  if (at < begin || at >= end) return -1;
  let i = Math.min(count - 1, Math.floor(((at - begin) * count) / (end - begin)));
  while (i + 1 < count && edges(i, [begin, end], count)[1] <= at) i++;
  return i;
}

// Along either axis what the picture's reduction comes to: a sum of sums, or the largest of the largest.
function profilesOf({ data, shape, reduce }) {
  const [height, width] = shape;
  const rows = new Array(height).fill(0);
  const columns = new Array(width).fill(0);
  for (let r = 0; r < height; r++) {
    for (let c = 0; c < width; c++) {
      const value = data[r * width + c];
      if (reduce === "sum") {
        rows[r] += value;
        columns[c] += value;
      } else {
        if (Math.abs(value) > Math.abs(rows[r])) rows[r] = value;
        if (Math.abs(value) > Math.abs(columns[c])) columns[c] = value;
      }
    }
  }
  return { rows, columns };
}

// A bar with the scale's ends and middle, drawn once a change.
export function legend(canvas, { diverging, dark, largest, logarithmic }) {
  const ratio = globalThis.devicePixelRatio || 1;
  const [width, height] = [200, 28];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const colors = palette(diverging, dark);
  for (let x = 0; x < width; x++) {
    const from = 3 * Math.round((x / (width - 1)) * (colors.length / 3 - 1));
    context.fillStyle = `rgb(${colors[from]}, ${colors[from + 1]}, ${colors[from + 2]})`;
    context.fillRect(x, 0, 1, 10);
  }
  context.font = FONT;
  context.fillStyle = getComputedStyle(canvas).getPropertyValue("--tl-ink").trim() || "#222";
  context.textBaseline = "top";
  if (!largest) {
    context.textAlign = "left";
    context.fillText("all exactly 0", 0, 14);
    return;
  }
  const labels = diverging
    ? [[0, "left", -largest], [0.5, "center", 0], [1, "right", largest]]
    : [[0, "left", logarithmic ? magnitude(0, largest, true) : 0], [0.5, "center", magnitude(0.5, largest, logarithmic)],
       [1, "right", largest]];
  for (const [at, align, value] of labels) {
    context.textAlign = align;
    const least = !diverging && logarithmic && at === 0 ? "≤ " : "";
    context.fillText(least + number(value), at * width, 14);
  }
}
