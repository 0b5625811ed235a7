// What a run has come to: tables, time lines, the blocks in the player. What the student's file says is text, never
// markup.

export function element(tag, className = "", text = undefined, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

const shape = (tag, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

function problem({ sentence, trace }) {
  const made = element("div", "problem", undefined, element("p", "", sentence));
  if (trace) {
    const details = element("details", "", undefined, element("summary", "", "Where the error was raised"), element("pre", "", trace));
    made.append(details);
  }
  return made;
}

const MEANINGS = [
  ["FCFS", "first come, first served: the scheduler that yours is compared with"],
  ["p50, p99", "half of the requests are below the first number, 99 of 100 below the second"],
  ["TTFT", "time to first token: from the arrival of a request to its first token"],
  ["TPOT", "time per output token, in the mean of one request"],
  ["between tokens", "the pause before the next token of the same answer"],
  ["end to end, latency", "from the arrival of a request to its last token"],
  ["KV blocks in use", "the part of the cache that requests hold, in the mean over the time of all steps"],
  ["preemptions", "how often a running request lost its blocks, and had to wait and come back"],
];

// Rows in which the larger number is the better one, and rows in which neither is. In all others, the smaller one is.
const LARGER = ["requests/s", "output tokens/s", "within the SLO", "within the SLO, requests/s", "deadlines met", "Jain's index of tenants", "prompt tokens from the cache", "requests in a step, mean"];
const NEITHER = ["requests", "KV blocks in use", "steps"];

function compared(name, texts) {
  const [before, now] = texts.map((text) => Number(text.replace(/[,%]/g, "")));
  if (before === now || Number.isNaN(before) || Number.isNaN(now)) return "same";
  if (NEITHER.includes(name)) return "differs";
  return now > before === LARGER.includes(name) ? "better" : "worse";
}

function table([[, ...names], ...rows]) {
  const cells = (tag, texts) => texts.map((text, i) => {
    const cell = element(i === 0 ? "th" : tag, "", text);
    if (tag === "th" || i === 0) cell.scope = tag === "th" ? "col" : "row";
    return cell;
  });
  const line = (tag, texts) => element("tr", "", undefined, ...cells(tag, texts));
  const body = rows.map((row) => {
    const state = compared(row[0], row.slice(1));
    const made = line("td", [...row, state === "differs" ? "" : state]);
    made.className = state;
    return made;
  });
  const head = line("th", ["number", ...names, "compared"]);
  const whole = element("table", "metrics", undefined, element("thead", "", undefined, head), element("tbody", "", undefined, ...body));
  const legend = element("p", "soft", `The last column compares \u201c${names[1]}\u201d with \u201c${names[0]}\u201d. Bold and green: better. Bold and red: worse. Where neither direction is better, it is empty.`);
  const box = element("div", "wide", undefined, whole);
  box.tabIndex = 0; // it can be scrolled
  box.role = "region";
  box.ariaLabel = `The numbers of ${names.join(" and ")}`;
  return element("div", "", undefined, box, legend);
}

function meanings() {
  const made = element("details", "soft", undefined, element("summary", "", "What the rows mean"));
  const list = element("dl");
  for (const [word, meaning] of MEANINGS) list.append(element("dt", "", word), element("dd", "", meaning));
  made.append(list);
  return made;
}

// What the run has reached of the goals of its load: a colour, and the same in words.
function goals(all, { part, parts, seed }) {
  if (!all.length) return element("div");
  const lines = all.map(({ name, value, score, most, wanted }) => {
    const state = stateOf(score, most);
    const made = element("li", state, undefined, element("b", "", `${points(score)} of ${points(most)} points: ${WORDS[state]}`));
    made.append(element("p", "", `${name}: ${value} (${wanted})`));
    return made;
  });
  const others = parts.filter((other) => other !== part);
  const hint = others.length
    ? `This sheet has ${parts.length} loads: a run with ${others.join(" or ")} measures the other goals.`
    : "This is one seed.";
  const title = element("h3", "", `Goals of this run: ${part}, seed ${seed}`);
  const more = element("p", "soft", `${hint} The button Points measures all loads on the public seeds, and checks the rules.`);
  return element("div", "", undefined, title, element("ul", "goals checks", undefined, ...lines), more);
}

const WORDS = { passed: "the goal is reached", partly: "a part of the goal is reached", failed: "the goal is not reached" };
const points = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 1 });

// The first line of what a sheet has reached, for the list of runs.
export function summary(answers) {
  const all = answers.flatMap(({ goals: found = [] }) => found);
  const sum = (name) => points(all.reduce((total, goal) => total + goal[name], 0));
  const total = answers.find((answer) => answer.total !== undefined);
  const tests = answers.filter((answer) => answer.test);
  if (answers.some(({ sentence }) => sentence)) return "error";
  if (total) return `${points(total.total)} of ${points(total.most)} points on the public seeds`;
  const leftOut = tests.filter(({ state }) => state === "left out").length;
  const passed = tests.filter(({ state }) => state === "passed").length;
  if (tests.length) return `${passed} of ${tests.length - leftOut} public tests passed${leftOut ? `, ${leftOut} left out` : ""}`;
  return all.length ? `${sum("score")} of ${sum("most")} points` : "done";
}

// --- the time line ---

