// The attention explorer: a grid of heads, the opened head's map in one or more panes, one window for all of them.

import { largestOf, number } from "./color.js";
import { button, choice, element } from "./controls.js";
import { Grid } from "./grid.js";
import { legend, MapView, shown } from "./mapview.js";
import { Queue, widgetTransport } from "./transport.js";

const LEAST_WINDOW = 8;
const THUMBNAIL = 40;
const LEAST_PANE = 310;

// How many letters of the text each token stands for: tokenizers differ in what they do with spaces, and tell by a
// ## or by a space where a word goes on; special tokens stand for none.
export function letters(words) {
  const pieces = !words.some((word) => /^\s\S/u.test(word));
  return words.map((word) => {
    if (/^(\[[A-Z]+\]|<\|?[\w-]+\|?>)$/u.test(word)) return 0;
    return (pieces ? word.replace(/^##(?=.)/u, "") : word).replace(/\s+/gu, "").length;
  });
}

// Panes that begin a row of `across`: a model's maps, and a mechanism's views and their difference, stay side by side
// where a row has room for them.
export function rowStarts(panes, across) {
  const starts = new Set();
  const same = [(a, b) => a.model === b.model, (a, b) => a.model === b.model && a.group === b.group];
  let column = 0;
  panes.forEach((pane, i) => {
    for (const alike of same) {
      if (i > 0 && alike(panes[i - 1], pane)) continue;
      let end = i;
      while (end < panes.length && alike(panes[end], pane)) end++;
      if (end - i <= across && column % across && (column % across) + end - i > across) {
        starts.add(i);
        column = 0;
      }
    }
    column++;
  });
  return starts;
}

export class Explorer {
  constructor(host, ask, meta) {
    this.ask = ask;
    this.meta = meta;
    this.host = host;
    this.queue = new Queue();
    this.state = { layer: meta.layer, head: meta.head, reduce: "max", logarithmic: true, source: meta.panes[0].id };
    this.whole();
    this.build();
    this.watchTheme();
    this.open(this.state.layer, this.state.head);
    // After the map, which is more urgent.
    this.thumbnails();
  }

  get base() {
    return this.meta.models[0];
  }

  layerOf(model) {
    const layers = this.meta.models[model].layers;
    return layers.find((one) => one.layer === this.state.layer) ?? null;
  }

  whole() {
    const { rows, columns } = this.layerOf(0) ?? this.base.layers[0];
    this.state.window = { rows: [0, rows], columns: [0, columns] };
  }

  build() {
    const document = this.host.ownerDocument;
    const root = element(document, "div", "tl-explorer");
    this.root = root;
    const bar = element(document, "div", "tl-bar");
    bar.setAttribute("role", "toolbar");
    bar.setAttribute("aria-label", "View");
    this.title = element(document, "strong", "tl-title");
    this.reduction = choice(document, "pixel shows", [["max", "its largest weight"], ["sum", "the sum"]], "max", (reduce) => {
      this.state.reduce = reduce;
      this.refresh();
    });
    const scale = choice(document, "scale", [["log", "logarithmic"], ["linear", "linear"]], "log", (value) => {
      this.state.logarithmic = value === "log";
      this.restyle();
    });
    bar.append(this.title, this.reduction.box, scale.box);
    if (this.meta.panes.length > 1) {
      const names = this.meta.panes.map((pane) => [pane.id, pane.label]);
      const source = choice(document, "grid shows", names, this.state.source, (id) => {
        this.state.source = id;
        this.thumbnails();
      });
      bar.append(source.box);
    }
    bar.append(
      button(document, "+", "Zoom in", () => this.views[0].zoom(0.5)),
      button(document, "−", "Zoom out", () => this.views[0].zoom(2)),
      button(document, "Fit", "Show the whole map", () => this.fit()),
      button(document, "Diagonal", "Center the window on the diagonal", () => this.toDiagonal()),
    );
    this.wait = element(document, "span", "tl-wait");
    bar.append(this.wait);
    const body = element(document, "div", "tl-body");
    const side = element(document, "div", "tl-side");
    this.main = element(document, "div", "tl-main");
    this.panes = element(document, "div", "tl-panes");
    this.status = element(document, "div", "tl-status");
    this.idle = "Point at a spot of a map to read it.";
    this.status.textContent = this.idle;
    this.status.setAttribute("role", "status");
    this.status.setAttribute("aria-live", "polite");
    this.help = element(
      document,
      "p",
      "tl-help",
      "Wheel or + − zoom, drag or arrow keys pan, double click opens a spot, 0 shows everything. " +
        "Gray is what a query cannot see.",
    );
    this.main.append(this.status, this.panes, this.help);
    body.append(side, this.main);
    root.append(bar, body);
    this.host.replaceChildren(root);
    this.grid = new Grid(side, this.base.layers, { onPick: (layer, head) => this.open(layer, head) });
    this.views = this.meta.panes.map((pane) => this.pane(document, pane));
    this.resizer = new ResizeObserver(() => this.layout());
    this.resizer.observe(this.main);
    this.layout();
  }

  pane(document, pane) {
    const box = element(document, "section", "tl-pane");
    const head = element(document, "div", "tl-pane-head");
    const bar = element(document, "canvas", "tl-legend");
    bar.setAttribute("aria-hidden", "true");
    const note = element(document, "button", "tl-note");
    note.type = "button";
    note.hidden = true;
    note.addEventListener("click", () => this.fetch(view, "all"));
    const name = element(document, "h2", "", pane.label);
    name.title = pane.label;
    head.append(name, bar);
    box.append(head);
    const view = new MapView(box, pane, {
      onMove: (window) => this.move(this.toBase(pane.model, window)),
      onHover: (from, place) => this.hover(from, place),
      onFit: () => this.fit(),
    });
    box.append(note);
    Object.assign(view, { box, bar, note, tokens: this.meta.models[pane.model].words });
    this.panes.append(box);
    return view;
  }

  layout() {
    const width = this.main.clientWidth;
    if (!width) return;
    const gap = 14;
    const across = Math.max(1, Math.min(this.views.length, Math.floor((width + gap) / (LEAST_PANE + gap))));
    const room = Math.max(280, (globalThis.innerHeight || 900) - 150);
    const each = Math.min(width / across - gap, this.views.length === 1 ? Math.min(room, 900) : 640);
    this.panes.style.gridTemplateColumns = `repeat(${across}, ${Math.floor(each)}px)`;
    const starts = rowStarts(this.meta.panes, across);
    this.views.forEach((view, i) => {
      view.box.style.gridColumnStart = starts.has(i) ? "1" : "auto";
      view.resize(each);
    });
    if (this.each !== each) {
      this.each = each;
      if (this.views[0].window) this.refresh();
    }
  }

  watchTheme() {
    const dark = globalThis.matchMedia?.("(prefers-color-scheme: dark)");
    dark?.addEventListener?.("change", () => this.restyle());
    // A notebook has its own theme, told by an attribute of its page.
    this.themes = new MutationObserver(() => this.restyle());
    this.themes.observe(this.host.ownerDocument.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
    this.restyle();
  }

  get dark() {
    const told = this.host.ownerDocument.body.dataset.jpThemeLight;
    if (told) return told === "false";
    return globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches ?? false;
  }

  restyle() {
    this.root.classList.toggle("tl-dark", this.dark);
    const { logarithmic } = this.state;
    const diverging = this.meta.panes.find((pane) => pane.id === this.state.source).diverging;
    this.grid.restyle({ logarithmic, dark: this.dark, diverging });
    this.recolor();
  }

  // One scale for the panes of a group: views and their difference can be compared by eye.
  recolor(only) {
    const { logarithmic } = this.state;
    for (const view of this.views.filter((one) => !only || one.pane.group === only)) {
      const group = this.views.filter((one) => one.pane.group === view.pane.group && one.picture);
      const largest = Math.max(0, ...group.map((one) => one.picture.largest));
      Object.assign(view, { dark: this.dark, logarithmic, largest });
      legend(view.bar, { diverging: view.pane.diverging, dark: this.dark, largest, logarithmic });
      view.repaint();
    }
  }

  open(layer, head) {
    Object.assign(this.state, { layer, head });
    const { name, words } = this.base;
    this.title.textContent = `${name}, ${words.length.toLocaleString("en")} tokens · layer ${layer}, head ${head}`;
    this.grid.pick(layer, head);
    for (const view of this.views) {
      view.picture = null;
      view.sight = this.layerOf(view.pane.model)?.sight;
      view.describe(`${view.pane.label}, layer ${layer}, head ${head}`);
    }
    this.refresh();
  }

  thumbnails() {
    this.queue.drop("thumbnails");
    this.grid.clear();
    this.restyle();
    const { source } = this.state;
    for (const { layer } of this.base.layers) {
      this.queue.put(`thumbnails ${layer}`, 9, async () => {
        const { header, data } = await this.tell(() => this.ask("thumbnails", { pane: source, layer, size: THUMBNAIL }));
        if (source === this.state.source) this.grid.fill(header.layer, data, header.size);
      });
    }
  }

  fit() {
    this.whole();
    this.moved();
  }

  toDiagonal() {
    const { rows, columns } = this.state.window;
    const middle = (rows[0] + rows[1]) / 2;
    const half = (columns[1] - columns[0]) / 2;
    this.move({ rows, columns: [middle - half, middle + half] });
  }

  move(window) {
    const { rows, columns } = this.layerOf(0) ?? this.base.layers[0];
    this.state.window = { rows: within(window.rows, rows), columns: within(window.columns, columns) };
    this.moved();
  }

  moved() {
    for (const view of this.views) {
      view.window = this.toModel(view.pane.model);
      view.draw();
    }
    clearTimeout(this.later);
    this.later = setTimeout(() => this.refresh(), 30);
  }

  // Windows are places in the first model's text. Another tokenization is aligned by characters.
  toModel(model) {
    if (this.meta.models[model].aligned) return this.state.window;
    const { rows, columns } = this.state.window;
    const place = (at) => this.translate(at, 0, model);
    return { rows: rows.map(place), columns: columns.map(place) };
  }

  toBase(model, window) {
    if (this.meta.models[model].aligned) return window;
    const place = (at) => this.translate(at, model, 0);
    return { rows: window.rows.map(place), columns: window.columns.map(place) };
  }

  translate(at, from, to) {
    const [a, b] = [this.lengths(from), this.lengths(to)];
    const low = Math.max(0, Math.min(Math.floor(at), a.length - 2));
    const characters = a[low] + (at - low) * (a[low + 1] - a[low]);
    const [last, end] = [b.length - 1, b.at(-1)];
    if (characters <= 0) return 0; // special tokens of the beginning are in sight
    if (characters >= end) return last + ((characters - end) * last) / Math.max(1, end); // or it read less of the text
    let [left, right] = [0, last];
    while (right - left > 1) {
      const middle = (left + right) >> 1;
      if (b[middle] <= characters) left = middle;
      else right = middle;
    }
    const step = b[left + 1] - b[left];
    return left + (step ? (characters - b[left]) / step : 0);
  }

  lengths(model) {
    const one = this.meta.models[model];
    if (!one.lengths) {
      one.lengths = [0];
      for (const length of letters(one.words)) one.lengths.push(one.lengths.at(-1) + length);
    }
    return one.lengths;
  }

  refresh() {
    for (const view of this.views) {
      view.window = this.toModel(view.pane.model);
      this.fetch(view, "quick");
    }
  }

  // quality: "quick" within the server's time for a zoom, "fine" if it is soon done, "all" whatever it takes.
  fetch(view, quality) {
    const { pane } = view;
    const layer = this.layerOf(pane.model);
    if (!layer || this.state.head >= layer.heads) {
      view.picture = null;
      view.note.textContent = "this model has no such head";
      view.note.hidden = false;
      view.draw();
      return;
    }
    if (!visible(view.window, layer)) {
      view.picture = null;
      view.note.textContent = "this model read less of the text";
      view.note.hidden = false;
      view.draw();
      return;
    }
    const urgency = { quick: 0, fine: 5, all: 1 }[quality];
    this.queue.put(`map ${pane.id}`, urgency, async () => {
      const { layer, head, reduce } = this.state;
      const size = this.layerOf(pane.model);
      const window = size && visible(view.window, size);
      if (!window) return;
      const { rows, columns } = window;
      const parameters = { pane: pane.id, layer, head, reduce, rows, columns, resolution: view.resolution, quality };
      this.wait.textContent = quality === "quick" ? "" : "computing every pair…";
      const { header, data } = await this.tell(() => this.ask("map", parameters));
      this.wait.textContent = "";
      if (this.state.layer !== layer || this.state.head !== head || this.state.reduce !== reduce) return;
      view.picture = { ...header, data, largest: largestOf(data) };
      this.recolor(pane.group);
      this.annotate(view);
      view.hoverAgain();
      const now = visible(view.window, size);
      const same = now && `${now.rows} ${now.columns}` === `${rows} ${columns}`;
      if (!header.exact && header.soon && quality === "quick" && same) this.fetch(view, "fine");
    });
  }

  annotate(view) {
    const { exact, soon, read, of } = view.picture;
    view.note.hidden = exact || soon;
    view.note.textContent = `from ${read} of ${of} queries a pixel; compute all of them`;
  }

  hover(from, place) {
    const base = place && this.toBase(from.pane.model, { rows: [place.row], columns: [place.column] });
    for (const view of this.views) {
      view.cursor = base && {
        row: this.meta.models[view.pane.model].aligned ? base.rows[0] : this.translate(base.rows[0], 0, view.pane.model),
        column: this.meta.models[view.pane.model].aligned
          ? base.columns[0]
          : this.translate(base.columns[0], 0, view.pane.model),
      };
      view.draw();
    }
    clearTimeout(this.asking);
    const cell = place && from.cell(place.row, place.column);
    if (!cell) {
      this.status.textContent = this.idle;
      return;
    }
    if (!from.sees(cell.rows[1] - 1, cell.columns[0])) {
      this.status.textContent = `queries ${range(cell.rows)} cannot see keys ${range(cell.columns)}`;
      return;
    }
    const several = cell.rows[1] - cell.rows[0] > 1 || cell.columns[1] - cell.columns[0] > 1;
    const words = this.meta.models[from.pane.model].words;
    if (several) {
      const what = this.state.reduce === "max" ? "largest weight" : "sum";
      this.status.textContent =
        `queries ${range(cell.rows)}, keys ${range(cell.columns)}: ${what} ${number(cell.value)}` +
        `${cell.exact ? "" : " of the queries read"} in ${from.pane.label}`;
    } else {
      const values = this.views
        .filter((view) => view.pane.model === from.pane.model)
        .map((view) => [view.pane.label, view.cell(place.row, place.column)?.value])
        .filter(([, value]) => value !== undefined);
      this.status.textContent = pairText(cell.rows[0], cell.columns[0], words, values);
      return;
    }
    this.asking = setTimeout(() => this.strongest(from, cell, words), 120);
  }

  // Which pair of a pixel is the strongest, and what every pane says of it.
  strongest(from, cell, words) {
    const { layer, head } = this.state;
    this.queue.put("pair", 1, async () => {
      const { header } = await this.ask("pair", {
        pane: from.pane.id, layer, head, rows: cell.rows, columns: cell.columns,
      });
      const values = Object.entries(header.values).map(([id, value]) => [
        this.meta.panes.find((pane) => pane.id === id).label,
        value,
      ]);
      this.status.textContent =
        `queries ${range(cell.rows)}, keys ${range(cell.columns)}; strongest pair: ` +
        pairText(header.row, header.column, words, values);
    });
  }

  async tell(task) {
    try {
      const answer = await task();
      this.root.classList.remove("tl-failed");
      return answer;
    } catch (error) {
      this.root.classList.add("tl-failed");
      this.status.textContent = error.message;
      throw error;
    }
  }

  close() {
    this.resizer.disconnect();
    this.themes.disconnect();
    clearTimeout(this.later);
    clearTimeout(this.asking);
  }
}

function within([begin, end], size) {
  const length = Math.min(size, Math.max(Math.min(LEAST_WINDOW, size), end - begin));
  const start = Math.min(Math.max(0, (begin + end - length) / 2), size - length);
  return [start, start + length];
}

// The whole queries and keys of a window, as far as a layer has them; null if it has none of them.
function visible(window, layer) {
  const out = ([begin, end], size) => [Math.max(0, Math.floor(begin + 1e-9)), Math.min(size, Math.ceil(end - 1e-9))];
  const [rows, columns] = [out(window.rows, layer.rows), out(window.columns, layer.columns)];
  return rows[0] < rows[1] && columns[0] < columns[1] ? { rows, columns } : null;
}

function range([begin, end]) {
  return end - begin > 1 ? `${begin.toLocaleString("en")}–${(end - 1).toLocaleString("en")}` : begin.toLocaleString("en");
}

function pairText(row, column, words, values) {
  const name = (at) => `${at.toLocaleString("en")} “${shown(words[at] ?? "?", 24)}”`;
  const said = values.map(([label, value]) => (values.length > 1 ? `${label} ${number(value)}` : number(value)));
  return `query ${name(row)} → key ${name(column)}: ${said.join(" · ")}`;
}

export async function mount(host, ask) {
  host.textContent = "reading the maps…";
  try {
    const { header } = await ask("meta");
    return new Explorer(host, ask, header);
  } catch (error) {
    host.textContent = error.message;
    throw error;
  }
}

export async function render({ model, el }) {
  const explorer = await mount(el, widgetTransport(model));
  return () => explorer.close();
}
