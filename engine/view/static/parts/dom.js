// Makes elements, and the small parts that several pages share.

/**
 * @typedef {Node | string | null | undefined | Child[]} Child
 * @typedef {Event & { target: HTMLInputElement | HTMLSelectElement }} Changed
 * @typedef {{
 *   style?: Partial<CSSStyleDeclaration>,
 *   onclick?: ((event: MouseEvent) => void) | null,
 *   onmousemove?: (event: MouseEvent) => void,
 *   onmouseleave?: (event: MouseEvent) => void,
 *   onchange?: (event: Changed) => void,
 *   oninput?: (event: Changed) => void,
 *   [name: string]: unknown,
 * }} Attributes
 */

/**
 * Returns a new element: h("td", { class: "number" }, "12"). A function becomes a listener; an
 * attribute that is null or false is left out.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} attributes
 * @param {Child[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function")
      element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else if (name === "style" && typeof value === "object") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(children));
  return element;
}

/**
 * @param {Child} child
 * @returns {(Node | string)[]}
 */
export function nodes(child) {
  if (Array.isArray(child)) return child.flatMap(nodes);
  return child === null || child === undefined ? [] : [child];
}

/**
 * @param {string | null} title
 * @param {Child[]} children
 */
export function card(title, ...children) {
  return h("section", { class: "card" }, title ? h("h2", {}, title) : null, children);
}

/**
 * Returns a card that tests and links find by its id.
 * @param {string} id
 * @param {string | null} title
 * @param {Child[]} children
 */
export function namedCard(id, title, ...children) {
  const made = card(title, ...children);
  made.id = id;
  return made;
}

/** @param {Child[]} children */
export const toolbar = (...children) => h("div", { class: "toolbar" }, children);

/** Returns a toolbar with space between its parts. @param {Child[]} children */
export const spread = (...children) => h("div", { class: "toolbar spread" }, children);

/** @param {Child[]} children */
export const note = (...children) => h("p", { class: "muted" }, children);

/**
 * Returns a box that says what is missing here, and why.
 * @param {string} title
 * @param {string} why
 */
export const empty = (title, why) => h("div", { class: "empty" }, h("b", {}, title), why);

/** @param {string} text */
export const badge = (text, kind = "") => h("span", { class: `badge ${kind}` }, text);

/** @param {string} outcome of a tool call */
export const outcomeBadge = (outcome) => badge(outcome, outcome === "ok" ? "good" : "bad");

/**
 * key: returns the colour of a row; number: the column is right-aligned.
 * @template Row
 * @typedef {{
 *   name: string,
 *   cell: (row: Row) => Child,
 *   number?: boolean,
 *   mono?: boolean,
 *   key?: (row: Row) => string,
 * }} Column
 */

/**
 * @template Row
 * @param {Column<Row>[]} columns
 * @param {Row[]} rows
 */
export function table(columns, rows, id = "") {
  const head = columns.map(({ name, number }) =>
    h(name ? "th" : "td", { class: number ? "number" : null }, name),
  );
  /** @param {Row} row @param {Column<Row>} column */
  const cell = (row, { number, mono, key, cell }) =>
    h(
      "td",
      { class: number ? "number" : mono ? "mono" : null },
      key ? h("i", { class: "key", style: { background: key(row) } }) : null,
      cell(row),
    );
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      columns.map((column) => cell(row, column)),
    ),
  );
  const named = columns.some(({ name }) => name);
  return h(
    "table",
    { id: id || null },
    named ? h("thead", {}, h("tr", {}, head)) : null,
    h("tbody", {}, body),
  );
}

/**
 * Returns a table of names and values without a head.
 * @param {[name: string, value: Child][]} rows
 */
export function pairs(rows) {
  return table(
    [
      { name: "", cell: ([name]) => name },
      { name: "", number: true, cell: ([, value]) => value },
    ],
    rows,
  );
}

/**
 * Returns a row of large numbers, each with its name above it, a curve if it has one, and a note
 * below.
 * @param {[name: string, value: string, note: string, curve?: Node][]} entries
 */
export function figures(entries, id = "") {
  return h(
    "div",
    { class: "figures", id: id || null },
    entries.map(([name, value, note, curve]) =>
      h(
        "div",
        { class: "figure" },
        h("div", { class: "name" }, name),
        h("div", { class: value.length > 12 ? "value long" : "value" }, value),
        curve,
        h("div", { class: "note" }, note),
      ),
    ),
  );
}

/**
 * Returns horizontal bars with their names and numbers.
 * @param {{ name: string, share: number, paint: string, text: string }[]} rows
 */
export function bars(rows) {
  return h(
    "div",
    { class: "bars" },
    rows.map(({ name, share, paint, text }) => [
      h("span", {}, name),
      h(
        "div",
        { class: "track" },
        h("div", {
          class: "bar",
          style: { width: `${100 * Math.min(1, share)}%`, background: paint },
        }),
      ),
      h("span", { class: "number" }, text),
    ]),
  );
}

/**
 * Returns buttons, of which the chosen one is pressed.
 * @template Value
 * @param {[value: Value, text: string][]} choices
 * @param {Value} chosen
 * @param {(value: Value) => void} onchange
 */
export function choice(choices, chosen, onchange) {
  return choices.map(([value, text]) =>
    h("button", { "aria-pressed": String(value === chosen), onclick: () => onchange(value) }, text),
  );
}

/**
 * Returns a menu of the steps, with buttons for the one before and the one after.
 * @param {number[]} steps
 * @param {number} chosen
 * @param {(step: number) => void} onchange
 */
export function stepChooser(steps, chosen, onchange) {
  const at = steps.indexOf(chosen);
  /** @param {number} to @param {string} label @param {string} text */
  const button = (to, label, text) =>
    h(
      "button",
      { "aria-label": label, disabled: !(to in steps), onclick: () => onchange(steps[to]) },
      text,
    );
  return h(
    "span",
    { class: "toolbar" },
    h("label", {}, "step"),
    button(at - 1, "step before", "‹"),
    h(
      "select",
      { "aria-label": "step", onchange: (event) => onchange(Number(event.target.value)) },
      steps.map((step) => h("option", { value: step, selected: step === chosen }, String(step))),
    ),
    button(at + 1, "step after", "›"),
  );
}

/** @param {[text: string, paint: string][]} entries */
export function legend(entries) {
  return h(
    "div",
    { class: "legend" },
    entries.map(([text, paint]) => h("span", {}, h("i", { style: { background: paint } }), text)),
  );
}

/** @type {HTMLElement | null} */
let tipElement = null;

/**
 * Shows a text beside the pointer, or hides it if the text is empty.
 * @param {MouseEvent} event
 * @param {string} text
 */
export function tip(event, text) {
  if (!text) return hideTip();
  tipElement ??= document.body.appendChild(h("div", { class: "tip", role: "tooltip" }));
  tipElement.hidden = false;
  tipElement.textContent = text;
  const { width, height } = tipElement.getBoundingClientRect();
  tipElement.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  tipElement.style.top = `${Math.min(event.clientY + 16, innerHeight - height - 8)}px`;
}

export function hideTip() {
  if (tipElement) tipElement.hidden = true;
}

/**
 * Returns the attributes of an element that shows a text while the pointer is over it.
 * @param {string} text
 */
export const withTip = (text) => ({
  onmousemove: (/** @type {MouseEvent} */ event) => tip(event, text),
  onmouseleave: hideTip,
});
