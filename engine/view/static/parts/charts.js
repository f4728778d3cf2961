// Draws curves with uPlot: several series on one pair of axes, with intervals as bands. The legend
// shows the values under the cursor.

import { color } from "view/parts/colors";
import { h } from "view/parts/dom";
import { number } from "view/parts/format";

const INTEGER_AXES = new Set(["step", "position"]);
const INTEGER_SPACINGS = [0, 1, 2, 3, 4, 5].flatMap((power) =>
  [1, 2, 5].map((digit) => digit * 10 ** power),
);

/**
 * low, high: an interval around y. stepped: each value has held since the one before.
 * @typedef {{
 *   label: string,
 *   x: number[],
 *   y: (number | null)[],
 *   low?: number[],
 *   high?: number[],
 *   paint: string,
 *   dash?: number[],
 *   points?: boolean,
 *   stepped?: boolean,
 * }} Series
 */

/**
 * missing: what is said in place of curves without points. horizontal: the name of the x axis.
 * cursor: charts of the same key move their cursors together.
 * @typedef {{
 *   title: string,
 *   unit?: string,
 *   series: Series[],
 *   horizontal?: string,
 *   height?: number,
 *   cursor?: string,
 *   from0?: boolean,
 *   missing?: string,
 *   format?: (value: number) => string,
 * }} Chart
 */

/** @param {Chart} chart */
export function chart(chart) {
  const { title, unit = "", height = 190, missing = "This run has not measured it." } = chart;
  const place = h("div", {
    class: "plot",
    role: "img",
    "aria-label": `${title}, ${unit}`,
    style: { minHeight: `${height}px` },
  });
  const values = h("div", { class: "legend" });
  const box = h(
    "div",
    { class: "chart" },
    h("div", { class: "plot-title" }, title, h("span", { class: "unit" }, unit)),
    values,
    place,
  );
  const series = chart.series.filter((one) => one.x.length);
  if (!series.length) {
    place.append(h("div", { class: "empty" }, missing));
    return box;
  }
  /** @type {uPlot | null} */
  let plot = null;
  const observer = new ResizeObserver(() => {
    const width = place.clientWidth;
    if (!place.isConnected) {
      if (plot === null) return; // the first call comes before the chart is on the page
      observer.disconnect();
      plot.destroy();
    } else if (plot === null && width > 0) {
      plot = draw(place, values, { ...chart, series, height });
    } else if (plot !== null && width > 0 && width !== plot.width) {
      plot.setSize({ width, height });
    }
  });
  observer.observe(place);
  return box;
}

/**
 * @param {HTMLElement} place
 * @param {HTMLElement} legend
 * @param {Chart & { height: number }} chart
 */
function draw(place, legend, chart) {
  const { series, height, horizontal = "step", cursor, from0 = false, format = number } = chart;
  const drawn = withIntervals(series);
  const axis = {
    stroke: color("muted"),
    grid: { stroke: color("faint"), width: 1 },
    ticks: { stroke: color("line"), width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
  };
  /** @param {uPlot} plot */
  const showValues = (plot) => {
    const at = plot.cursor.idx ?? null;
    const position =
      at === null ? [] : [h("span", {}, `${horizontal} `, h("b", {}, number(plot.data[0][at])))];
    const entries = series.map((one, index) => {
      const columns = drawn.columns[index].map((column) =>
        at === null ? null : plot.data[column][at],
      );
      return h("span", {}, stroke(one), one.label, " ", h("b", {}, valueText(columns, format)));
    });
    legend.replaceChildren(...position, ...entries);
  };
  /** @type {uPlot.Options} */
  const options = {
    width: Math.max(200, place.clientWidth),
    height,
    series: drawn.series,
    bands: drawn.bands,
    axes: [
      {
        ...axis,
        size: 34,
        values: (_, splits) => splits.map(number),
        ...(INTEGER_AXES.has(horizontal) ? { incrs: INTEGER_SPACINGS } : {}),
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
    hooks: { setCursor: [showValues] },
  };
  const [first, ...others] = drawn.tables;
  const plot = new uPlot(options, others.length ? uPlot.join(drawn.tables) : first, place);
  showValues(plot);
  return plot;
}

/**
 * Returns uPlot's series and data: one series for each curve, and two more for the ends of its
 * interval. columns: the indices of each curve's y, high and low in the data.
 * @param {Series[]} curves
 */
function withIntervals(curves) {
  /** @type {uPlot.Series[]} */
  const series = [{}];
  /** @type {uPlot.Band[]} */
  const bands = [];
  /** @type {uPlot.AlignedData[]} */
  const tables = [];
  const columns = [];
  for (const one of curves) {
    const at = series.length;
    series.push({
      stroke: one.paint,
      width: 1.6,
      dash: one.dash,
      points: { show: one.points || one.x.length === 1, size: 5, fill: one.paint },
      paths: one.stepped ? uPlot.paths.stepped?.({ align: -1 }) : undefined,
    });
    if (one.low && one.high) {
      const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push({ ...edge }, { ...edge });
      bands.push({ series: [at + 1, at + 2], fill: `${one.paint}2e` });
      tables.push([one.x, one.y, one.high, one.low]);
      columns.push([at, at + 1, at + 2]);
    } else {
      tables.push([one.x, one.y]);
      columns.push([at]);
    }
  }
  return { series, bands, tables, columns };
}

/**
 * @param {(number | null | undefined)[]} columns y, and the ends of its interval where it has one
 * @param {(value: number) => string} format
 */
function valueText([value, high, low], format) {
  if (value === null || value === undefined) return "";
  if (high === null || high === undefined || low === null || low === undefined)
    return format(value);
  return `${format(value)} (${format(low)} to ${format(high)})`;
}

/**
 * Returns a piece of the curve's line, for the legend.
 * @param {Series} series
 */
function stroke({ paint, dash }) {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const attributes = { x1: 0, x2: 18, y1: 4, y2: 4, stroke: paint, "stroke-width": 2 };
  for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, String(value));
  if (dash) line.setAttribute("stroke-dasharray", dash.join(" "));
  picture.append(line);
  return picture;
}

/**
 * Returns the ends of the y axis, with some room around the values.
 * @param {number | null} low
 * @param {number | null} high
 * @param {boolean} from0
 * @returns {[number, number]}
 */
function range(low, high, from0) {
  if (low === null || high === null) return [0, 1];
  const least = from0 ? Math.min(0, low) : low;
  const room = 0.06 * (high - least) || Math.abs(high) * 0.1 || 1;
  return [from0 && low >= 0 ? 0 : least - room, high + room];
}
