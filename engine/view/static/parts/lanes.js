// Draws the timeline on a canvas: rows below each other, on one axis of seconds. A drag zooms in.

import { drawnCanvas } from "view/parts/canvas";
import { color } from "view/parts/colors";
import { hideTip, tip } from "view/parts/dom";
import { seconds } from "view/parts/format";
import { rowsOf } from "view/parts/tracks";

/** @import { Timeline } from "view/answers" */
/** @import { PlacedRow } from "view/parts/tracks" */

const LEFT = 128; // pixels for names
const AXIS = 34; // pixels for the seconds, and below them the numbers of the steps

export class Lanes {
  /**
   * @param {Timeline} timeline
   * @param {(from: number, to: number) => void} onzoom takes the seconds that are in view
   */
  constructor(timeline, onzoom) {
    this.timeline = timeline;
    this.onzoom = onzoom;
    this.from = 0;
    this.to = timeline.seconds;
    /** @type {number | null} the second at which a drag began; dragTo is where it is now */
    this.dragFrom = null;
    this.dragTo = 0;
    /** @type {PlacedRow[]} */
    this.rows = rowsOf(timeline, AXIS + 2);
    this.height = (this.rows.at(-1)?.bottom ?? AXIS + 22) + 6;
    const { canvas, redraw } = drawnCanvas(
      this.height,
      { class: "lanes", id: "lanes", "aria-label": "timeline" },
      (pen, width) => this.draw(pen, width),
    );
    this.element = canvas;
    this.redraw = redraw;
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.end(event));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => this.reset());
  }

  reset() {
    this.zoom(0, this.timeline.seconds);
  }

  /**
   * @param {number} from
   * @param {number} to
   */
  zoom(from, to) {
    this.from = Math.max(0, from);
    this.to = Math.min(this.timeline.seconds, to);
    this.redraw();
    this.onzoom(this.from, this.to);
  }

  /**
   * Returns the second at which the pointer is, and its y.
   * @param {PointerEvent} event
   */
  at(event) {
    const box = this.element.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    const time = this.from + Math.max(0, Math.min(1, share)) * (this.to - this.from);
    return { time, y: event.clientY - box.top };
  }

  /** @param {PointerEvent} event */
  begin(event) {
    this.dragFrom = this.dragTo = this.at(event).time;
    this.element.setPointerCapture(event.pointerId);
  }

  /** @param {PointerEvent} event */
  move(event) {
    const { time, y } = this.at(event);
    if (this.dragFrom !== null) {
      this.dragTo = time;
      this.redraw();
      tip(event, seconds(Math.abs(time - this.dragFrom)));
      return;
    }
    const perPixel = (this.to - this.from) / Math.max(1, this.element.clientWidth - LEFT);
    const row = this.rows.find(({ top, bottom }) => y >= top && y < bottom);
    tip(event, row ? row.text(time, y - row.top, perPixel) : "");
  }

  /** @param {PointerEvent} event */
  end(event) {
    if (this.dragFrom === null) return;
    const [from, to] = [this.dragFrom, this.at(event).time].sort((a, b) => a - b);
    this.dragFrom = null;
    if (to - from > (this.to - this.from) / 200) this.zoom(from, to);
    else this.redraw(); // a click, no drag
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number} width
   */
  draw(pen, width) {
    /** @param {number} time */
    const x = (time) => LEFT + ((time - this.from) / (this.to - this.from)) * (width - LEFT);
    this.drawAxis(pen, x, width);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, this.height);
    pen.clip();
    for (const row of this.rows)
      row.draw({ pen, x, top: row.top, bottom: row.bottom, from: this.from, to: this.to });
    if (this.dragFrom !== null) {
      pen.fillStyle = color("accent");
      pen.globalAlpha = 0.2;
      pen.fillRect(x(this.dragFrom), AXIS, x(this.dragTo) - x(this.dragFrom), this.height);
      pen.globalAlpha = 1;
    }
    pen.restore();
    pen.textAlign = "left";
    for (const { name, note, top } of this.rows) {
      pen.fillStyle = color("text");
      if (name) pen.fillText(name, 0, top + 12, LEFT - 8);
      pen.fillStyle = color("muted");
      if (note) pen.fillText(note, 0, top + 26, LEFT - 8);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {(time: number) => number} x
   * @param {number} width
   */
  drawAxis(pen, x, width) {
    const step = roundStep((this.to - this.from) / Math.max(2, (width - LEFT) / 110));
    pen.textAlign = "center";
    for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(time), 18, 1, this.height);
      pen.fillStyle = color("muted");
      pen.fillText(`${Number(time.toFixed(6))} s`, Math.min(width - 20, x(time)), 12);
    }
    for (const [number, begin] of this.timeline.steps.slice(1)) {
      pen.fillStyle = color("muted");
      pen.fillRect(x(begin), 20, 1, this.height);
      pen.textAlign = "left";
      pen.fillText(`step ${number}`, x(begin) + 4, 29);
    }
  }
}

/**
 * Returns the next of 1, 2, 5, 10, ... that is not below the value.
 * @param {number} value
 */
function roundStep(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((factor) => factor * power >= value) ?? 10);
}
