// Buttons that select a step's groups anew: what another selection would have trained.

import { request } from "view/api";
import { actions } from "view/parts/action";
import { h, namedCard, note, toolbar } from "view/parts/dom";

// In the order of SELECTIONS in engine/view/programs.py.
const SELECTIONS = [
  "all trajectories (GRPO)",
  "a random subset",
  "RoC by tool errors alone",
  "RoC by format alone",
  "RoC with smoothing 0.5",
];

/**
 * @param {number} run
 * @param {number} step
 */
export function otherSelections(run, step) {
  const { buttons, result } = actions({
    choices: SELECTIONS.map((text, selection) => ({
      text,
      act: async () => {
        const { sentence, notes } = await request("reverify", { run, step, selection });
        return [h("p", {}, h("b", {}, sentence)), notes.map((line) => note(line))];
      },
    })),
    waiting: "selecting ...",
    failed: "The selection failed",
  });
  result.append(
    note("The recorded trajectories of this step are selected again; nothing is sampled. "),
    note(
      "For a reward of yours, another G or all steps: ",
      h("code", {}, "rocstar reverify RUN reward=FILE.py:NAME"),
    ),
  );
  return namedCard("selections", "Under another selection", toolbar(buttons), result);
}
