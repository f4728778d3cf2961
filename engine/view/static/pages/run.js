// The page Run: its options and versions, what it can resume from, what became of its tokens, and
// how it differs from another run.

import { ask, Problem } from "view/api";
import { color } from "view/parts/colors";
import {
  badge,
  card,
  empty,
  h,
  namedCard,
  note,
  pairs,
  spread,
  table,
  toolbar,
} from "view/parts/dom";
import { bytes, number, percent, seconds, spaced, sum, whole } from "view/parts/format";
import { RECORDS } from "view/parts/recorded";
import { waterfall } from "view/parts/waterfall";

/** @import { About, Index } from "view/answers" */
/** @import { Context } from "view/main" */

/** @param {Context} context */
export async function run(context) {
  const { run: chosen, runs, query } = context;
  const about = await ask("about", { run: chosen });
  const asked = query.other === undefined ? chosen : Number(query.other);
  const other = asked !== chosen && asked in runs ? asked : null;
  return [
    h("div", { class: "two" }, summary(about), waste(about)),
    runs.length > 1 ? await difference(about, context, other) : null,
    other === null ? null : await pace(context, other),
    h(
      "div",
      { class: "two" },
      h("div", { class: "stack" }, resume(about), recording(about), versions(about)),
      configuration(about),
    ),
    log("Notes", about.notes, "notes.log"),
    about.learner_log.length ? log("Learner's log", about.learner_log, "learner.log") : null,
  ];
}

/** @param {About} about */
function summary({ summary, summary_fault, state }) {
  if (summary_fault)
    return namedCard("summary", "Summary", empty("The summary is damaged", summary_fault));
  if (!summary)
    return card(
      "Summary",
      empty(
        "No summary yet",
        state === "running"
          ? "It is written when the run ends."
          : "The run did not end. The same command resumes it.",
      ),
    );
  const {
    accuracy_initial: before,
    accuracy_final: after,
    accuracy_final_interval: interval,
    loop_lag_p99_ms: lag,
  } = summary;
  /** @type {[name: string, value: string | null | undefined][]} */
  const rows = [
    ["ended", summary.ended],
    ["steps", whole(summary.steps)],
    [
      "held-out accuracy",
      before === undefined ? null : `${percent(before, 1)} to ${percent(after, 1)}`,
    ],
    [
      "95 % interval at the end",
      interval ? `${percent(interval[0], 1)} to ${percent(interval[1], 1)}` : null,
    ],
    ["training", seconds(summary.rl_wall_s)],
    ["whole run", seconds(summary.total_wall_s)],
    ["tool calls, with evaluations", whole(summary.tool_calls)],
    ["tokens sampled in rollouts", whole(summary.tokens_generated)],
    ["tokens trained", whole(summary.tokens_trained)],
    ["largest staleness", whole(summary.staleness_max)],
    ["replica deaths", whole(summary.replica_deaths)],
    ["preemptions", whole(summary.preemptions)],
    ["event loop lag, p99", lag === undefined ? null : `${number(lag)} ms`],
    ["evaluations dropped", whole(summary.evaluations_dropped)],
  ];
  const known = rows.flatMap(([name, value]) =>
    value && value !== "–" ? [/** @type {[string, string]} */ ([name, value])] : [],
  );
  return namedCard("summary", "Summary", pairs(known));
}

/** @type {Record<string, string>} */
const WASTE_COLORS = {
  trained: "busy",
  flat: "tool_wait",
  not_selected: "staleness_gate",
  surplus: "long_tail",
  error: "down",
};

/** @param {About} about */
function waste({ waste }) {
  const rows = Object.entries(waste)
    .filter(([, tokens]) => tokens > 0)
    .sort(([, a], [, b]) => b - a);
  const all = sum(rows.map(([, tokens]) => tokens));
  if (!all) return card("Tokens", empty("No tokens yet", "They are counted with each step."));
  /** @param {[reason: string, tokens: number]} row */
  const paint = ([reason]) => color(WASTE_COLORS[reason] ?? "other");
  return namedCard(
    "waste",
    "What became of the sampled tokens",
    h(
      "div",
      { class: "stretch" },
      rows.map((row) =>
        h("div", { style: { width: `${(100 * row[1]) / all}%`, background: paint(row) } }),
      ),
    ),
    table(
      [
        { name: "reason", cell: ([reason]) => spaced(reason), key: paint },
        { name: "tokens", number: true, cell: ([, tokens]) => whole(tokens) },
        { name: "share", number: true, cell: ([, tokens]) => percent(tokens / all, 1) },
      ],
      rows,
    ),
  );
}

/** @param {number} stamp seconds since 1970 */
const dateOf = (stamp) => new Date(1e3 * stamp).toISOString().slice(0, 19).replace("T", " ");

/** @param {About} about */
function resume({ checkpoints, journal_steps }) {
  const [first, last] = [journal_steps[0], journal_steps.at(-1)];
  return namedCard(
    "resume",
    "Checkpoints and journal",
    checkpoints.length
      ? table(
          [
            { name: "checkpoint of step", number: true, cell: ({ step }) => whole(step) },
            { name: "size", number: true, cell: (checkpoint) => bytes(checkpoint.bytes) },
            {
              name: "written (UTC)",
              number: true,
              cell: ({ written_at }) => dateOf(written_at),
            },
          ],
          checkpoints,
        )
      : empty("No checkpoint", "None was written yet, or they were removed."),
    note(
      journal_steps.length
        ? `The journal holds rollouts of steps ${first} to ${last}: resuming does not repeat them.`
        : "The journal holds no rollouts.",
    ),
  );
}

