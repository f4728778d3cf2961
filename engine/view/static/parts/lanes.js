// Draws the timeline on a canvas: rows below each other, on one axis of seconds. A drag zooms in,
// and keys pan and zoom.
//
// While it moves, the last picture is stretched and shifted, which takes a few milliseconds however
// much there is. Once it rests, what is in view is loaded and drawn anew.

import { drawnCanvas } from "view/parts/canvas";
import { color } from "view/parts/colors";
import { h, hideTip, tip } from "view/parts/dom";
import { seconds } from "view/parts/format";
import { rowsOf } from "view/parts/tracks";

/** @import { Timeline } from "view/answers" */
/** @import { SpanTimes } from "view/parts/tracks" */

const LEFT = 128; // pixels for names
const AXIS = 34; // pixels for the seconds, and below them the numbers of the steps
const REST_MS = 120; // without a movement for so long, what is in view is loaded
const PAN = 0.2; // share of the view by which an arrow key moves it
const LEAST_S = 1e-4; // the shortest stretch that is shown

/**
 * load: returns the timeline of the seconds in view; null if there is no finer one. drawn: is
 * called with a timeline that is now in view. open: is called with the span that was clicked.
 * @typedef {{
 *   load: (from: number, to: number) => Promise<Timeline | null>,
 *   drawn: (timeline: Timeline, from: number, to: number) => void,
 *   open: (span: SpanTimes, event: PointerEvent) => void,
 * }} Callbacks
 */

export class Lanes {
  /**
   * @param {Timeline} timeline
   * @param {Callbacks} callbacks
   */
  constructor(timeline, callbacks) {
    this.callbacks = callbacks;
    this.from = 0;
    this.to = timeline.seconds;
    /** @type {number | null} the second at which a drag began */
    this.dragFrom = null;
    this.loads = 0; // number of the newest load: an answer that comes late must not replace it
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.resting = undefined;
    this.moving = false;
    /** The last whole drawing, and the seconds that it shows. */
    this.picture = { canvas: h("canvas"), from: 0, to: timeline.seconds };
    this.timeline = timeline;
    this.rows = rowsOf(timeline, AXIS + 2);
    const { canvas, redraw, resize } = drawnCanvas(
      this.height,
      {
        class: "lanes",
        id: "lanes",
        tabindex: "0",
        "aria-label": "timeline; arrow keys move it, + and - zoom, 0 shows all",
      },
      (pen, width) => this.draw(pen, width),
    );
    this.canvas = canvas;
    this.redraw = redraw;
    this.resize = resize;
    this.selection = h("div", { class: "selection", hidden: true });
    this.element = h("div", { class: "lanes-box" }, canvas, this.selection);
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.end(event));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  /** @param {Timeline} timeline */
  show(timeline) {
    this.timeline = timeline;
    this.rows = rowsOf(timeline, AXIS + 2);
  }

  get height() {
    return (this.rows.at(-1)?.bottom ?? AXIS + 22) + 6;
  }

  reset() {
    this.zoom(0, this.timeline.seconds);
  }

