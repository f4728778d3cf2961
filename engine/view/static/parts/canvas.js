// Makes a canvas that is drawn again whenever its size changes.

import { h } from "view/parts/dom";

/** @import { Attributes } from "view/parts/dom" */

export const FONT = "11px system-ui, sans-serif";

/**
 * draw: takes a pen whose unit is a CSS pixel, and the width.
 * @param {number} height
 * @param {Attributes} attributes
 * @param {(pen: CanvasRenderingContext2D, width: number) => void} draw
 * @returns {{
 *   canvas: HTMLCanvasElement,
 *   redraw: () => void,
 *   resize: (height: number) => void,
 * }} resize: changes the height, and draws
 */
export function drawnCanvas(height, attributes, draw) {
  const canvas = h("canvas", { role: "img", style: { height: `${height}px` }, ...attributes });
  let pixels = height;
  let drawnWidth = 0;
  const redraw = () => {
    const width = canvas.clientWidth;
    const pen = canvas.getContext("2d");
    if (!width || !pen) return;
    drawnWidth = width;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = pixels * scale;
    pen.scale(scale, scale);
    pen.font = FONT;
    draw(pen, width);
  };
  new ResizeObserver(() => canvas.clientWidth !== drawnWidth && redraw()).observe(canvas);
  return {
    canvas,
    redraw,
    resize(height) {
      pixels = height;
      canvas.style.height = `${height}px`;
      redraw();
    },
  };
}
