// Stacked columns, one for each step, on a canvas.

import { color, h, legend, seconds, tip } from "view/parts/dom";

const LEFT = 46;
const BOTTOM = 18;
const HEIGHT = 190;

/** parts: [[label, values by row, colour]], the first at the bottom. onclick: with the step. */
export function stacked(rows, parts, onclick) {
  const at = rows.step
    .map((_, row) => row)
    .filter((row) => parts.some(([, values]) => values[row] != null));
  const canvas = h("canvas", {
    style: { display: "block", width: "100%", height: `${HEIGHT}px` },
    role: "img",
    "aria-label": "seconds by step",
  });
  const total = (row) => parts.reduce((sum, [, values]) => sum + (values[row] ?? 0), 0);
  const most = Math.max(1e-9, ...at.map(total));
  const column = (event) => {
    const { left, width } = canvas.getBoundingClientRect();
    return at[Math.floor((event.clientX - left - LEFT) / each(width))];
  };
  const each = (width) => Math.min(34, (width - LEFT) / at.length);
  const draw = () => {
    const width = canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = HEIGHT * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    const room = HEIGHT - BOTTOM - 6;
    for (const share of [0, 0.5, 1]) {
      const y = HEIGHT - BOTTOM - share * room;
      pen.fillStyle = color("faint");
      pen.fillRect(LEFT, y, width - LEFT, 1);
      pen.fillStyle = color("muted");
      pen.textAlign = "right";
      pen.fillText(seconds(share * most), LEFT - 6, y + 4);
    }
    const pitch = each(width);
    const bar = Math.max(0.8, pitch - (pitch > 4 ? 1.5 : 0));
    let labelled = -100;
    at.forEach((row, index) => {
      let y = HEIGHT - BOTTOM;
      for (const [, values, paint] of parts) {
        const height = ((values[row] ?? 0) / most) * room;
        pen.fillStyle = paint;
        pen.fillRect(LEFT + index * pitch, y - height, bar, height);
        y -= height;
      }
      const x = LEFT + index * pitch + bar / 2;
      if (x - labelled > 44) {
        pen.fillStyle = color("muted");
        pen.textAlign = "center";
        pen.fillText(String(rows.step[row]), x, HEIGHT - 4);
        labelled = x;
      }
    });
  };
  canvas.addEventListener("mousemove", (event) => {
    const row = column(event);
    const text =
      row === undefined
        ? ""
        : [
            `step ${rows.step[row]}: ${seconds(total(row))}`,
            ...parts.map(([label, values]) => `${label} ${seconds(values[row] ?? 0)}`),
          ].join("\n");
    tip(event, text);
  });
  canvas.addEventListener("mouseleave", (event) => tip(event, ""));
  canvas.addEventListener("click", (event) => {
    const row = column(event);
    if (row !== undefined) onclick(rows.step[row]);
  });
  new ResizeObserver(draw).observe(canvas);
  return h("div", {}, canvas, legend(parts.map(([label, , paint]) => [label, paint])));
}