/** @param {About} about */
function recording({ recording }) {
  if (!recording)
    return card(
      "Recording",
      empty(
        "This run was not recorded",
        `Groups, trajectories, timeline and placement are read from record/. ${RECORDS}`,
      ),
    );
  const { whole: kept, last, newest, every, total_bytes, max_mb, problems } = recording;
  return card(
    "Recording",
    pairs([
      ["kept whole", `${whole(kept.length)} of ${whole(last)} steps`],
      ["policy", `the newest ${newest}, and one in ${every} before them`],
      ["size", `${bytes(total_bytes)} of ${bytes(max_mb * 2 ** 20)}`],
    ]),
    shortOfRoom(recording),
    problems.length ? h("pre", {}, problems.join("\n")) : null,
  );
}

/**
 * Says that the budget holds fewer of the newest steps than the policy keeps, and what would hold
 * them; returns nothing if it holds them all.
 * @param {Index} recording
 */
function shortOfRoom({ whole: kept, last, newest, total_bytes, max_mb }) {
  const held = kept.filter((step) => step > last - newest).length;
  const wanted = Math.min(newest, last);
  if (held >= wanted || !kept.length || total_bytes < max_mb * 2 ** 19) return null;
  const needed = Math.ceil((total_bytes / kept.length) * newest * 2 ** -20);
  return note(
    `The budget holds the newest ${whole(held)} steps, because a step takes ` +
      `${bytes(total_bytes / kept.length)}. Fix: record.max_mb=${needed} holds ${newest}.`,
  );
}

/** @param {About} about */
function versions({ versions }) {
  const rows = Object.entries(versions);
  if (!rows.length)
    return card("Versions", empty("No versions", "config.json does not name them."));
  return card(
    "Versions",
    pairs(rows.map(([name, version]) => [name, h("span", { class: "mono" }, version)])),
  );
}

/** @param {unknown} value of an option */
function valueText(value) {
  if (value === undefined) return "–";
  if (value === null) return "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** @param {About} about */
function configuration({ config, given, argv }) {
  const rows = Object.entries(config);
  const body = h("div", {
    class: "options",
    tabindex: "0",
    role: "region",
    "aria-label": "options of the run",
  });
  /** @param {string} filter */
  const draw = (filter) =>
    body.replaceChildren(
      table(
        [
          { name: "option", mono: true, cell: ([name]) => name },
          { name: "value", mono: true, cell: ([, value]) => valueText(value) },
          { name: "", cell: ([name]) => (given.includes(name) ? badge("given", "accent") : "") },
        ],
        rows.filter(([name]) => name.includes(filter)),
        "options",
      ),
    );
  draw("");
  return card(
    null,
    spread(
      h("h2", {}, "Configuration"),
      h("input", {
        placeholder: "filter",
        "aria-label": "filter options",
        oninput: (event) => draw(event.target.value),
      }),
    ),
    argv.length ? h("p", {}, h("code", {}, argv.join(" "))) : null,
    rows.length ? body : empty("No configuration", "config.json is missing."),
  );
}

/**
 * @param {About} about
 * @param {Context} context
 * @param {number | null} other
 */
async function difference(about, { run, runs, set }, other) {
  const head = toolbar(
    h("h2", {}, "Difference to"),
    h(
      "select",
      { "aria-label": "other run", onchange: (event) => set({ other: event.target.value }) },
      h("option", { value: "" }, "another run"),
      runs.map(({ name }, at) =>
        at === run ? null : h("option", { value: at, selected: at === other }, name),
      ),
    ),
  );
  if (other === null)
    return namedCard(
      "difference",
      null,
      head,
      note("Choose a run to see which options and versions differ."),
    );
  const against = await ask("about", { run: other });
  const rows = [
    ...differences(about.config, against.config),
    ...differences(about.versions, against.versions).map((row) => ({
      ...row,
      name: `version of ${row.name}`,
    })),
  ];
  return namedCard(
    "difference",
    null,
    head,
    rows.length
      ? table(
          [
            { name: "", mono: true, cell: ({ name }) => name },
            { name: runs[run].name, mono: true, cell: ({ one }) => valueText(one) },
            { name: runs[other].name, mono: true, cell: ({ two }) => valueText(two) },
          ],
          rows,
        )
      : empty("No difference", "Options and versions are the same."),
  );
}

/**
 * @param {Context} context
 * @param {number} other
 */
async function pace({ run, runs }, other) {
  try {
    return waterfall(await ask("comparison", { run, other }), runs[other].name);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return namedCard("waterfall", "Pace", empty("No comparison of the pace", error.message));
  }
}

/**
 * @param {Record<string, unknown>} one
 * @param {Record<string, unknown>} two
 */
function differences(one, two) {
  return [...new Set([...Object.keys(one), ...Object.keys(two)])]
    .map((name) => ({ name, one: one[name], two: two[name] }))
    .filter(({ one, two }) => JSON.stringify(one) !== JSON.stringify(two));
}

/**
 * @param {string} title
 * @param {string[]} lines
 * @param {string} file
 */
function log(title, lines, file) {
  return card(
    title,
    lines.length
      ? h("pre", { class: "log", tabindex: "0" }, lines.join("\n"))
      : empty("Nothing", `${file} is empty or does not exist.`),
  );
}
