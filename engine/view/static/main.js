// The frame of the page: which run, which page, light or dark, and what is asked again while a run goes on.

import { ask, exported, forget, Problem } from "view/api";
import { badge, empty, h, runColor, tip } from "view/parts/dom";
import { groups } from "view/pages/groups";
import { learning } from "view/pages/learning";
import { now } from "view/pages/now";
import { placement } from "view/pages/placement";
import { run } from "view/pages/run";
import { sandbox } from "view/pages/sandbox";
import { time } from "view/pages/time";
import { trajectory } from "view/pages/trajectory";

const PAGES = [
  { name: "now", title: "Now", build: now },
  { name: "time", title: "Where time goes", build: time },
  { name: "groups", title: "Groups", build: groups },
  { name: "trajectory", title: "Trajectory", build: trajectory },
  { name: "learning", title: "Learning", build: learning },
  { name: "placement", title: "Placement", build: placement },
  { name: "sandbox", title: "Sandbox", build: sandbox },
  { name: "run", title: "Run", build: run },
];
const LIVE = new Set(["now", "learning"]); // drawn again when rows come; on others a reader would lose the place
const POLL_MS = 2000;

const state = { runs: [], page: "now", words: {}, drawing: 0, newer: false };

/** "#/groups?run=0&step=8" */
function readAddress() {
  const [page, query] = location.hash.replace(/^#\//, "").split("?");
  state.page = PAGES.some(({ name }) => name === page) ? page : "now";
  state.words = Object.fromEntries(new URLSearchParams(query ?? ""));
}

/** Goes to a page, or changes a word of this one's address. */
export function go(page, words) {
  const query = new URLSearchParams(words).toString();
  location.hash = `#/${page}${query ? `?${query}` : ""}`;
}

function chosenRun() {
  const number = Number(state.words.run ?? 0);
  return number < state.runs.length ? number : 0;
}

function drawHeader() {
  const chosen = chosenRun();
  const found = state.runs[chosen];
  const kinds = { running: "accent", finished: "good", stopped: "warn" };
  const steps = found.steps ? `step ${found.last} of ${found.steps}` : `step ${found.last}`;
  document.getElementById("header").replaceChildren(
    h(
      "div",
      { class: "row" },
      h("span", { class: "mark" }, "rocstar"),
      h(
        "div",
        { class: "runs" },
        state.runs.map((one, number) =>
          h(
            "button",
            {
              "aria-pressed": String(number === chosen),
              title: one.path,
              onclick: () => go(state.page, { run: number }),
            },
            h("i", { style: { background: runColor(number) } }),
            one.name,
          ),
        ),
      ),
      badge(found.state, kinds[found.state]),
      h("span", { class: "muted number" }, steps),
      exported ? badge("exported") : null,
      state.newer
        ? h("button", { id: "newer", onclick: () => redraw() }, "show what has come since")
        : null,
      h("span", { class: "spacer" }),
      h("button", { id: "theme", onclick: toggleTheme }, "light / dark"),
    ),
    h(
      "nav",
      { class: "row", "aria-label": "pages" },
      PAGES.map(({ name, title }) =>
        h(
          "a",
          { href: `#/${name}?run=${chosen}`, "aria-current": name === state.page ? "page" : null },
          title,
        ),
      ),
    ),
  );
}

function redraw() {
  state.newer = false;
  drawHeader();
  return drawPage();
}

async function drawPage() {
  const drawing = ++state.drawing;
  const place = document.getElementById("page");
  const { title, build } = PAGES.find(({ name }) => name === state.page);
  document.title = `${title} · ${state.runs[chosenRun()].name}`;
  const context = {
    run: chosenRun(),
    runs: state.runs,
    words: state.words,
    set: (words) => go(state.page, { run: chosenRun(), ...words }),
    go: (page, words) => go(page, { run: chosenRun(), ...words }),
  };
  let content;
  try {
    content = await build(context);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    content = [empty("Nothing to show here", error.message)];
  }
  if (drawing !== state.drawing) return; // another page was asked for meanwhile
  tip(null, "");
  const problems = state.runs[chosenRun()].problems
    .slice(0, 5)
    .map((line) => h("div", { class: "problem" }, line));
  place.replaceChildren(...problems, ...[content].flat());
  place.dataset.page = state.page;
  place.dataset.drawn = String(drawing);
}

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
  drawHeader();
  drawPage();
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
    state.runs = (await ask("runs")).runs;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return; // the server was ended; what is shown stays
  }
  state.runs.forEach((one, number) => {
    if (one.epoch !== before[number].epoch) forget(number);
  });
  if (JSON.stringify(before) === JSON.stringify(state.runs)) return;
  if (LIVE.has(state.page)) await redraw();
  else state.newer = true;
  drawHeader();
}

async function start() {
  const remembered = rememberedTheme();
  setTheme(remembered ? remembered === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const found = await ask("runs");
  state.runs = found.runs;
  readAddress();
  drawHeader();
  await drawPage();
  addEventListener("hashchange", () => {
    readAddress();
    redraw();
    scrollTo(0, 0);
  });
  if (found.follow) setInterval(poll, POLL_MS);
}

start();
