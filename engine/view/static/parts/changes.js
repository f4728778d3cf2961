// The steps from which on a run got slower or faster, and what changed there.

import { badge, h, namedCard, note } from "view/parts/dom";
import { whole } from "view/parts/format";

/** @import { Change } from "view/answers" */

/**
 * Returns nothing for a run that kept its pace.
 * @param {Change[]} changes
 * @param {(step: number) => void} open shows the timeline of a step
 */
export function paceChanges(changes, open) {
  if (!changes.length) return null;
  return namedCard(
    "changes",
    "Changes of pace",
    changes.map(({ step, before_s, after_s, sentence }) =>
      h(
        "p",
        {},
        badge(after_s > before_s ? "slower" : "faster", after_s > before_s ? "warn" : "good"),
        ` ${sentence} `,
        h("button", { onclick: () => open(step) }, `step ${whole(step)}`),
      ),
    ),
    note(
      "A change is a jump of the seconds of a step that is far above their scatter. What grows " +
        "slowly, such as responses that get longer by learning, is none.",
    ),
  );
}
