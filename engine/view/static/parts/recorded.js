// Describes a run's record for several pages: which steps it has, and the names of its replicas.

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
 * Returns the step that the address asks for if it is there, else the last one.
 * @param {number[]} steps at least one
 * @param {string | undefined} asked
 */
export const chosenStep = (steps, asked) =>
  steps.includes(Number(asked)) ? Number(asked) : steps[steps.length - 1];

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
