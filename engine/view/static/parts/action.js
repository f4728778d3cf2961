// Makes buttons that have the server run something, and the place where the result appears.

import { exported, Problem } from "view/api";
import { empty, h, note } from "view/parts/dom";

/** @import { Child } from "view/parts/dom" */

/**
 * Returns buttons and their common result. In an exported file they are disabled: it has no server.
 * @param {{
 *   choices: { text: string, act: () => Promise<Child> }[],
 *   waiting: string,
 *   failed: string,
 * }} options act returns what is shown; waiting is shown meanwhile, failed above a Problem
 */
export function actions({ choices, waiting, failed }) {
  const result = h("div", {});
  const buttons = choices.map(({ text, act }) =>
    h("button", { disabled: exported, onclick: () => run(act) }, text),
  );
  /** @param {() => Promise<Child>} act */
  async function run(act) {
    for (const button of buttons) button.disabled = true;
    result.replaceChildren(note(waiting));
    try {
      result.replaceChildren(h("div", {}, await act()));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      result.replaceChildren(empty(failed, error.message));
    }
    for (const button of buttons) button.disabled = false;
  }
  return { buttons, result };
}
