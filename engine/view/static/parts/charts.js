// Curves, drawn by uPlot: one set of axes, several series, intervals as bands. Values under the cursor stand in the legend.

import { color, h, number } from "view/parts/dom";

const WHOLE = new Set(["step", "position"]); // axes without halves
const COUNTS = [1, 2, 5]
  .flatMap((digit) => [0, 1, 2, 3, 4, 5].map((power) => digit * 10 ** power))
  .sort((a, b) => a - b);

/**
 * series: [{ label, x, y, low, high, paint, dash, points, stepped }]; low and high are an interval around y. stepped: a
 * value holds since the one before. horizontal: name of the x axis. cursor: charts of the same key move theirs together.
 */
export function chart({
  title,
  unit = "",
  series,
  horizontal = "step",
  height = 190,
  cursor = null,
  from0 = false,
  format = number,
}) {
  const place = h("div", { class: "plot", style: { minHeight: `${height}px` } });
  const values = h("div", { class: "legend" });
  const box = h(
    "div",
    { class: "chart" },
    h("div", { class: "plot-title" }, title, h("span", { class: "unit" }, unit)),
    values,
    place,
  );
  const shown = series.filter((one) => one.x.length);
  if (!shown.length) {
    place.append(h("div", { class: "empty" }, "not in this run's metrics"));
    return box;
  }
  let plot = null;
  const observer = new ResizeObserver(() => {
    const width = place.clientWidth;
    if (!place.isConnected) {
      if (plot === null) return; // it is told of once before it is on the page
      observer.disconnect();
      plot.destroy();
    } else if (plot === null && width > 0) {
      plot = draw(place, values, { shown, horizontal, height, cursor, from0, format });
    } else if (width > 0 && width !== plot.width) {
      plot.setSize({ width, height });
    }
  });
  observer.observe(place);
  return box;
}

function draw(place, values, { shown, horizontal, height, cursor, from0, format }) {
  const tables = [];
  const series = [{}];
  const bands = [];
  const at = []; // of each curve the number of its series
  for (const one of shown) {
    at.push(series.length);
    series.push({
      stroke: one.paint,
      width: 1.6,
      dash: one.dash, // null is a gap; a step of another run only is none
      points: { show: one.points || one.x.length === 1, size: 5, fill: one.paint },
      paths: one.stepped ? uPlot.paths.stepped({ align: -1 }) : undefined,
    });
    const columns = [one.x, one.y];
    if (one.low) {
      const high = series.length;
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push(hidden, { ...hidden });
      bands.push({ series: [high, high + 1], fill: `${one.paint}2e` });
      columns.push(one.high, one.low);
    }
    tables.push(columns);
  }
  const axis = {
    stroke: color("muted"),
    grid: { stroke: color("faint"), width: 1 },
    ticks: { stroke: color("line"), width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
  };
  const options = {
    width: Math.max(200, place.clientWidth),
    height,
    series,
    bands,
    axes: [
      {
        ...axis,
        size: 34,
        values: (_, splits) => splits.map(number),
        ...(WHOLE.has(horizontal) ? { incrs: COUNTS } : {}),
      },
      {
        ...axis,
        size: 56,
        values: (_, splits) => splits.map((split) => (split === null ? "" : format(split))),
      },
    ],
    scales: { x: { time: false }, y: { range: (_, low, high) => range(low, high, from0) } },
    cursor: { sync: cursor ? { key: cursor } : undefined, drag: { x: true, y: false } },
    legend: { show: false },
    hooks: { setCursor: [(plot) => showValues(plot)] },
  };
  const showValues = (plot) => {
    const index = plot.cursor.idx;
    const text = (number) => {
      const value = index === null || index === undefined ? null : plot.data[at[number]][index];
      if (value === null || value === undefined) return null;
      const [low, high] = shown[number].low
        ? [plot.data[at[number] + 2][index], plot.data[at[number] + 1][index]]
        : [];
      return `${format(value)}${low === undefined ? "" : ` (${format(low)} to ${format(high)})`}`;
    };
    const position =
      index === null || index === undefined
        ? []
        : [h("span", {}, `${horizontal} `, h("b", {}, number(plot.data[0][index])))];
    values.replaceChildren(
      ...position,
      ...shown.map((one, number) =>
        h("span", {}, stroke(one), one.label, " ", h("b", {}, text(number) ?? "")),
      ),
    );
  };
  const plot = new uPlot(options, tables.length > 1 ? uPlot.join(tables) : tables[0], place);
  showValues(plot);
  return plot;
}

/** A piece of the curve, for the legend. */
function stroke(one) {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({
    x1: 0,
    x2: 18,
    y1: 4,
    y2: 4,
    stroke: one.paint,
    "stroke-width": 2,
  }))
    line.setAttribute(name, value);
  if (one.dash) line.setAttribute("stroke-dasharray", one.dash.join(" "));
  picture.append(line);
  return picture;
}

/** @returns {[number, number]} */
function range(low, high, from0) {
  if (low === null || high === null) return [0, 1];
  const least = from0 ? Math.min(0, low) : low;
  const room = 0.06 * (high - least) || Math.abs(high) * 0.1 || 1;
  return [from0 && low >= 0 ? 0 : least - room, high + room];
}
