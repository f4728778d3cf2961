// The frame of the page: which run, which page, light or dark, and what is asked again while a run
// goes on.

import { ask, exported, forget, Problem } from "view/api";
import { flight } from "view/pages/flight";
import { groups } from "view/pages/groups";
import { learning } from "view/pages/learning";
import { now } from "view/pages/now";
import { placement } from "view/pages/placement";
import { run } from "view/pages/run";
import { runs } from "view/pages/runs";
import { sandbox } from "view/pages/sandbox";
import { time } from "view/pages/time";
import { trajectory } from "view/pages/trajectory";
import { runColor } from "view/parts/colors";
import { badge, empty, h, hideTip, nodes } from "view/parts/dom";
import { seconds } from "view/parts/format";
import { keepingPlace } from "view/parts/keep";

/** @import { Run } from "view/answers" */
/** @import { Query } from "view/api" */
/** @import { Child } from "view/parts/dom" */

/**
 * What a page is built from. run: the number of the shown run among runs, which are all that are
 * open. chosen: the numbers of those that are shown beside each other; choose: changes them. query:
 * the part of the address after the page's name. set: changes the query of this page. go: opens
 * another page. open: opens a run of the list by its path and returns its number.
 * @typedef {{
 *   run: number,
 *   runs: Run[],
 *   chosen: number[],
 *   choose: (numbers: number[]) => void,
 *   open: (path: string) => Promise<number>,
 *   query: Record<string, string>,
 *   set: (query: Query) => void,
 *   go: (page: string, query: Query) => void,
 * }} Context
 */

/**
 * @typedef {{
 *   name: string,
 *   title: string,
 *   build: (context: Context) => Child | Promise<Child>,
 * }} Page
 */

/** @type {Page[]} */
const PAGES = [
  { name: "now", title: "Now", build: now },
  { name: "learning", title: "Learning", build: learning },
  ...(exported ? [] : [{ name: "flight", title: "In flight", build: flight }]),
  { name: "time", title: "Where time goes", build: time },
  { name: "groups", title: "Groups", build: groups },
  { name: "trajectory", title: "Trajectory", build: trajectory },
  { name: "sandbox", title: "Sandbox", build: sandbox },
  { name: "placement", title: "Placement", build: placement },
  { name: "run", title: "Run", build: run },
  ...(exported ? [] : [{ name: "runs", title: "All runs", build: runs }]),
];
// Pages that are redrawn when new rows come; on the others a reader would lose the place.
const LIVE = new Set(["now", "learning"]);
const POLL_MS = 2000;
const TICK_MS = 1000; // between two drawings of a running run's age
const PROBLEMS = 5; // lines about damaged files that are shown at most

const state = {
  /** @type {Run[]} */
  runs: [],
  follow: false,
  /** @type {number[] | null} the runs that are shown beside each other; null: all */
  beside: null,
  page: PAGES[0],
  asked: PAGES[0].name, // the page of the address, which may not be there
  /** @type {Record<string, string>} */
  query: {},
  drawing: 0, // number of the newest drawing: a page that is built late must not replace it
  hasNewer: false,
  ahead_s: 0, // by how much the server's clock is before ours
};

