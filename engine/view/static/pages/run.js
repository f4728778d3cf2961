// Run: what it was asked to do, by whom, with which versions; what it can go on from; what was wasted; and how it differs.

import { ask } from "view/api";
import {
  badge,
  bytes,
  card,
  color,
  empty,
  h,
  legend,
  number,
  percent,
  seconds,
  table,
  whole,
  words as spaced,
} from "view/parts/dom";

export async function run({ run: chosen, runs, words, set }) {
  const found = await ask("about", { run: chosen });
  const other =
    words.other !== undefined && Number(words.other) !== chosen && runs[Number(words.other)]
      ? Number(words.other)
      : null;
  const against = other === null ? null : await ask("about", { run: other });
  return [
    h("div", { class: "two" }, summary(found), waste(found)),
    ...(runs.length > 1 ? [difference(found, against, { runs, chosen, other, set })] : []),
    h(
      "div",
      { class: "two" },
      h(
        "div",
        { style: { display: "flex", flexDirection: "column", gap: "16px" } },
        resume(found),
        recording(found),
        versions(found),
      ),
      configuration(found),
    ),
    log("Notes", found.notes, "notes.log"),
    found.learner_log.length ? log("Learner's log", found.learner_log, "learner.log") : null,
  ].filter(Boolean);
}

function pairs(rows) {
  return table(
    [
      { name: "", cell: ([name]) => name },
      { name: "", number: true, cell: ([, value]) => value },
    ],
    rows,
  );
}

function summary(found) {
  const of = found.summary;
  if (!of)
    return card(
      "Summary",
      empty(
        "No summary yet",
        found.state === "running"
          ? "It is written when the run ends."
          : "The run did not end. The same command goes on with it.",
      ),
    );
  const rows = [
    ["ended", of.ended],
    ["steps", whole(of.steps)],
    [
      "held-out accuracy",
      of.accuracy_initial === undefined
        ? null
        : `${percent(of.accuracy_initial, 1)} to ${percent(of.accuracy_final, 1)}`,
    ],
    [
      "95 % interval at the end",
      of.accuracy_final_interval
        ? of.accuracy_final_interval.map((value) => percent(value, 1)).join(" to ")
        : null,
    ],
    ["training", seconds(of.rl_wall_s)],
    ["all", seconds(of.total_wall_s)],
    ["tool calls", whole(of.tool_calls)],
    ["tokens sampled", whole(of.tokens_generated)],
    ["tokens trained", whole(of.tokens_trained)],
    ["largest staleness", whole(of.staleness_max)],
    ["replica deaths", whole(of.replica_deaths)],
    ["preemptions", whole(of.preemptions)],
    [
      "event loop late, p99",
      of.loop_lag_p99_ms === undefined ? null : `${number(of.loop_lag_p99_ms)} ms`,
    ],
    ["evaluations dropped", whole(of.evaluations_dropped)],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "–");
  return h("section", { class: "card", id: "summary" }, h("h2", {}, "Summary"), pairs(rows));
}