  /**
   * Shows a stretch of time: at once as it was drawn last, and soon as it is.
   * @param {number} from
   * @param {number} to
   */
  zoom(from, to) {
    const length = Math.max(LEAST_S, Math.min(to - from, this.timeline.seconds));
    this.from = Math.max(0, Math.min(from, this.timeline.seconds - length));
    this.to = this.from + length;
    if (!this.moving) requestAnimationFrame(() => this.preview());
    this.moving = true;
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.reload(), REST_MS);
  }

  async reload() {
    const load = ++this.loads;
    const { from, to } = this;
    const timeline = await this.callbacks.load(from, to);
    if (load !== this.loads || from !== this.from || to !== this.to) return;
    if (timeline) this.show(timeline);
    this.resize(this.height);
    this.callbacks.drawn(this.timeline, from, to);
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const length = this.to - this.from;
    const centre = (this.from + this.to) / 2;
    /** @param {number} by */
    const pan = (by) => this.zoom(this.from + by * length, this.to + by * length);
    /** @param {number} half */
    const around = (half) => this.zoom(centre - half, centre + half);
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowLeft: () => pan(-PAN),
      ArrowRight: () => pan(PAN),
      "+": () => around(length / 4),
      "=": () => around(length / 4),
      "-": () => around(length),
      0: () => this.reset(),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  /**
   * Returns the second at which the pointer is, and its y.
   * @param {PointerEvent} event
   */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    const time = this.from + Math.max(0, Math.min(1, share)) * (this.to - this.from);
    return { time, y: event.clientY - box.top };
  }

  /** @param {PointerEvent} event */
  begin(event) {
    this.dragFrom = this.at(event).time;
    this.canvas.setPointerCapture(event.pointerId);
  }

  /** @param {PointerEvent} event */
  move(event) {
    const { time, y } = this.at(event);
    if (this.dragFrom !== null) {
      this.select(this.dragFrom, time);
      tip(event, seconds(Math.abs(time - this.dragFrom)));
      return;
    }
    const row = this.rowAt(y);
    this.canvas.style.cursor = row?.span?.(time, y - row.top, this.perPixel) ? "pointer" : "";
    tip(event, row ? row.text(time, y - row.top, this.perPixel) : "");
  }

  /** @param {PointerEvent} event */
  end(event) {
    if (this.dragFrom === null) return;
    const { time, y } = this.at(event);
    const [from, to] = [this.dragFrom, time].sort((a, b) => a - b);
    this.dragFrom = null;
    this.selection.hidden = true;
    if (to - from > (this.to - this.from) / 200) return this.zoom(from, to);
    const row = this.rowAt(y);
    const span = row?.span?.(time, y - row.top, this.perPixel);
    if (span) this.callbacks.open(span, event);
  }

  /** @param {number} y */
  rowAt(y) {
    return this.rows.find(({ top, bottom }) => y >= top && y < bottom);
  }

  /** The seconds of a pixel. */
  get perPixel() {
    return (this.to - this.from) / Math.max(1, this.canvas.clientWidth - LEFT);
  }

  /**
   * Marks what a drag would zoom to; the canvas stays as it is.
   * @param {number} from
   * @param {number} to
   */
  select(from, to) {
    const [left, right] = [from, to]
      .map((time) => LEFT + (time - this.from) / this.perPixel)
      .sort((a, b) => a - b);
    Object.assign(this.selection.style, {
      left: `${left}px`,
      width: `${right - left}px`,
      top: `${AXIS}px`,
    });
    this.selection.hidden = false;
  }

  /** Draws the last picture where its seconds are now. */
  preview() {
    this.moving = false;
    const pen = this.canvas.getContext("2d");
    const { canvas: picture, from, to } = this.picture;
    const { width, height } = this.canvas;
    if (!pen || picture.width !== width || picture.height !== height) return;
    const left = (LEFT / this.canvas.clientWidth) * width;
    const scale = (width - left) / (this.to - this.from);
    const [begin, end] = [Math.max(from, this.from), Math.min(to, this.to)];
    const source = (width - left) / (to - from);
    pen.save();
    pen.resetTransform();
    pen.clearRect(left, 0, width - left, height);
    if (end > begin)
      pen.drawImage(
        picture,
        left + (begin - from) * source,
        0,
        (end - begin) * source,
        height,
        left + (begin - this.from) * scale,
        0,
        (end - begin) * scale,
        height,
      );
    pen.restore();
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
    pen.restore();
    pen.textAlign = "left";
    const [text, muted] = [color("text"), color("muted")];
    for (const { name, note, top } of this.rows) {
      pen.fillStyle = text;
      if (name) pen.fillText(name, 0, top + 12, LEFT - 8);
      pen.fillStyle = muted;
      if (note) pen.fillText(note, 0, top + 26, LEFT - 8);
    }
    this.keep();
  }

  /** Keeps what was drawn for `preview`. */
  keep() {
    const { canvas } = this.picture;
    canvas.width = this.canvas.width;
    canvas.height = this.canvas.height;
    canvas.getContext("2d")?.drawImage(this.canvas, 0, 0);
    this.picture = { canvas, from: this.from, to: this.to };
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
      if (begin < this.from || begin > this.to) continue;
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
