// Lanes on a canvas: replicas with their idle time, KV use and requests; below, the spans of every track. Drag to zoom.

import { causeColor, causeText } from "view/parts/causes";
import { color, h, number, seconds, tip, whole } from "view/parts/dom";

const LEFT = 128; // pixels of names
const AXIS = 34; // seconds, and below them where a step begins
const STATE = 16; // height of a replica's state
const USE = 30; // and of its KV use
const MOST = 260; // height of a track, at most: of more lanes each is thinner

export class Lanes {
  /** onzoom: with the seconds that are in view. */
  constructor(found, onzoom) {
    this.found = found;
    this.onzoom = onzoom;
    this.from = 0;
    this.to = found.seconds;
    this.rows = layout(found);
    this.height = this.rows.at(-1).bottom + 6;
    this.dragged = null;
    this.canvas = h("canvas", {
      class: "lanes",
      id: "lanes",
      role: "img",
      "aria-label": "timeline",
      style: { height: `${this.height}px` },
    });
    this.element = this.canvas;
    this.canvas.addEventListener("pointerdown", (event) => this.begin(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", (event) => this.end(event));
    this.canvas.addEventListener("pointerleave", (event) => tip(event, ""));
    this.canvas.addEventListener("dblclick", () => this.reset());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  reset() {
    this.zoom(0, this.found.seconds);
  }

  zoom(from, to) {
    this.from = Math.max(0, from);
    this.to = Math.min(this.found.seconds, to);
    this.draw();
    this.onzoom(this.from, this.to);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    return {
      time: this.from + Math.max(0, Math.min(1, share)) * (this.to - this.from),
      y: event.clientY - box.top,
    };
  }

  begin(event) {
    this.dragged = this.at(event).time;
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    const { time, y } = this.at(event);
    if (this.dragged !== null) {
      this.draw([this.dragged, time]);
      tip(event, `${seconds(Math.abs(time - this.dragged))}`);
      return;
    }
    const row = this.rows.find((one) => y >= one.top && y < one.bottom);
    tip(
      event,
      row
        ? row.text(time, y, (this.to - this.from) / Math.max(1, this.canvas.clientWidth - LEFT))
        : "",
    );
  }

  end(event) {
    if (this.dragged === null) return;
    const [from, to] = [this.dragged, this.at(event).time].sort((a, b) => a - b);
    this.dragged = null;
    if (to - from > (this.to - this.from) / 200) this.zoom(from, to);
    else this.draw();
  }

  draw(selected = null) {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = this.height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11.5px system-ui, sans-serif";
    const x = (time) => LEFT + ((time - this.from) / (this.to - this.from)) * (width - LEFT);
    this.axis(pen, x, width);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, this.height);
    pen.clip();
    for (const row of this.rows) row.draw(pen, x, this.from, this.to);
    if (selected) {
      pen.fillStyle = color("accent");
      pen.globalAlpha = 0.2;
      pen.fillRect(x(selected[0]), AXIS, x(selected[1]) - x(selected[0]), this.height);
      pen.globalAlpha = 1;
    }
    pen.restore();
    pen.textAlign = "left";
    for (const row of this.rows) {
      if (!row.name) continue;
      pen.fillStyle = color("text");
      pen.fillText(row.name, 0, row.top + 12, LEFT - 8);
      if (row.note) {
        pen.fillStyle = color("muted");
        pen.fillText(row.note, 0, row.top + 26, LEFT - 8);
      }
    }
  }

  axis(pen, x, width) {
    const span = this.to - this.from;
    const rough = span / Math.max(2, (width - LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    pen.textAlign = "center";
    for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(time), 18, 1, this.height);
      pen.fillStyle = color("muted");
      pen.fillText(`${Number(time.toFixed(6))} s`, Math.min(width - 20, x(time)), 12);
    }
    for (const [step, begin] of this.found.steps.slice(1)) {
      pen.fillStyle = color("muted");
      pen.fillRect(x(begin), 20, 1, this.height);
      pen.textAlign = "left";
      pen.fillText(`step ${step}`, x(begin) + 4, 29);
    }
  }
}

function layout(found) {
  const rows = [];
  let top = AXIS + 2;
  const add = (row, height, gap) => {
    rows.push(Object.assign(row, { top, bottom: top + height }));
    top += height + gap;
  };
  const kv = Math.max(
    1,
    ...found.replicas
      .flatMap((replica) => replica.engine.used_blocks ?? [])
      .filter((_, at, all) => all.length < 50000 || at % 7 === 0),
  );
  for (const replica of found.replicas) {
    add(stateRow(replica), STATE, 1);
    if (replica.engine.at?.length) add(useRow(replica, kv), USE, 8);
    else top += 6;
  }
  for (const { node, track, spans } of found.tracks)
    add(spanRow(node, track, spans), trackHeight(spans), 9);
  if (found.lag.length) add(lagRow(found.lag), 22, 4);
  return rows.length ? rows : [{ top, bottom: top + 20, draw: () => {}, text: () => "" }];
}

const lanesOf = (spans) => 1 + spans.lane.reduce((most, lane) => Math.max(most, lane), 0);
const laneHeight = (spans) => Math.max(1, Math.min(14, MOST / lanesOf(spans)));
const trackHeight = (spans) => Math.max(16, lanesOf(spans) * laneHeight(spans));

function stateRow(replica) {
  const row = {
    name: `replica ${replica.node ? `${replica.node} ` : ""}${replica.replica}`,
    draw(pen, x, from, to) {
      for (const [cause, begin, end] of replica.idle) {
        if (end < from || begin > to) continue;
        pen.fillStyle = causeColor(cause);
        pen.fillRect(x(begin), row.top, Math.max(0.5, x(end) - x(begin)), STATE);
      }
    },
    text(time) {
      const found = replica.idle.find(([, begin, end]) => time >= begin && time < end);
      return found ? `${causeText(found[0])}, ${seconds(found[2] - found[1])}` : "";
    },
  };
  return row;
}

function useRow(replica, most) {
  const { at, used_blocks: used, running, waiting, preempted } = replica.engine;
  const row = {
    draw(pen, x, from, to) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), row.top, x(to) - x(from), USE);
      pen.fillStyle = color("muted");
      pen.globalAlpha = 0.55;
      for (let index = 0; index < at.length; index++) {
        const begin = index ? Math.max(at[index - 1], at[index] - 1) : at[index] - 0.05;
        if (at[index] < from || begin > to) continue;
        const height = (used[index] / most) * USE;
        pen.fillRect(x(begin), row.bottom - height, Math.max(0.7, x(at[index]) - x(begin)), height);
      }
      pen.globalAlpha = 1;
      pen.fillStyle = color("bad");
      for (let index = 0; index < at.length; index++)
        if (preempted[index]) pen.fillRect(x(at[index]) - 1, row.top, 2, USE);
    },
    text(time) {
      let index = at.findIndex((one) => one >= time);
      if (index < 0) index = at.length - 1;
      return `${whole(used[index])} KV blocks in use (of ${whole(most)} at most here)\n${whole(running[index])} running, ${whole(waiting[index])} waiting${preempted[index] ? `, ${preempted[index]} preempted` : ""}`;
    },
  };
  return row;
}

