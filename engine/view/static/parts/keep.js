// Keeps the reader's place while a page is drawn anew: scrolling, focus, and what is being typed.

/**
 * start, end: of the selection in a field.
 * @typedef {{
 *   index: number,
 *   value: string | null,
 *   start: number | null,
 *   end: number | null,
 * }} Focus
 */

const FIELD = "input:not([type=checkbox]), textarea";

/**
 * Draws what is within a place anew, and gives the reader's place back.
 * @param {HTMLElement} place
 * @param {() => void} draw
 */
export function keepingPlace(place, draw) {
  const scrolled = new Map(
    [...place.querySelectorAll("[id]")]
      .filter(({ scrollTop, scrollLeft }) => scrollTop || scrollLeft)
      .map(({ id, scrollTop, scrollLeft }) => [id, { top: scrollTop, left: scrollLeft }]),
  );
  const opened = [...place.querySelectorAll("details[id]")].map((details) => ({
    id: details.id,
    open: /** @type {HTMLDetailsElement} */ (details).open,
  }));
  const { scrollX, scrollY } = window;
  const focused = document.activeElement;
  const name = focused && place.contains(focused) ? nameOf(focused) : null;
  const focus = focused && name !== null ? focusOf(focused, place, name) : null;
  draw();
  for (const [id, to] of scrolled) document.getElementById(id)?.scrollTo(to);
  for (const { id, open } of opened) {
    const details = document.getElementById(id);
    if (details instanceof HTMLDetailsElement) details.open = open;
  }
  if (focus && name !== null) restore(place, name, focus);
  window.scrollTo(scrollX, scrollY);
}

/**
 * Returns what an element can be found by after the page is drawn anew.
 * @param {Element} element
 */
function nameOf(element) {
  const label = element.getAttribute("aria-label") ?? element.getAttribute("href") ?? "";
  const text = element.matches("button, a, summary") ? (element.textContent ?? "").trim() : "";
  return [element.tagName, element.id, label, label ? "" : text].join("|");
}

/** @param {HTMLElement} place @param {string} name */
const namesakes = (place, name) =>
  [...place.querySelectorAll(name.split("|")[0])].filter((one) => nameOf(one) === name);

/**
 * @param {Element} element
 * @param {HTMLElement} place
 * @param {string} name
 * @returns {Focus}
 */
function focusOf(element, place, name) {
  const index = namesakes(place, name).indexOf(element);
  if (!element.matches(FIELD)) return { index, value: null, start: null, end: null };
  const { value, selectionStart, selectionEnd } = /** @type {HTMLInputElement} */ (element);
  return { index, value, start: selectionStart, end: selectionEnd };
}

/**
 * @param {HTMLElement} place
 * @param {string} name
 * @param {Focus} focus
 */
function restore(place, name, { index, value, start, end }) {
  const found = namesakes(place, name)[index];
  if (!(found instanceof HTMLElement)) return;
  found.focus({ preventScroll: true });
  if (value === null || !(found instanceof HTMLInputElement)) return;
  found.value = value;
  if (start !== null) found.setSelectionRange(start, end);
}
