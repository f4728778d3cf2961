// Describes a run's record for several pages: which steps it has, and the names of its replicas.

import { Problem } from "view/api";
import { h } from "view/parts/dom";
import { sum, whole } from "view/parts/format";

/** @import { Outline } from "view/answers" */

/** What to do on a page that needs the record. */
export const RECORDS = "Runs are recorded unless record.max_mb=0.";

/**
 * Returns how many tokens were sampled in some turns.
 * @param {Pick<Outline, "start" | "end">[]} turns
 */
export const sampledTokens = (turns) => sum(turns.map(({ start, end }) => end - start));

/**
 * Returns the step that the address asks for; the last one if it asks for none. Throws Problem if
 * the step is not there.
 * @param {number[]} steps at least one
 * @param {string | undefined} asked
 */
export function chosenStep(steps, asked) {
  if (asked === undefined) return steps[steps.length - 1];
  if (steps.includes(Number(asked))) return Number(asked);
  throw new Problem(`Step ${asked} is not recorded. These steps are: ${listed(steps)}.`);
}

/** Returns "1, 2, 3, ..., 38, 39, 40" for many numbers. @param {number[]} numbers */
export const listed = (numbers) =>
  (numbers.length > 8 ? [...numbers.slice(0, 3), "...", ...numbers.slice(-3)] : numbers).join(", ");

/**
 * Says that a step is shown in part; null where all of its groups can be read.
 * @param {number} read groups that can be read
 * @param {number} written groups that the step had
 */
export const damage = (read, written) =>
  read < written
    ? h(
        "div",
        { class: "problem" },
        `The record of this step is damaged: ${whole(read)} of ${whole(written)} groups can be ` +
          "read, and only these are counted here.",
      )
    : null;

/** @param {{ node: string, replica: number }} replica */
export const replicaName = ({ node, replica }) => `replica ${node ? `${node} ` : ""}${replica}`;

/**
 * Returns "0: 120, 1: 88" for the free blocks of replicas 0 and 1.
 * @param {Record<string, number>} blocks
 */
export const freeBlocks = (blocks, separator = ", ") =>
  Object.entries(blocks)
    .map(([replica, free]) => `${replica}: ${whole(free)}`)
    .join(separator);
