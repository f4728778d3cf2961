// Draws stacked columns, one for each step.

import { drawnCanvas } from "view/parts/canvas";
import { color } from "view/parts/colors";
import { h, hideTip, legend, tip } from "view/parts/dom";
import { seconds, sum } from "view/parts/format";

/** @import { Metrics } from "view/answers" */
/** @typedef {{ label: string, values: (number | null)[], paint: string }} Part */

const LEFT = 46; // least pixels for the numbers of the axis
const BOTTOM = 18; // pixels for the numbers of the steps
const HEIGHT = 190;
const SHARES = [0, 0.5, 1]; // of the highest column, at which the axis has numbers
const LABEL = 44; // least distance between the numbers of two steps, in pixels

/**
 * @param {Metrics} rows
 * @param {Part[]} parts values by row; the first part is at the bottom
 * @param {(step: number) => void} onclick
 */
export function stacked(rows, parts, onclick) {
  const shown = rows.step
    .map((_, row) => row)
    .filter((row) => parts.some(({ values }) => (values[row] ?? null) !== null));
  /** @param {number} row */
  const total = (row) => sum(parts.map(({ values }) => values[row] ?? 0));
  const most = shown.reduce((highest, row) => Math.max(highest, total(row)), 1e-9);
  let margin = LEFT; // pixels for the numbers of the axis, as they are measured
  /** @param {number} width */
  const pitch = (width) => Math.min(34, (width - margin) / shown.length);

  const { canvas } = drawnCanvas(
    HEIGHT,
    { class: "stacked", "aria-label": "seconds by step" },
    (pen, width) => {
      margin = Math.max(LEFT, ...SHARES.map((share) => widthOf(pen, share * most) + 8));
      axis(pen, width, most, margin);
      const bar = Math.max(0.8, pitch(width) - (pitch(width) > 4 ? 1.5 : 0));
      let labelled = -LABEL;
      shown.forEach((row, index) => {
        const left = margin + index * pitch(width);
        let y = HEIGHT - BOTTOM;
        for (const { values, paint } of parts) {
          const height = ((values[row] ?? 0) / most) * (HEIGHT - BOTTOM - 6);
          pen.fillStyle = paint;
          pen.fillRect(left, y - height, bar, height);
          y -= height;
        }
        const centre = left + bar / 2;
        if (centre - labelled <= LABEL) return;
        pen.fillStyle = color("muted");
        pen.textAlign = "center";
        pen.fillText(String(rows.step[row]), centre, HEIGHT - 4);
        labelled = centre;
      });
    },
  );
  /** @param {MouseEvent} event @returns {number | undefined} the row under the pointer */
  const rowAt = (event) => {
    const { left, width } = canvas.getBoundingClientRect();
    return shown[Math.floor((event.clientX - left - margin) / pitch(width))];
  };
  canvas.addEventListener("mousemove", (event) => {
    const row = rowAt(event);
    if (row === undefined) return hideTip();
    const lines = parts.map(({ label, values }) => `${label} ${seconds(values[row] ?? 0)}`);
    tip(event, [`step ${rows.step[row]}: ${seconds(total(row))}`, ...lines].join("\n"));
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const row = rowAt(event);
    if (row !== undefined) onclick(rows.step[row]);
  });
  return h("div", {}, canvas, legend(parts.map(({ label, paint }) => [label, paint])));
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {number} width
 * @param {number} most seconds at the top
 * @param {number} margin
 */
function axis(pen, width, most, margin) {
  for (const share of SHARES) {
    const y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - 6);
    pen.fillStyle = color("faint");
    pen.fillRect(margin, y, width - margin, 1);
    pen.fillStyle = color("muted");
    pen.textAlign = "right";
    pen.fillText(seconds(share * most), margin - 6, y + 4);
  }
}

/** @param {CanvasRenderingContext2D} pen @param {number} value seconds */
const widthOf = (pen, value) => pen.measureText(seconds(value)).width;
