// Colors of weights: sequential for magnitudes, diverging and centered at 0 for differences. Both are safe for color
// blindness and monotone in lightness, so that they read in gray too. The low end is the page's background.

const SEQUENTIAL = {
  light: ["#f7fafd", "#d6e6f4", "#abd0e6", "#6aaed6", "#3787c0", "#105ba4", "#08306b"],
  dark: ["#14161b", "#182b56", "#434e6c", "#6f7073", "#9a9472", "#ccb95e", "#fee838"],
};
const DIVERGING = {
  light: ["#0b4a8f", "#3f86c4", "#a9cce6", "#f7fafd", "#f5c48f", "#d97f1e", "#8f4705"],
  dark: ["#7fc0ff", "#3f86c4", "#1f4468", "#14161b", "#6b4212", "#c9781c", "#ffb75e"],
};
const DECADES = 4;
// A weight that is not zero never has the color of zero, however small it is.
const LEAST = 0.07;
const STEPS = 512;

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function table(stops) {
  const colors = stops.map(channels);
  const out = new Uint8ClampedArray(STEPS * 3);
  for (let i = 0; i < STEPS; i++) {
    const at = (i / (STEPS - 1)) * (colors.length - 1);
    const low = Math.min(Math.floor(at), colors.length - 2);
    for (let c = 0; c < 3; c++) {
      out[3 * i + c] = colors[low][c] + (at - low) * (colors[low + 1][c] - colors[low][c]);
    }
  }
  return out;
}

const tables = new Map();

export function palette(diverging, dark) {
  const key = `${diverging}-${dark}`;
  if (!tables.has(key)) {
    tables.set(key, table((diverging ? DIVERGING : SEQUENTIAL)[dark ? "dark" : "light"]));
  }
  return tables.get(key);
}

// Where a magnitude lies between 0 and the largest, 0 to 1.
export function fraction(value, largest, logarithmic) {
  if (!(value > 0) || !(largest > 0)) return 0;
  const at = logarithmic ? 1 + Math.log10(value / largest) / DECADES : value / largest;
  return Math.min(1, Math.max(LEAST, at));
}

// The magnitude at a fraction of the scale: the inverse of `fraction`, for legends.
export function magnitude(at, largest, logarithmic) {
  return logarithmic ? largest * 10 ** (DECADES * (at - 1)) : at * largest;
}

export function largestOf(values) {
  let largest = 0;
  for (const value of values) if (Math.abs(value) > largest) largest = Math.abs(value);
  return largest;
}

// Paint values (rows x columns) into an image's bytes.
export function paint(values, bytes, { largest, logarithmic, diverging, dark }) {
  const colors = palette(diverging, dark);
  for (let i = 0; i < values.length; i++) {
    const size = fraction(Math.abs(values[i]), largest, logarithmic);
    const at = diverging ? 0.5 + (values[i] < 0 ? -size : size) / 2 : size;
    const from = 3 * Math.round(at * (STEPS - 1));
    bytes[4 * i] = colors[from];
    bytes[4 * i + 1] = colors[from + 1];
    bytes[4 * i + 2] = colors[from + 2];
    bytes[4 * i + 3] = 255;
  }
}

// Three digits, without zeros that say nothing.
export function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? size.toExponential(2) : size.toPrecision(3);
  const plain = text.includes(".") ? text.replace(/\.?0+(?=e|$)/, "") : text;
  return `${value < 0 ? "−" : ""}${plain.replace("e+", "e")}`;
}
