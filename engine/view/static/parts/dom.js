// Elements, numbers as text, and the small parts that several pages share.

/** h("td", { class: "number" }, "12"): an element. A value that is a function becomes a listener ("onclick"). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "style" && typeof value === "object") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
  return element;
}

export const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const runColor = (number) => color(`run-${number % 6}`);

// Numbers. A value that is not there is a dash, so that columns stay aligned.
const there = (value) => value !== null && value !== undefined && !Number.isNaN(value);
export const fixed = (value, digits = 2) => (there(value) ? Number(value).toFixed(digits) : "–");
export const signed = (value, digits = 2) =>
  there(value) ? (value > 0 ? "+" : "") + Number(value).toFixed(digits) : "–";
export const whole = (value) => (there(value) ? Math.round(value).toLocaleString("en-US") : "–");
export const percent = (share, digits = 0) =>
  there(share) ? `${(100 * share).toFixed(digits)} %` : "–";

export function seconds(value) {
  if (!there(value)) return "–";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 1e-3) return `${(1e6 * value).toFixed(0)} µs`;
  if (size < 1) return `${(1e3 * value).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 120) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  if (size < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (!there(value)) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} GB`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} MB`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)} kB`;
  return `${value} B`;
}

/** A number of unknown kind, in about four digits. */
export function number(value) {
  if (!there(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return whole(value);
  const size = Math.abs(value);
  return size >= 1000
    ? whole(value)
    : size >= 0.001
      ? String(Number(value.toPrecision(4)))
      : value.toExponential(2);
}

/** Names of metrics and causes as words: "tool_wait" is "tool wait". */
export const words = (name) => name.replaceAll("_", " ");

export function card(title, ...children) {
  return h("section", { class: "card" }, title ? h("h2", {}, title) : null, ...children);
}

/** Says what is missing here, and why. */
export function empty(title, why) {
  return h("div", { class: "empty" }, h("b", {}, title), why);
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

/** columns: [{ name, cell: row => text or element, number: right-aligned, key: row => colour }] */
export function table(columns, rows, { onclick = null, id = null } = {}) {
  const head = h(
    "tr",
    {},
    columns.map((column) => h("th", { class: column.number ? "number" : null }, column.name)),
  );
  const body = rows.map((row) =>
    h(
      "tr",
      { class: onclick ? "clickable" : null, onclick: onclick ? () => onclick(row) : null },
      columns.map((column) =>
        h(
          "td",
          { class: column.number ? "number" : column.mono ? "mono" : null },
          column.key ? h("i", { class: "key", style: { background: column.key(row) } }) : null,
          column.cell(row),
        ),
      ),
    ),
  );
  return h("table", { id }, h("thead", {}, head), h("tbody", {}, body));
}

/** Buttons of which one is pressed. choices: [[value, text]] */
export function choice(choices, chosen, onchange) {
  return choices.map(([value, text]) =>
    h("button", { "aria-pressed": String(value === chosen), onclick: () => onchange(value) }, text),
  );
}

/** One step of those that are there, with buttons to the one before and after. */
export function stepChooser(steps, chosen, onchange) {
  const at = steps.indexOf(chosen);
  return h(
    "span",
    { class: "toolbar" },
    h("label", {}, "step"),
    h(
      "button",
      { "aria-label": "step before", disabled: at <= 0, onclick: () => onchange(steps[at - 1]) },
      "‹",
    ),
    h(
      "select",
      { "aria-label": "step", onchange: (event) => onchange(Number(event.target.value)) },
      steps.map((step) => h("option", { value: step, selected: step === chosen }, String(step))),
    ),
    h(
      "button",
      {
        "aria-label": "step after",
        disabled: at >= steps.length - 1,
        onclick: () => onchange(steps[at + 1]),
      },
      "›",
    ),
  );
}

export function legend(entries) {
  return h(
    "div",
    { class: "legend" },
    entries.map(([text, paint]) => h("span", {}, h("i", { style: { background: paint } }), text)),
  );
}

let tipElement = null;
/** A text beside the pointer; none hides it. */
export function tip(event, text) {
  tipElement ??= document.body.appendChild(h("div", { class: "tip", role: "tooltip" }));
  tipElement.hidden = !text;
  if (!text) return;
  tipElement.textContent = text;
  const { width, height } = tipElement.getBoundingClientRect();
  tipElement.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  tipElement.style.top = `${Math.min(event.clientY + 16, innerHeight - height - 8)}px`;
}