/** Reads "#/groups?run=0&step=8". */
function readAddress() {
  const [page, query] = location.hash.replace(/^#\//, "").split("?");
  state.page = PAGES.find(({ name }) => name === page) ?? PAGES[0];
  state.asked = page || state.page.name;
  state.query = Object.fromEntries(new URLSearchParams(query ?? ""));
  if (state.query.beside) state.beside = state.query.beside.split(",").map(Number);
}

/**
 * @param {string} page
 * @param {Query} query
 */
function go(page, query) {
  const text = Object.entries(query).map(([name, value]) => [name, String(value)]);
  location.hash = `#/${page}?${new URLSearchParams(text)}`;
}

/** The numbers of the runs that are shown beside each other, the shown one among them. */
function besideRuns() {
  const all = [...state.runs.keys()];
  const chosen = chosenRun();
  return all.filter((run) => run === chosen || (state.beside ?? all).includes(run));
}

/** @param {string} path */
async function open(path) {
  const { number } = await ask("open", { path });
  state.beside ??= [...state.runs.keys()];
  state.runs = (await ask("runs")).runs;
  return number;
}

function chosenRun() {
  const number = Number(state.query.run ?? 0);
  return number in state.runs ? number : 0;
}

/** Throws Problem if the address asks for a page or a run that is not there. */
function checkAddress() {
  if (state.asked !== state.page.name) {
    const names = PAGES.map(({ name }) => name).join(", ");
    throw new Problem(`There is no page ${state.asked}. The pages are: ${names}.`);
  }
  const { run } = state.query;
  if (run === undefined || Number(run) in state.runs || state.page.name === "runs") return;
  const runs = state.runs.map(({ name }, number) => `${number} (${name})`).join(", ");
  throw new Problem(`There is no run ${run} on this page. These are open: ${runs}.`);
}

/** @param {string} id */
function placeOf(id) {
  const place = document.getElementById(id);
  if (!place) throw new Error(`index.html has no element ${id}`);
  return place;
}

function drawHeader() {
  const chosen = chosenRun();
  const run = state.runs[chosen];
  const runs = besideRuns().map((number, place) => {
    const { name, path } = state.runs[number];
    return h(
      "button",
      {
        "aria-pressed": String(number === chosen),
        title: path,
        onclick: () => go(state.page.name, { run: number }),
      },
      h("i", { style: { background: runColor(place) } }),
      name,
    );
  });
  const pages = PAGES.map(({ name, title }) =>
    h(
      "a",
      { href: `#/${name}?run=${chosen}`, "aria-current": name === state.page.name ? "page" : null },
      title,
    ),
  );
  const header = placeOf("header");
  keepingPlace(header, () => header.replaceChildren(...headerParts(run, runs, pages)));
  if (header.dataset.page === state.page.name) return; // the reader may have scrolled the tabs
  header.dataset.page = state.page.name;
  const tab = header.querySelector("nav [aria-current]");
  tab?.scrollIntoView({ inline: "nearest", block: "nearest" });
}

/**
 * @param {Run} run
 * @param {Node[]} runs
 * @param {Node[]} pages
 */
function headerParts(run, runs, pages) {
  const kinds = { running: "accent", finished: "good", stopped: "warn" };
  return [
    h("h1", { class: "hidden" }, `${state.page.title}, ${run.name}`),
    h(
      "div",
      { class: "row" },
      h("span", { class: "mark" }, "rocstar"),
      h("div", { class: "runs" }, runs),
      badge(run.state, kinds[run.state]),
      h("span", { class: "muted number", id: "pace" }, paceText(run)),
      exported ? badge("exported") : null,
      run.state === "running" && !state.follow && !exported
        ? badge("stands still here: start the page with follow=true", "warn")
        : null,
      state.hasNewer ? h("button", { id: "newer", onclick: redraw }, "show newer steps") : null,
      h("span", { class: "spacer" }),
      h("button", { id: "theme", onclick: toggleTheme }, "light / dark"),
    ),
    h("nav", { class: "row", id: "pages", "aria-label": "pages" }, pages),
  ];
}

/**
 * Returns how far a run is, how fast it goes, and how long it takes still.
 * @param {Run} run
 */
function paceText({ state: how, last, steps, step_s, changed_at }) {
  const parts = [`step ${last}${steps ? ` of ${steps}` : ""}`];
  if (step_s !== null) parts.push(`${seconds(step_s)} a step`);
  if (how === "running" && !exported) {
    const age_s = Math.max(0, Date.now() / 1000 + state.ahead_s - changed_at);
    parts.push(`last row ${seconds(Math.round(age_s))} ago`);
    const left = (steps ?? 0) - last;
    if (step_s !== null && left > 0)
      parts.push(`about ${seconds(Math.round(left * step_s))} to go`);
  }
  return parts.join(" · ");
}

function tick() {
  const run = state.runs[chosenRun()];
  if (run.state === "running") placeOf("pace").textContent = paceText(run);
}

function redraw() {
  state.hasNewer = false;
  drawHeader();
  return drawPage();
}

async function drawPage() {
  const drawing = ++state.drawing;
  const { name, title, build } = state.page;
  const run = chosenRun();
  document.title = `${title} · ${state.runs[run].name}`;
  /** @type {Child} */
  let content;
  try {
    checkAddress();
    content = await build({
      run,
      runs: state.runs,
      chosen: besideRuns(),
      choose: (numbers) => {
        state.beside = numbers;
        go(name, {
          run: numbers.includes(run) ? run : (numbers[0] ?? run),
          beside: numbers.join(),
        });
      },
      open,
      query: state.query,
      set: (query) => go(name, { ...query, run }),
      go: (page, query) => go(page, { run, ...query }),
    });
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    content = empty("Nothing to show here", error.message);
  }
  if (drawing !== state.drawing) return; // another page was asked for in the meantime
  hideTip();
  const problems = state.runs[run].problems
    .slice(0, PROBLEMS)
    .map((line) => h("div", { class: "problem" }, line));
  const place = placeOf("page");
  keepingPlace(place, () => place.replaceChildren(...problems, ...nodes(content)));
  place.dataset.page = name;
  place.dataset.drawn = String(drawing);
}

/** @param {boolean} dark */
function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
}

function toggleTheme() {
  const dark = !document.documentElement.classList.contains("dark");
  try {
    localStorage.setItem("theme", dark ? "dark" : "light");
  } catch {
    // a file opened from the disk may have no storage
  }
  setTheme(dark);
  redraw();
}

function rememberedTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

async function poll() {
  if (document.hidden) return;
  const before = state.runs;
  try {
    const { runs, now } = await ask("runs");
    state.runs = runs;
    state.ahead_s = now - Date.now() / 1000;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return; // the server has ended; the page stays as it is
  }
  state.runs.forEach(({ epoch }, number) => {
    if (number in before && epoch !== before[number].epoch) forget(number);
  });
  if (JSON.stringify(before) === JSON.stringify(state.runs)) return;
  if (LIVE.has(state.page.name)) {
    await redraw();
  } else {
    state.hasNewer = true;
    drawHeader();
  }
}

async function start() {
  const theme = rememberedTheme();
  setTheme(theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const { runs, follow, listed, now } = await ask("runs");
  state.runs = runs;
  state.follow = follow;
  state.ahead_s = now - Date.now() / 1000;
  if (listed && !location.hash) location.replace("#/runs");
  readAddress();
  await redraw();
  addEventListener("hashchange", () => {
    const before = [state.page, chosenRun()];
    readAddress();
    const turned = state.page !== before[0] || chosenRun() !== before[1];
    if (turned) scrollTo(0, 0);
    redraw();
  });
  if (follow) {
    setInterval(poll, POLL_MS);
    setInterval(tick, TICK_MS);
  }
}

start();
