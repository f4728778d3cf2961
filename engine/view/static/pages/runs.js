// The page Runs: all runs that there are, the one that wrote last first, to open and to overlay.

import { ask, Problem } from "view/api";
import { runColor } from "view/parts/colors";
import { badge, empty, h, namedCard, note, table } from "view/parts/dom";
import { percent, seconds, whole } from "view/parts/format";
import { keepingPlace } from "view/parts/keep";

/** @import { FoundRun, RunList } from "view/answers" */
/** @import { Context } from "view/main" */
/** @import { Column } from "view/parts/dom" */

const AGAIN_MS = 4000;
const MOST = 6; // runs that are overlaid at once, each with a colour of its own
const KINDS = { running: "accent", finished: "good", stopped: "warn" };

/** What was typed into the filter last. */
let typed = "";

/** @param {Context} context */
export async function runs(context) {
  const card = namedCard("run-list", "Runs");
  const problem = h("div", { class: "problem", hidden: true });
  /** @param {string} path @param {(run: number) => void} then */
  const opening = async (path, then) => {
    try {
      then(await context.open(path));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      problem.textContent = error.message;
      problem.hidden = false;
    }
  };
  const list = h("div", { class: "wide", id: "run-list-table" });
  /** @type {RunList | null} */
  let answer = null;
  const filter = h("input", {
    id: "filter",
    "aria-label": "filter the runs",
    type: "search",
    autocomplete: "off",
    placeholder: "filter by name, folder, recipe or state",
    oninput: ({ target }) => {
      typed = target.value;
      show();
    },
  });
  filter.value = typed;
  const show = () => {
    const found = answer;
    if (found !== null)
      keepingPlace(list, () => list.replaceChildren(content(found, typed, context, opening)));
  };
  const look = async (first = false) => {
    if (!first && !card.isConnected) return; // another page is open
    if (!document.hidden) {
      try {
        answer = await ask("run-list");
        show();
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        list.replaceChildren(empty("The list cannot be read", error.message));
      }
    }
    setTimeout(look, AGAIN_MS);
  };
  card.append(filter, problem, list);
  await look(true);
  return card;
}

/**
 * @param {RunList} answer
 * @param {string} text
 * @param {Context} context
 * @param {Opening} opening
 */
function content({ runs, below }, text, context, opening) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const listed = runs.filter(({ name, path, recipe, state }) => {
    const all = `${name} ${path} ${recipe} ${state}`.toLowerCase();
    return words.every((word) => all.includes(word));
  });
  const where = below.length ? ` below ${below.join(", ")}` : "";
  const count = `${whole(listed.length)} of ${whole(runs.length)} runs${where}. `;
  return h(
    "div",
    {},
    note(count, `Chosen ones, ${MOST} at most, are shown beside each other on the page Learning.`),
    listed.length ? table(columns(context, opening), listed, "found-runs") : null,
  );
}

/**
 * Opens a run and does something with its number; says on the page why that fails.
 * @typedef {(path: string, then: (run: number) => void) => Promise<void>} Opening
 */

/**
 * @param {Context} context
 * @param {Opening} opening
 * @returns {Column<FoundRun>[]}
 */
function columns({ chosen, choose, go }, opening) {
  return [
    {
      name: "beside",
      cell: ({ number, path, name }) => {
        const isChosen = number !== null && chosen.includes(number);
        const box = h("input", {
          type: "checkbox",
          "aria-label": `show ${name} beside others`,
          disabled: !isChosen && chosen.length >= MOST,
          onchange: () =>
            opening(path, (one) =>
              choose(isChosen ? chosen.filter((other) => other !== one) : [...chosen, one]),
            ),
        });
        box.checked = isChosen;
        const key = {
          class: "key",
          style: { background: isChosen ? runColor(chosen.indexOf(number)) : "" },
        };
        return [box, h("i", key)];
      },
    },
    {
      name: "run",
      cell: ({ name, path }) =>
        h(
          "a",
          {
            href: "#/now",
            title: path,
            onclick: (event) => {
              event.preventDefault();
              opening(path, (run) => go("now", { run }));
            },
          },
          name,
        ),
    },
    {
      name: "state",
      cell: ({ state, fault }) => [
        badge(state, KINDS[state]),
        fault ? h("span", { class: "fault" }, badge("cannot be opened", "bad"), ` ${fault}`) : null,
      ],
    },
    {
      name: "step",
      number: true,
      cell: ({ step, steps }) => whole(step) + (steps === null ? "" : ` of ${whole(steps)}`),
    },
    { name: "last row", number: true, cell: ({ age_s }) => `${seconds(age_s)} ago` },
    { name: "accuracy", number: true, cell: ({ accuracy }) => percent(accuracy, 1) },
    { name: "recipe", mono: true, cell: ({ recipe }) => recipe },
    { name: "folder", mono: true, cell: ({ path }) => path },
  ];
}