function waste(found) {
  const paints = {
    trained: "busy",
    flat: "tool_wait",
    not_selected: "staleness_gate",
    surplus: "long_tail",
    error: "down",
  };
  const rows = Object.entries(found.waste)
    .filter(([, tokens]) => tokens > 0)
    .sort((a, b) => b[1] - a[1]);
  const all = rows.reduce((sum, [, tokens]) => sum + tokens, 0);
  if (!all) return card("Tokens", empty("No tokens yet", "They are counted with each step."));
  const paint = ([reason, _tokens]) => color(paints[reason] ?? "other");
  return h(
    "section",
    { class: "card", id: "waste" },
    h("h2", {}, "What became of the sampled tokens"),
    h(
      "div",
      {
        style: {
          display: "flex",
          height: "16px",
          borderRadius: "3px",
          overflow: "hidden",
          margin: "4px 0 10px",
        },
      },
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

function resume(found) {
  const date = (stamp) => new Date(1e3 * stamp).toISOString().slice(0, 19).replace("T", " ");
  return h(
    "section",
    { class: "card", id: "resume" },
    h("h2", {}, "It can go on from"),
    found.checkpoints.length
      ? table(
          [
            { name: "checkpoint of step", number: true, cell: (row) => whole(row.step) },
            { name: "size", number: true, cell: (row) => bytes(row.bytes) },
            { name: "written (UTC)", number: true, cell: (row) => date(row.written_at) },
          ],
          found.checkpoints,
        )
      : empty("No checkpoint", "None was written yet, or they were removed."),
    h(
      "p",
      { class: "muted", style: { marginTop: "8px" } },
      found.journal_steps.length
        ? `The journal holds rollouts of steps ${found.journal_steps[0]} to ${found.journal_steps.at(-1)}: they are not made again.`
        : "The journal holds no rollouts.",
    ),
  );
}

function recording(found) {
  const of = found.recording;
  if (!of)
    return card(
      "Recording",
      empty(
        "This run was not recorded",
        "Groups, trajectories, timeline and placement need record/. A run records itself unless record.max_mb=0.",
      ),
    );
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Recording"),
    pairs([
      ["kept whole", `${whole(of.whole.length)} of ${whole(of.last)} steps`],
      ["policy", `the newest ${of.newest}, before them each ${of.every}th`],
      ["size", `${bytes(of.total_bytes)} of ${bytes(of.max_mb * 2 ** 20)}`],
    ]),
    of.problems.length ? h("pre", {}, of.problems.join("\n")) : null,
  );
}

function versions(found) {
  const rows = Object.entries(found.versions);
  return card(
    "Versions",
    rows.length
      ? pairs(rows.map(([name, version]) => [name, h("span", { class: "mono" }, version)]))
      : empty("No versions", "config.json does not name them."),
  );
}

const shown = (value) =>
  value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);

function configuration(found) {
  const rows = Object.entries(found.config);
  const body = h("div", {});
  const draw = (filter) =>
    body.replaceChildren(
      table(
        [
          { name: "option", mono: true, cell: ([name]) => name },
          { name: "value", mono: true, cell: ([, value]) => shown(value) },
          {
            name: "",
            cell: ([name]) => (found.given.includes(name) ? badge("given", "accent") : ""),
          },
        ],
        rows.filter(([name]) => name.includes(filter)),
        { id: "options" },
      ),
    );
  draw("");
  return h(
    "section",
    { class: "card" },
    h(
      "div",
      { class: "toolbar", style: { justifyContent: "space-between", marginBottom: "8px" } },
      h("h2", {}, "Configuration"),
      h("input", {
        placeholder: "filter",
        "aria-label": "filter options",
        oninput: (event) => draw(event.target.value),
      }),
    ),
    found.argv.length ? h("p", {}, h("code", {}, found.argv.join(" "))) : null,
    rows.length
      ? h("div", { style: { maxHeight: "880px", overflow: "auto" } }, body)
      : empty("No configuration", "config.json is missing."),
  );
}

function difference(found, against, { runs, chosen, other, set }) {
  const chooser = h(
    "select",
    { "aria-label": "other run", onchange: (event) => set({ other: event.target.value }) },
    h("option", { value: "" }, "another run"),
    runs.map((one, at) =>
      at === chosen ? null : h("option", { value: at, selected: at === other }, one.name),
    ),
  );
  const head = h(
    "div",
    { class: "toolbar", style: { marginBottom: "8px" } },
    h("h2", { style: { margin: 0 } }, "Difference to"),
    chooser,
  );
  if (!against)
    return h(
      "section",
      { class: "card", id: "difference" },
      head,
      h("p", { class: "muted" }, "Choose a run to see which options and versions differ."),
    );
  const names = [...new Set([...Object.keys(found.config), ...Object.keys(against.config)])];
  const all = [
    ...names.map((name) => [name, found.config[name], against.config[name]]),
    ...[...new Set([...Object.keys(found.versions), ...Object.keys(against.versions)])].map(
      (name) => [`version of ${name}`, found.versions[name], against.versions[name]],
    ),
  ].filter(([, one, two]) => JSON.stringify(one) !== JSON.stringify(two));
  return h(
    "section",
    { class: "card", id: "difference" },
    head,
    all.length
      ? table(
          [
            { name: "", mono: true, cell: ([name]) => name },
            {
              name: runs[chosen].name,
              mono: true,
              cell: ([, one]) => (one === undefined ? "–" : shown(one)),
            },
            {
              name: runs[other].name,
              mono: true,
              cell: ([, , two]) => (two === undefined ? "–" : shown(two)),
            },
          ],
          all,
        )
      : empty("No difference", "Options and versions are the same."),
  );
}

function log(title, lines, from) {
  return h(
    "section",
    { class: "card" },
    h("h2", {}, title),
    lines.length
      ? h("pre", { style: { maxHeight: "260px", overflow: "auto" } }, lines.join("\n"))
      : empty("Nothing", `${from} is empty or not there.`),
  );
}
