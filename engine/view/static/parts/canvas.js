// Makes a canvas that is drawn again whenever its size changes.

import { h } from "view/parts/dom";

/** @import { Attributes } from "view/parts/dom" */

export const FONT = "11px system-ui, sans-serif";

/**
 * draw: takes a pen whose unit is a CSS pixel, and the width.
 * @param {number} height
 * @param {Attributes} attributes
 * @param {(pen: CanvasRenderingContext2D, width: number) => void} draw
 * @returns {{ canvas: HTMLCanvasElement, redraw: () => void }}
 */
export function drawnCanvas(height, attributes, draw) {
  const canvas = h("canvas", { role: "img", style: { height: `${height}px` }, ...attributes });
  const redraw = () => {
    const width = canvas.clientWidth;
    const pen = canvas.getContext("2d");
    if (!width || !pen) return;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    pen.scale(scale, scale);
    pen.font = FONT;
    draw(pen, width);
  };
  new ResizeObserver(redraw).observe(canvas);
  return { canvas, redraw };
}
