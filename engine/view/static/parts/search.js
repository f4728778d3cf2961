// A search over all metrics by name and meaning. What one types stays while the page is redrawn.

import { h, note } from "view/parts/dom";
import { whole } from "view/parts/format";

const MOST = 40; // matches that are listed at once

/** What was typed last, so that a redrawn page shows it. @type {string | null} */
let typed = null;

/**
 * Returns whether a metric matches: by a regular expression, or by words that all occur.
 * @param {string} text
 * @param {string} name
 * @param {string | null} meaning
 */
export function matches(text, name, meaning) {
  const all = `${name} ${meaning ?? ""}`;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.every((word) => all.toLowerCase().includes(word))) return true;
  try {
    return new RegExp(text, "i").test(all);
  } catch {
    return false; // not a whole expression yet
  }
}

/**
 * Returns the search, and the matches below it.
 * @param {{
 *   meanings: Record<string, string | null>,
 *   chosen: string[],
 *   initial: string,
 *   onchoose: (names: string[], text: string) => void,
 *   ontype: (text: string) => void,
 * }} options chosen: metrics that have a chart; onchoose: gets them after a click
 */
export function metricSearch({ meanings, chosen, initial, onchoose, ontype }) {
  typed ??= initial;
  const names = Object.keys(meanings);
  const found = h("div", { id: "found", class: "found" });
  const input = h("input", {
    id: "search",
    "aria-label": "search the metrics",
    type: "search",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: `search ${whole(names.length)} metrics by name or meaning: tool wait, ^kv`,
    oninput: ({ target }) => {
      typed = target.value;
      ontype(typed);
      show(typed);
    },
  });
  input.value = typed;
  /** @param {string} name */
  const row = (name) => {
    const isChosen = chosen.includes(name);
    const others = chosen.filter((one) => one !== name);
    return h(
      "button",
      {
        class: "match",
        "aria-pressed": String(isChosen),
        onclick: () => onchoose(isChosen ? others : [...chosen, name], typed ?? ""),
      },
      h("code", {}, name),
      h("span", { class: "muted" }, meanings[name] ?? "a metric of the recipe's own"),
    );
  };
  /** @param {string} text */
  const show = (text) => {
    const listed = text.trim()
      ? names.filter((name) => matches(text.trim(), name, meanings[name]))
      : chosen.filter((name) => name in meanings);
    found.replaceChildren(...listed.slice(0, MOST).map(row));
    if (listed.length > MOST)
      found.append(note(`and ${whole(listed.length - MOST)} more: a longer search shows them`));
    if (text.trim() && !listed.length) found.append(note("No metric of this run matches."));
  };
  show(typed);
  return [input, found];
}