const STATES = {
  "#": ["prompt", "computes its prompt, or again what it had"],
  o: ["decode", "gets tokens"],
  ".": ["waits", "waits for its first step"],
  x: ["preempted", "preempted, waits to come back"],
  "-": ["idle", "has a seat, but no part in the step"],
};
const ROW = 10;
const HEIGHTS = { "#": 8, o: 8, ".": 2, x: 4, "-": 2 };

function timeLines({ lines: runs, first, count }) {
  const spans = runs.flatMap((run) => run.lines.flatMap((line) => line.spans));
  const end = Math.max(...spans.map((span) => span[2]));
  const begin = Math.min(end, ...spans.map((span) => span[1]));
  const figures = runs.map(({ name, lines }) => timeLine(name, lines, begin, end));
  const keys = Object.entries(STATES).map(([, [name, words]]) =>
    element("li", "", undefined, element("i", `key ${name}`), words));
  const { length } = runs[0].lines;
  const isAll = length === count;
  const title = isAll ? `All ${count} requests` : `${length} of ${count} requests: where the queue is longest`;
  const why = isAll ? "" : " They wait longest, in both runs together.";
  const which = `Number ${first + 1} to number ${first + length} in the order of arrival.${why} Both pictures have the same time scale.`;
  const part = element("section", "", undefined, element("h3", "", title), element("p", "soft", which));
  part.append(element("div", "pair", undefined, ...figures), element("ul", "keys", undefined, ...keys));
  return part;
}

function timeLine(name, lines, first, end) {
  const svg = shape("svg", { viewBox: `0 0 1000 ${ROW * lines.length}`, preserveAspectRatio: "none", role: "img", class: "times" });
  svg.setAttribute("aria-label", `${name}: a line for each request, from second ${first.toFixed(2)} to second ${end.toFixed(2)}`);
  svg.style.height = `${ROW * lines.length * 1.2}px`;
  lines.forEach(({ request, spans }, i) => {
    const row = shape("g", {});
    const title = shape("title", {});
    title.textContent = `request ${request}: ${words(spans)}`;
    row.append(title);
    for (const [state, begin, until] of spans) {
      const height = HEIGHTS[state];
      const x = (1000 * (begin - first)) / (end - first);
      const width = Math.max(0.6, (1000 * (until - begin)) / (end - first));
      row.append(shape("rect", { x, width, y: ROW * i + (ROW - height) / 2, height, class: STATES[state][0] }));
    }
    svg.append(row);
  });
  const axis = element("p", "axis", undefined, element("span", "", `${first.toFixed(2)} s`), element("span", "", `${end.toFixed(2)} s`));
  return element("figure", "", undefined, element("figcaption", "", name), svg, axis);
}

function words(spans) {
  const seconds = {};
  for (const [state, begin, end] of spans) seconds[state] = (seconds[state] ?? 0) + end - begin;
  return Object.entries(seconds).map(([state, sum]) => `${STATES[state][0]} ${sum.toFixed(3)} s`).join(", ");
}

// --- the blocks ---

function film(run) {
  const part = element("section", "", undefined, element("h3", "", "The blocks over time"));
  if (!run?.frames) {
    const why = run ? "This cache has too many blocks to be drawn." : "The blocks of this run are not kept when the page is loaded again: press Run to see them.";
    part.append(element("p", "soft", why));
    return part;
  }
  const player = document.createElement("nano-run");
  const waiting = run.frames.map(({ queue }) => queue.length);
  player.setAttribute("step", waiting.indexOf(Math.max(...waiting)) + 1); // where most requests wait
  part.append(player);
  player.run = run;
  return part;
}

// --- all of it: the goals and the points stand first ---

export function newResults(about) {
  const [head, list, rest] = [element("div"), element("ul", "checks"), element("div")];
  const answers = [];
  const add = (answer) => {
    answers.push(answer);
    if (answer.sentence) head.append(problem(answer));
    if (answer.test) list.append(test(answer));
    if (answer.check) list.append(check(answer));
    if (answer.total !== undefined) head.append(element("p", `total ${stateOf(answer.total, answer.most)}`, `${points(answer.total)} of ${points(answer.most)} points that the lab can give, on the public seeds`));
    if (answer.done && answers.some((one) => one.test)) head.append(element("p", "total", summary(answers)));
    if (answer.table) {
      head.append(goals(answer.goals, about));
      rest.append(table(answer.table), meanings(), timeLines(answer), film(answer.film));
    }
    if (answer.printed) rest.append(element("h3", "", "Printed"), element("pre", "printed", answer.printed));
  };
  return { box: element("div", "", undefined, head, list, rest), add };
}

const stateOf = (score, most) => (score >= most ? "passed" : score > 0 ? "partly" : "failed");

// --- tests and points ---

const MARKS = { passed: "\u2713", failed: "\u2717", "left out": "\u2013" };

function test({ test, state, why }) {
  const made = element("li", state.replace(" ", "-"), undefined, element("b", "", `${MARKS[state]} ${state}`), ` ${test}`);
  if (why) made.append(element("p", "", why));
  return made;
}

function check({ check, score, most, says }) {
  const points = score === undefined ? `\u2013 of ${most}` : `${score} of ${most}`;
  const made = element("li", score === undefined ? "" : stateOf(score, most), undefined, element("b", "", points), ` ${check}`);
  made.append(element("p", "", says));
  return made;
}
