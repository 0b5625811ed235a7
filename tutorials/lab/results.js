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

export function problem({ sentence, trace }) {
  const made = element("div", "problem", undefined, element("p", "", sentence));
  if (trace) {
    const details = element("details", "", undefined, element("summary", "", "the way there"), element("pre", "", trace));
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

export function table([head, ...rows]) {
  const cells = (tag, texts) => texts.map((text, i) => {
    const cell = element(i === 0 ? "th" : tag, "", text);
    if (tag === "th" || i === 0) cell.scope = tag === "th" ? "col" : "row";
    return cell;
  });
  const line = (tag, texts) => element("tr", "", undefined, ...cells(tag, texts));
  const body = rows.map((row) => {
    const made = line("td", row);
    if (row[1] !== row[2]) made.className = "differs";
    return made;
  });
  const whole = element("table", "metrics", undefined, element("thead", "", undefined, line("th", head)), element("tbody", "", undefined, ...body));
  return element("div", "wide", undefined, whole);
}

export function meanings() {
  const made = element("details", "soft", undefined, element("summary", "", "What the rows mean"));
  const list = element("dl");
  for (const [word, meaning] of MEANINGS) list.append(element("dt", "", word), element("dd", "", meaning));
  made.append(list);
  return made;
}

export function goals(all) {
  const lines = all.map(({ name, value, points, wanted }) =>
    element("li", "", undefined, element("b", "", `${name}: ${value}`), ` ${points} on this seed (${wanted})`));
  return element("ul", "goals", undefined, ...lines);
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

export function timeLines(runs) {
  const end = Math.max(...runs.flatMap(({ lines }) => lines.flatMap(({ spans }) => spans.map((span) => span[2]))));
  const figures = runs.map(({ name, lines }) => timeLine(name, lines, end));
  const keys = Object.entries(STATES).map(([, [name, words]]) =>
    element("li", "", undefined, element("i", `key ${name}`), words));
  const part = element("section", "", undefined, element("h3", "", `The first ${runs[0].lines.length} requests`));
  part.append(element("div", "pair", undefined, ...figures), element("ul", "keys", undefined, ...keys));
  return part;
}

function timeLine(name, lines, end) {
  const svg = shape("svg", { viewBox: `0 0 1000 ${ROW * lines.length}`, preserveAspectRatio: "none", role: "img", class: "times" });
  svg.setAttribute("aria-label", `${name}: a line for each request, over ${end.toFixed(2)} seconds`);
  svg.style.height = `${ROW * lines.length * 1.2}px`;
  lines.forEach(({ request, spans }, i) => {
    const row = shape("g", {});
    const title = shape("title", {});
    title.textContent = `request ${request}: ${words(spans)}`;
    row.append(title);
    for (const [state, begin, until] of spans) {
      const height = HEIGHTS[state];
      const x = (1000 * begin) / end;
      const width = Math.max(0.6, (1000 * (until - begin)) / end);
      row.append(shape("rect", { x, width, y: ROW * i + (ROW - height) / 2, height, class: STATES[state][0] }));
    }
    svg.append(row);
  });
  const axis = element("p", "axis", undefined, element("span", "", "0 s"), element("span", "", `${end.toFixed(2)} s`));
  return element("figure", "", undefined, element("figcaption", "", name), svg, axis);
}

function words(spans) {
  const seconds = {};
  for (const [state, begin, end] of spans) seconds[state] = (seconds[state] ?? 0) + end - begin;
  return Object.entries(seconds).map(([state, sum]) => `${STATES[state][0]} ${sum.toFixed(3)} s`).join(", ");
}

// --- the blocks ---

export function film(run) {
  const part = element("section", "", undefined, element("h3", "", "The blocks over time"));
  if (!run.frames) {
    part.append(element("p", "soft", "This cache has too many blocks to be drawn."));
    return part;
  }
  const player = document.createElement("nano-run");
  part.append(player);
  player.run = run;
  return part;
}

// --- tests and points ---

const MARKS = { passed: "\u2713", failed: "\u2717", "left out": "\u2013" };

export function test({ test, state, why }) {
  const made = element("li", state.replace(" ", "-"), undefined, element("b", "", `${MARKS[state]} ${state}`), ` ${test}`);
  if (why) made.append(element("p", "", why));
  return made;
}

export function check({ check, score, most, says }) {
  const points = score === undefined ? `\u2013 of ${most}` : `${score} of ${most}`;
  const made = element("li", score === most ? "passed" : "", undefined, element("b", "", points), ` ${check}`);
  made.append(element("p", "", says));
  return made;
}