function spanColor(track, name) {
  if (track === "trajectories") return name === "generate" ? color("busy") : color("tool_wait");
  if (track === "tool calls") return name === "ok" ? color("good") : color("bad");
  return (
    {
      reward: color("reward"),
      learner: color("staleness_gate"),
      weights: color("weight_sync"),
      evaluation: color("run-3"),
    }[track] ?? color("other")
  );
}

function spanRow(node, track, spans) {
  const height = laneHeight(spans);
  const count = lanesOf(spans);
  const row = {
    name: node ? `${track} (${node})` : track,
    note: count > 3 ? `${count} lanes` : "",
    draw(pen, x, from, to) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), row.top, x(to) - x(from), row.bottom - row.top);
      for (let index = 0; index < spans.lane.length; index++) {
        const [begin, end] = [spans.start[index], spans.end[index]];
        if (end < from || begin > to) continue;
        pen.fillStyle = spanColor(track, spans.name[index]);
        const lane = row.top + Math.round(spans.lane[index] * height); // on whole pixels: thin lanes would blur into bands
        pen.fillRect(
          x(begin),
          lane,
          Math.max(0.8, x(end) - x(begin)),
          Math.max(1, Math.floor(height > 3 ? height - 1 : height)),
        );
      }
    },
    text(time, y, perPixel) {
      const lane = Math.floor((y - row.top) / height);
      const near = 2 * perPixel;
      const index = spans.lane.findIndex(
        (one, at) => one === lane && time >= spans.start[at] - near && time <= spans.end[at] + near,
      );
      if (index < 0) return "";
      const args = Object.entries(spans.args[index])
        .map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`)
        .join(", ");
      return `${spans.name[index]}, ${seconds(spans.end[index] - spans.start[index])}${args ? `\n${args}` : ""}`;
    },
  };
  return row;
}

function lagRow(lag) {
  const most = Math.max(0.001, ...lag.map(([, value]) => value));
  const row = {
    name: "event loop",
    note: `late up to ${seconds(most)}`,
    draw(pen, x, from, to) {
      pen.fillStyle = color("host");
      for (const [at, value] of lag) {
        if (at < from || at > to) continue;
        const height = Math.max(0.5, (value / most) * 20);
        pen.fillRect(x(at), row.bottom - height, 2, height);
      }
    },
    text(time) {
      const near = lag.reduce(
        (best, one) => (Math.abs(one[0] - time) < Math.abs(best[0] - time) ? one : best),
        lag[0],
      );
      return `the event loop was ${seconds(near[1])} late`;
    },
  };
  return row;
}
