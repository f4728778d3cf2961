// The page Rollouts in flight: what the model works on now.

import { flight as panel } from "view/parts/flight";

/** @import { Context } from "view/main" */

/** @param {Context} context */
export const flight = ({ run, runs }) => panel(run, runs[run].recorded);
