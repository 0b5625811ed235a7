// <nano-run> draws an engine: its blocks as squares, its requests, its numbers. No library, no build.
//
//   <script src="player.js" defer></script>
//   <nano-run src="runs/shared_prefix.json" step="9"></nano-run>
//
// shows this step of a recorded run, and plays it. The run may also be JSON in the page (the element has a
// <script type="application/json">: a page that was opened as a file may not read other files), or the
// property `run`, parsed. With the attribute `full` there are numbers and charts, else a time line. What else is in
// the element is shown only without JavaScript. player.css lies beside this file.
"use strict";

const PLAYER_STYLE = new URL("player.css", document.currentScript.src).href;

// The style sheet is read once, for all elements. A page that was opened as a file may not read it: there each element
// has a link.
const readStyle = async () => {
  if (location.protocol === "file:") throw new Error("a file");
  const response = await fetch(PLAYER_STYLE);
  if (!response.ok) throw new Error(response.statusText);
  return new CSSStyleSheet().replace(await response.text());
};
const style = readStyle();
style.catch(() => {}); // each element sees it

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text; // text is never markup
  return made;
}

const grouped = new Intl.NumberFormat("en-US");
const plural = (n, one) => `${grouped.format(n)} ${one}${n === 1 ? "" : "s"}`;

const INSIDE = `
<div id="all" hidden>
  <div id="player" hidden>
    <slot name="choose"></slot>
    <h3 id="title"></h3>
    <p id="explanation"></p>
    <div id="controls" class="bar" hidden>
      <button type="button" id="play" class="main">Play</button>
      <button type="button" id="previous" aria-label="Previous step">&#8592;</button>
      <button type="button" id="next" aria-label="Next step">&#8594;</button>
      <label class="unseen" for="slider">Step</label>
      <input type="range" id="slider" min="0" max="0" value="0">
      <output id="position" for="slider"></output>
    </div>
    <div id="events" class="bar" hidden>
      <p id="told" role="status"></p>
      <button type="button" id="previous-event">Previous event</button>
      <button type="button" id="next-event" title="the next preemption, prefix-cache hit, admission or end">Next event</button>
    </div>
  </div>

  <dl id="counts">
    <div><dt>Running</dt><dd id="num-running">&ndash;</dd></div>
    <div><dt>Waiting</dt><dd id="num-waiting">&ndash;</dd></div>
    <div><dt>Preempted</dt><dd id="num-preempted">&ndash;</dd></div>
    <div><dt>Swapped out</dt><dd id="num-swapped">&ndash;</dd></div>
  </dl>

  <dl id="numbers">
    <div><dt>Tokens/s</dt><dd id="speed">&ndash;</dd></div>
    <div><dt>Cache in use</dt><dd id="use">&ndash;</dd></div>
    <div><dt>Prefix hits</dt><dd id="hits">&ndash;</dd></div>
    <div id="guessed" hidden><dt>Accepted draft tokens</dt><dd id="guesses">&ndash;</dd></div>
    <div><dt>Preemptions</dt><dd id="preemptions">&ndash;</dd></div>
    <div><dt>Step</dt><dd id="step">&ndash;</dd></div>
  </dl>

  <div class="charts">
    <figure>
      <figcaption><span id="speed-title">Output tokens per second</span> <span id="speed-top"></span></figcaption>
      <svg id="speed-chart" viewBox="0 0 300 56" preserveAspectRatio="none" role="img" aria-labelledby="speed-title"></svg>
      <p class="axis"><span></span><span></span><span></span></p>
    </figure>
    <figure>
      <figcaption><span id="use-title">Cache in use</span> <span id="use-top">100%</span></figcaption>
      <svg id="use-chart" viewBox="0 0 300 56" preserveAspectRatio="none" role="img" aria-labelledby="use-title"></svg>
      <p class="axis"><span></span><span></span><span></span></p>
    </figure>
  </div>

  <div id="line">
    <h3>Requests in each step <small>bar: it runs, line: it waits, hatched: preempted</small></h3>
    <div id="timeline"></div>
  </div>

  <h3>KV cache <small id="size"></small></h3>
  <slot name="hint"></slot>
  <div id="blocks" class="grid" tabindex="0" role="group" aria-labelledby="words" aria-describedby="legend"></div>
  <div id="host" hidden>
    <h3>Host memory <small id="host-size"></small></h3>
    <div id="host-blocks" class="grid" tabindex="0" role="group" aria-labelledby="words" aria-describedby="legend"></div>
  </div>
  <p id="words" role="status"></p>
  <ul id="legend" class="legend">
    <li><i class="cell owned"></i>of one sequence</li>
    <li><i class="cell owned shared"></i>shared by several</li>
    <li><i class="cell owned moved"></i>copied or swapped just now</li>
    <li><i class="cell cached"></i>free, can be found by its prefix</li>
    <li><i class="cell"></i>free and empty</li>
  </ul>

  <h3>Requests</h3>
  <ul id="key" class="legend">
    <li><b>15 + 48</b>tokens of the prompt + of the output</li>
    <li><i class="track"><i class="done"></i></i>computed</li>
    <li><i class="track"><i class="all"></i></i>not computed yet</li>
    <li><i class="track"><i class="done"></i><i class="prompt"></i></i>gap: end of the prompt</li>
    <li><i class="track"></i>gray: up to <span id="scale">32</span> tokens</li>
  </ul>
  <div id="queues"></div>
</div>`;

// --- who owns what: each request has a letter and a colour while it lives ---

const NUM_COLORS = 8;

function letterOf(n) {
  const letter = String.fromCharCode(65 + (n % 26));
  return n < 26 ? letter : letter + Math.floor(n / 26);
}

class Owners extends Map {
  // id -> {letter, color}
  numNamed = 0;

  clear() {
    super.clear();
    this.numNamed = 0;
  }

  name(frame, keepsOld) {
    const ids = new Set([...idsOf(frame), ...frame.ended]);
    if (!keepsOld) {
      for (const id of this.keys()) if (!ids.has(id)) this.delete(id);
    }
    const taken = new Set([...ids].map((id) => this.get(id)?.color));
    for (const id of ids) {
      if (this.has(id)) continue;
      let color = this.numNamed % NUM_COLORS;
      for (let i = 0; i < NUM_COLORS && taken.has(color); i++) color = (color + 1) % NUM_COLORS;
      taken.add(color);
      this.set(id, { letter: letterOf(this.numNamed), color });
      this.numNamed += 1;
    }
  }
}

// --- what a frame says ---

// Those that have not ended, first those that run.
const idsOf = (frame) => (frame ? [...frame.running, ...frame.queue] : []);

function statesOf(frame) {
  const states = new Map(frame.queue.map((id) => [id, "waiting"]));
  for (const state of ["running", "preempted", "swapped"]) {
    for (const id of frame[state]) states.set(id, state);
  }
  return states;
}

const EMPTY = { kind: "empty" };
const CACHED = { kind: "cached" };

function readTables(tables, news) {
  for (const [id, index, numSame, added] of news) {
    const key = `${index} ${id}`;
    const table = tables.get(key) ?? { id, blocks: [] };
    table.blocks.splice(numSame, Infinity, ...added);
    if (table.blocks.length) tables.set(key, table);
    else tables.delete(key);
  }
}

// For each block EMPTY, CACHED, or whose it is and how many sequences share it.
function blocksOf(tables, free) {
  const blocks = free;
  for (const { id, blocks: owned } of tables.values()) {
    const alone = { kind: "owned", id, sharing: 1 };
    for (const i of owned) {
      const before = blocks[i];
      blocks[i] = before?.kind === "owned" ? { ...before, sharing: before.sharing + 1 } : alone;
    }
  }
  return blocks;
}

// --- the blocks as squares ---

const MOST_CELLS = 2000; // as elements; more are drawn on a canvas
const MOST_DRAWN = 6000; // with more, a square stands for several blocks
const FEW = 256;
const BIG_SIZES = [48, 40, 32, 26, 20, 14, 10];
const SMALL_SIZES = [12, 10, 8, 6, 5, 4, 3];
const REST = "Point at a block, or move there with the arrow keys, to read what it is.";

class Grid {
  constructor(view, id, noun, height) {
    this.view = view;
    this.box = view.$(id);
    this.noun = noun;
    this.height = height;
    this.most = MOST_CELLS; // with more blocks, only the part that has been used is shown
    this.larger = null; // a grid whose squares are not smaller
    this.isFromEnd = false; // whether the last block is the first to be used, and so shown
    this.forget();
    this.box.addEventListener("pointermove", (event) => this.moveCursor(this.cellAt(event)));
    this.box.addEventListener("pointerleave", () => this.moveCursor(-1));
    this.box.addEventListener("focus", () => this.cursor < 0 && this.blocks.length && this.moveCursor(0));
    this.box.addEventListener("blur", () => this.moveCursor(-1));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.redraw()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  forget() {
    this.blocks = []; // one for each square
    this.cells = [];
    this.marks = new Map();
    this.numShown = 0;
    this.each = 1; // blocks that a square stands for
    this.cursor = -1;
  }

  // Of a large cache only the part that has ever been used: the rest is empty.
  numToShow(blocks) {
    if (blocks.length <= this.most) return blocks.length;
    const used = blocks.findLastIndex((block) => block !== EMPTY) + 1;
    let shown = Math.max(FEW, this.numShown);
    while (shown < used) shown *= 2;
    return Math.min(shown, blocks.length);
  }

  show(blocks, marks) {
    this.total = blocks.length;
    if (this.isFromEnd) blocks.reverse();
    const isNewSize = this.numShown !== this.numToShow(blocks);
    this.numShown = this.numToShow(blocks);
    this.each = Math.ceil(this.numShown / MOST_DRAWN);
    this.blocks = this.each === 1 ? blocks.slice(0, this.numShown) : this.summed(blocks);
    this.marks = this.each === 1 ? marks : new Map();
    if (isNewSize) this.layOut();
    this.draw();
    if (this.cursor >= 0) this.say();
  }

  // What most blocks of each square are.
  summed(blocks) {
    const squares = [];
    for (let begin = 0; begin < this.numShown; begin += this.each) {
      const counts = new Map();
      let most = EMPTY;
      for (let i = begin; i < Math.min(begin + this.each, this.numShown); i++) {
        const count = (counts.get(blocks[i]) ?? 0) + 1;
        counts.set(blocks[i], count);
        if (count > (counts.get(most) ?? 0)) most = blocks[i];
      }
      squares.push(most);
    }
    return squares;
  }

  sizeInWords(frame) {
    const rest = this.total - this.numShown;
    const parts = [`${plural(this.numShown, "block")} of ${plural(frame.block_size, "token")}`];
    if (rest) parts.push(`and ${grouped.format(rest)} more that are empty`);
    if (this.each > 1) parts.push(`each square is what most of ${this.each} blocks are`);
    return parts.join(", ");
  }

  layOut() {
    const width = this.box.clientWidth;
    const count = this.blocks.length;
    if (!width) return;
    const isCanvas = count > MOST_CELLS;
    const sizes = isCanvas ? SMALL_SIZES : BIG_SIZES;
    const most = this.larger?.size ?? Infinity;
    const fits = (size) => size <= most && Math.ceil(count / Math.floor(width / size)) * size <= this.height;
    this.size = sizes.find(fits) ?? sizes.at(-1);
    this.columns = Math.floor(width / this.size);
    this.box.classList.toggle("small", this.size < 26);
    if (isCanvas) this.layOutCanvas(width, count);
    else this.layOutCells(count);
  }

  layOutCells(count) {
    this.canvas = null;
    this.box.style.gridTemplateColumns = `repeat(${this.columns}, minmax(0, 1fr))`;
    if (this.cells.length === count) return;
    this.cells = Array.from({ length: count }, () => element("div", "cell"));
    this.box.replaceChildren(...this.cells);
  }

  layOutCanvas(width, count) {
    const height = Math.ceil(count / this.columns) * this.size;
    this.cells = [];
    this.canvas = element("canvas");
    this.canvas.width = width * devicePixelRatio;
    this.canvas.height = height * devicePixelRatio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.box.style.gridTemplateColumns = "none";
    this.box.replaceChildren(this.canvas);
  }

  redraw() {
    if (!this.blocks.length) return;
    this.layOut();
    this.draw();
  }

  draw() {
    if (this.canvas) this.drawCanvas();
    else this.cells.forEach((cell, i) => this.showCell(cell, i));
  }

  showCell(cell, i) {
    const block = this.blocks[i];
    const classes = ["cell"];
    let letter = "";
    if (block === CACHED) classes.push("cached");
    else if (block !== EMPTY) {
      const owner = this.view.owners.get(block.id);
      letter = owner.letter;
      classes.push("owned", `owner-${owner.color}`);
      if (block.sharing > 1) classes.push("shared");
    }
    if (this.marks.get(this.numberOf(i))?.isNew) classes.push("moved");
    if (i === this.cursor) classes.push("cursor");
    const className = classes.join(" ");
    if (cell.className !== className) cell.className = className;
    if (cell.textContent !== letter) cell.textContent = letter;
  }

  drawCanvas() {
    const names = ["ink", "accent", "ground", "line", "hatch"];
    for (let i = 0; i < NUM_COLORS; i++) names.push(`owner-${i}`);
    const colors = Object.fromEntries(names.map((name) => [name, this.colorOf(name)]));
    const context = this.canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.blocks.forEach((block, i) => this.drawBlock(context, colors, block, i));
  }

  // As it is now, light or dark.
  colorOf(name) {
    this.canvas.style.color = `var(--${name})`;
    return getComputedStyle(this.canvas).color;
  }

  drawBlock(context, colors, block, i) {
    const inner = this.size - (this.size > 4 ? 1 : 0.5);
    const x = (i % this.columns) * this.size;
    const y = Math.floor(i / this.columns) * this.size;
    const names = { empty: "line", cached: "hatch" };
    context.fillStyle = colors[names[block.kind] ?? `owner-${this.view.owners.get(block.id).color}`];
    context.fillRect(x, y, inner, inner);
    if (block.sharing > 1) {
      context.fillStyle = colors.ground;
      context.fillRect(x + inner / 3, y + inner / 3, inner / 3, inner / 3);
    }
    if (i === this.cursor || this.marks.get(this.numberOf(i))?.isNew) {
      context.strokeStyle = i === this.cursor ? colors.ink : colors.accent;
      context.strokeRect(x - 0.5, y - 0.5, inner + 1, inner + 1);
    }
  }

  say() {
    const words = this.view.$("words");
    const text = this.cursor < 0 ? REST : this.wordsOf(this.cursor);
    if (words.textContent !== text) words.textContent = text;
  }

  wordsOf(i) {
    const block = this.blocks[i];
    const mark = this.marks.get(this.numberOf(i));
    let what = "free and empty";
    if (block === CACHED) what = "free, but what it holds can still be found by its prefix";
    else if (block !== EMPTY) {
      const sharing = block.sharing > 1 ? `shared by ${block.sharing} sequences` : "of one sequence";
      what = `request ${this.view.owners.get(block.id).letter} (${block.id}), ${sharing}`;
    }
    if (this.each > 1) {
      const last = Math.min((i + 1) * this.each, this.numShown) - 1;
      return `${this.noun}s ${this.numberOf(i * this.each)} to ${this.numberOf(last)}, most of them: ${what}.`;
    }
    return `${this.noun} ${this.numberOf(i)}: ${what}${mark ? `; ${mark.text}` : ""}.`;
  }

  numberOf(i) {
    return this.isFromEnd ? this.total - 1 - i : i;
  }

  moveCursor(i) {
    this.cursor = i < this.blocks.length ? i : -1;
    if (this.blocks.length) this.draw();
    this.say();
  }

  cellAt(event) {
    if (!this.canvas) return this.cells.indexOf(event.target);
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const row = Math.floor((event.clientY - box.top) / this.size);
    const i = row * this.columns + column;
    return column < this.columns && i < this.blocks.length ? i : -1;
  }

  onKey(event) {
    const last = this.blocks.length - 1;
    const { columns } = this;
    const jumps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -last, End: last };
    if (!(event.key in jumps)) return;
    event.preventDefault();
    this.moveCursor(Math.min(last, Math.max(0, this.cursor + jumps[event.key])));
  }
}

// What has happened to a block just now, in words.
function marksOf(moves) {
  const marks = new Map();
  for (const [block] of moves.out) marks.set(block, { text: "what it held went to the host's memory just now" });
  for (const [, block] of moves.in) marks.set(block, { text: "swapped in just now", isNew: true });
  for (const [from, to] of moves.copies) marks.set(to, { text: `copied from block ${from} just now`, isNew: true });
  return marks;
}

function hostMarksOf(moves) {
  const marks = new Map();
  for (const [block] of moves.in) marks.set(block, { text: "what it held went back just now" });
  for (const [block, to] of moves.out) marks.set(to, { text: `swapped out from block ${block} just now`, isNew: true });
  return marks;
}

// --- the requests ---

const QUEUES = [
  ["Running", ["running"]],
  ["Preempted", ["preempted", "swapped"]],
  ["Waiting", ["waiting"]],
];

function countsOf(frame) {
  const { running, preempted, swapped } = frame;
  const waiting = frame.queue.length - preempted.length - swapped.length + frame.not_listed;
  return { running: running.length, preempted: preempted.length, swapped: swapped.length, waiting };
}

function queue(title, rows, count, level) {
  const box = element("div", title.toLowerCase());
  const heading = element("h4", "", title);
  heading.setAttribute("aria-level", level);
  heading.append(element("small", "", grouped.format(count)));
  box.append(heading, ...rows);
  const rest = count - rows.length;
  if (rest > 0) box.append(element("p", "more", `and ${grouped.format(rest)} more`));
  return box;
}

// For each request what it is, and in how many steps: [["waiting", 3], ["running", 9]], after the steps before it came.
function timesOf(frames) {
  const times = new Map();
  frames.forEach((frame, i) => {
    const states = statesOf(frame);
    for (const id of frame.ended) states.set(id, "running"); // in its last step
    for (const [id, state] of states) {
      if (!times.has(id)) times.set(id, [["absent", i]]);
      const last = times.get(id).at(-1);
      if (last[0] === state) last[1] += 1;
      else times.get(id).push([state, 1]);
    }
  });
  return times;
}

// --- what happens in a step, in words ---

const MOST_NAMED = 4; // requests in a sentence; of more, their number
const lists = new Intl.ListFormat("en-GB"); // A, B and C
const NOTHING = { running: [], queue: [], preempted: [], swapped: [], requests: [], tables: [], output_tokens: 0, prefix_cache_hit_tokens: 0 };

// The blocks of each request, in a frame that is whole.
function blocksHeld(frame) {
  const held = new Map();
  for (const [id, , , blocks] of frame.tables) held.set(id, new Set([...(held.get(id) ?? []), ...blocks]));
  return held;
}

// A sentence for a frame of a recorded run, and whether there is an event in it: a preemption, a prefix-cache hit, an
// admission or an end.
function tell(before, frame, letter) {
  const [was, is] = [statesOf(before), statesOf(frame)];
  const [held, holds] = [blocksHeld(before), blocksHeld(frame)];
  const isAway = (states, id) => ["preempted", "swapped"].includes(states.get(id));
  const named = (ids) => (ids.length > MOST_NAMED ? plural(ids.length, "request") : lists.format(ids.map(letter)));
  const say = (ids, one, several) => (ids.length ? [`${named(ids)} ${ids.length === 1 ? one : several}`] : []);
  const takers = frame.running.filter((id) => (holds.get(id)?.size ?? 0) > (held.get(id)?.size ?? 0));
  const preempt = (id) => {
    const way = frame.steps === 1 ? (takers.length ? ` gives way to ${named(takers)},` : " finds no free block,") : "";
    const count = plural(held.get(id)?.size ?? 0, "block");
    const fate = is.get(id) === "swapped" ? `moves ${count} to the host's memory` : `loses ${count} and will be computed again`;
    return `${letter(id)}${way} ${fate}`;
  };
  const ids = [...is.keys()];
  const away = ids.filter((id) => isAway(is, id) && !isAway(was, id));
  const back = frame.running.filter((id) => isAway(was, id));
  const admitted = frame.running.filter((id) => was.get(id) !== "running" && !isAway(was, id));
  const late = ids.filter((id) => is.get(id) === "waiting" && !was.has(id));
  const hits = frame.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens;
  const inUse = new Set([...holds.values()].flatMap((blocks) => [...blocks]));
  const freed = new Set(frame.ended.flatMap((id) => [...(held.get(id) ?? [])]).filter((block) => !inUse.has(block)));
  const frees = freed.size ? ` and ${frame.ended.length === 1 ? "frees" : "free"} ${plural(freed.size, "block")}` : "";
  const parts = away.length > MOST_NAMED ? say(away, "", "are preempted") : away.map(preempt);
  parts.push(...say(back.filter((id) => was.get(id) === "preempted"), "comes back and is computed again", "come back and are computed again"));
  parts.push(...say(back.filter((id) => was.get(id) === "swapped"), "comes back from the host's memory", "come back from the host's memory"));
  const first = admitted.length === 1 && !back.length && frame.steps === 1 && frame.requests.find(({ id }) => id === admitted[0]);
  const computed = first && Math.min(first.prompt, first.computed) - hits;
  const share = first && computed < first.prompt ? `${computed} of ` : "";
  const ofPrompt = first ? ` and computes ${share}its ${plural(first.prompt, "prompt token")}` : "";
  parts.push(...say(admitted, `is admitted${ofPrompt}`, "are admitted"));
  if (hits > 0) parts.push(`${plural(hits, "token")} of ${named([...back, ...admitted, ...frame.ended.filter((id) => !was.has(id))])} ${hits === 1 ? "is" : "are"} found in the prefix cache`);
  parts.push(...say(frame.ended, `ends${frees}`, `end${frees}`));
  parts.push(...say(late, "arrives and waits", "arrive and wait"));
  parts.push(...tellTokens(before, frame, say));
  const steps = frame.steps > 1 ? `Steps ${grouped.format(frame.step - frame.steps + 1)} to` : "Step";
  const isEvent = away.length + back.length + admitted.length + frame.ended.length > 0 || hits > 0;
  return { isEvent, text: `${steps} ${grouped.format(frame.step)}: ${parts.join("; ") || "nothing changes"}.` };
}

// Who computes a prompt, who gets a token, and which blocks are copied.
function tellTokens(before, frame, say) {
  const copies = frame.moves.copies.length;
  const parts = copies ? [`${plural(copies, "shared block")} ${copies === 1 ? "is" : "are"} copied before a sequence writes into ${copies === 1 ? "it" : "them"} (copy-on-write)`] : [];
  const sampled = frame.output_tokens - before.output_tokens;
  if (frame.steps > 1) return [...parts, `${plural(sampled, "token")} ${sampled === 1 ? "is" : "are"} sampled`];
  const rowsBefore = new Map(before.requests.map((row) => [row.id, row]));
  const running = frame.requests.filter(({ id }) => frame.running.includes(id));
  const ids = (rows) => rows.map(({ id }) => id);
  parts.push(...say(ids(running.filter((row) => row.computed < row.prompt)), "computes a part of its prompt", "compute parts of their prompts"));
  const getters = running.filter((row) => row.output > (rowsBefore.get(row.id)?.output ?? 0));
  const isOneEach = getters.every((row) => row.output === (rowsBefore.get(row.id)?.output ?? 0) + 1);
  return [...parts, ...say(ids(getters), isOneEach ? "gets a token" : "gets tokens", isOneEach ? "get a token each" : "get tokens")];
}

// --- charts ---

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A round number that is not smaller.
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return unit * [1, 2, 5, 10].find((factor) => factor * unit >= value);
}

// --- the element ---

const STEP_MILLISECONDS = 250;
const EVENT_MILLISECONDS = 1200; // a step with an event stays, so that its sentence can be read
const MOST_LINES = 12; // of requests, in the time line

class NanoRun extends HTMLElement {
  static observedAttributes = ["src", "step"];

  owners = new Owners();
  tables = new Map(); // the picture: frames tell what has changed in it
  hostTables = new Map();
  cached = [];
  frame = null;
  i = 0; // the frame that is shown, of a run
  level = 3; // of its headings
  timer = null;
  #run = null;

  constructor() {
    super();
    this.attachShadow({ mode: "open" }).innerHTML = INSIDE;
    style.then((sheet) => this.adopt(sheet), () => this.link());
    this.kv = new Grid(this, "blocks", "Block", 260);
    this.host = new Grid(this, "host-blocks", "Host block", 100);
    this.host.most = FEW;
    this.host.larger = this.kv;
    this.host.isFromEnd = true;
    this.kv.say();
    this.$("play").addEventListener("click", () => this.playOrPause());
    this.$("previous").addEventListener("click", () => this.stepBy(-1));
    this.$("next").addEventListener("click", () => this.stepBy(1));
    this.$("previous-event").addEventListener("click", () => this.jump(-1));
    this.$("next-event").addEventListener("click", () => this.jump(1));
    this.$("slider").addEventListener("input", () => this.stepBy(Number(this.$("slider").value) - this.i));
    this.addEventListener("keydown", (event) => this.onKey(event));
  }

  $(id) {
    return this.shadowRoot.getElementById(id);
  }

  adopt(sheet) {
    this.shadowRoot.adoptedStyleSheets = [sheet];
    this.$("all").hidden = false;
  }

  link() {
    const link = element("link");
    link.rel = "stylesheet";
    link.onload = link.onerror = () => (this.$("all").hidden = false);
    link.href = PLAYER_STYLE;
    this.shadowRoot.prepend(link);
  }

  // Its headings are one level below that of the page before it.
  setLevels() {
    const isBefore = (heading) => heading.compareDocumentPosition(this) & Node.DOCUMENT_POSITION_FOLLOWING;
    const before = [...document.querySelectorAll("h1, h2, h3, h4")].findLast(isBefore);
    this.level = Number(before?.tagName[1] ?? 1) + 1;
    for (const heading of this.shadowRoot.querySelectorAll("h3")) heading.setAttribute("aria-level", this.level);
  }

  connectedCallback() {
    this.isPlaced = true;
    this.setLevels();
    if (this.run) this.goTo(this.i);
    else this.load();
  }

  disconnectedCallback() {
    this.pause();
  }

  attributeChangedCallback(name, before, value) {
    if (name === "step") this.goTo(value - 1);
    else if (this.isPlaced) this.load();
  }

  async load() {
    const src = this.getAttribute("src");
    const text = this.querySelector("script[type='application/json']")?.textContent;
    if (!text && !src) return;
    try {
      const run = text ? JSON.parse(text) : await (await fetch(src)).json();
      if (src === this.getAttribute("src")) this.run = run;
    } catch (error) {
      this.explain(`The recorded run cannot be shown: ${error.message}.`, true);
    }
  }

  get run() {
    return this.#run;
  }

  // Of a recorded run, its first step or that of the attribute; null is for a live engine.
  set run(run) {
    if (run && !run.frames?.length) throw new Error("it has no frames");
    if (run && !run.frames[0].tables) throw new Error("another version has recorded it");
    this.pause();
    this.#run = run;
    this.$("controls").hidden = this.$("events").hidden = !run;
    if (!run) return;
    this.forget();
    const all = Object.keys(run.prompts ?? {}); // in the order in which they came
    for (const frame of [{ running: all, queue: [], ended: [] }, ...run.frames]) this.owners.name(frame, true);
    const tokens = run.frames.map((frame) => frame.output_tokens);
    this.speeds = tokens.map((count, i) => count - (tokens[i - 1] ?? 0));
    this.uses = run.frames.map((frame) => frame.kv_blocks_used / frame.kv_blocks);
    const letter = (id) => this.owners.get(id).letter;
    this.told = run.frames.map((frame, i) => tell(run.frames[i - 1] ?? NOTHING, frame, letter));
    this.$("slider").max = run.frames.length - 1;
    this.$("title").textContent = run.title;
    this.explain(run.explanation ?? "");
    this.readTimes();
    this.$("queues").style.minHeight = 0;
    this.goTo(Number(this.getAttribute("step") ?? 1) - 1);
  }

  explain(text, isProblem = false) {
    this.$("player").hidden = false;
    this.$("explanation").textContent = text;
    this.$("explanation").classList.toggle("problem", isProblem);
  }

  forget() {
    this.owners.clear();
    this.tables.clear();
    this.hostTables.clear();
    this.cached = [];
    this.kv.forget();
    this.host.forget();
  }

  // --- a frame, from wherever it comes ---

  show(frame) {
    this.frame = frame;
    this.read(frame);
    this.showBlocks(frame);
    this.showRequests(frame);
  }

  read(frame) {
    if (frame.is_whole) {
      this.tables.clear();
      this.hostTables.clear();
    }
    readTables(this.tables, frame.tables);
    readTables(this.hostTables, frame.host_tables);
    if (this.cached.length !== frame.kv_blocks) this.cached = new Array(frame.kv_blocks).fill(false);
    const [begin, bits] = frame.cached;
    for (let i = 0; i < bits.length; i++) this.cached[begin + i] = bits[i] === "1";
  }

  showBlocks(frame) {
    const free = this.cached.map((isCached) => (isCached ? CACHED : EMPTY));
    this.kv.show(blocksOf(this.tables, free), marksOf(frame.moves));
    this.$("size").textContent = this.kv.sizeInWords(frame);
    this.$("host").hidden = !frame.host_blocks;
    if (frame.host_blocks) {
      const all = new Array(frame.host_blocks).fill(EMPTY);
      this.host.show(blocksOf(this.hostTables, all), hostMarksOf(frame.moves));
      this.$("host-size").textContent = this.host.sizeInWords(frame);
    } else this.host.forget();
  }

  showRequests(frame) {
    const counts = countsOf(frame);
    for (const [state, count] of Object.entries(counts)) this.$(`num-${state}`).textContent = grouped.format(count);
    const states = statesOf(frame);
    const longest = Math.max(32, ...frame.requests.map((request) => request.prompt + request.output));
    const scale = 2 ** Math.ceil(Math.log2(longest)); // so that bars do not change their scale in each step
    this.$("scale").textContent = grouped.format(scale);
    const parts = QUEUES.map(([title, ofQueue]) => {
      const rows = frame.requests.filter((request) => ofQueue.includes(states.get(request.id)));
      const count = ofQueue.reduce((sum, state) => sum + counts[state], 0);
      return queue(title, rows.map((request) => this.row(request, states.get(request.id), scale)), count, this.level + 1);
    });
    const letters = frame.ended.map((id) => this.owners.get(id).letter);
    parts.push(element("p", "more", letters.length ? `Ended just now: ${letters.join(", ")}` : ""));
    const queues = this.$("queues");
    queues.replaceChildren(...parts);
    // what follows in a chapter stays where it is while the run plays
    if (!this.hasAttribute("full")) queues.style.minHeight = `${queues.offsetHeight}px`;
  }

  row(request, state, scale) {
    const { letter, color } = this.owners.get(request.id);
    const made = element("div", `request owner-${color}`);
    const bar = element("div", "middle");
    const prompt = this.run?.prompts?.[request.id];
    if (prompt) bar.append(element("p", "asked", prompt));
    const track = element("div", "track");
    const all = request.prompt + request.output;
    for (const [name, tokens] of [["all", all], ["done", request.computed], ["prompt", request.prompt]]) {
      const part = element("div", name);
      part.style.width = `${(100 * tokens) / scale}%`;
      track.append(part);
    }
    bar.append(track);
    const prefix = state === "swapped" ? "on host, " : request.sequences > 1 ? `${request.sequences} \u00d7, ` : "";
    const count = element("span", "count", `${prefix}${request.prompt} + ${request.output}`);
    made.title = this.wordsOf(request);
    made.append(element("span", state === "running" ? "tag owned" : "tag owned idle", letter), bar, count);
    made.append(element("span", "unseen", made.title));
    return made;
  }

  wordsOf(request) {
    const parts = [plural(request.prompt, "prompt token"), plural(request.output, "output token")];
    parts.push(`${grouped.format(request.computed)} computed`);
    if (request.sequences > 1) parts.push(plural(request.sequences, "sequence"));
    const prompt = this.run?.prompts?.[request.id];
    return `${request.id}: ${parts.join(", ")}${prompt ? `\n${prompt}` : ""}`;
  }

  // --- who runs and who waits in each step of a run ---

  readTimes() {
    this.times = timesOf(this.run.frames);
    this.timed = [...this.owners.keys()].filter((id) => this.times.has(id));
    if (this.timed.length <= MOST_LINES) this.showTimes(0);
  }

  // Of many requests, those that came with the first one of this frame, and after it.
  showTimes(first) {
    const { times, timed: ids } = this;
    const begin = Math.max(0, Math.min(first, ids.length - MOST_LINES));
    const lines = ids.slice(begin, begin + MOST_LINES).map((id) => this.lineOf(id, times.get(id)));
    const rest = ids.length - lines.length;
    if (rest > 0) lines.push(element("p", "more", `and ${plural(rest, "more request")}`));
    this.$("timeline").replaceChildren(element("i", "now"), ...lines);
  }

  lineOf(id, parts) {
    const { letter, color } = this.owners.get(id);
    const line = element("div", `line owner-${color}`);
    const times = element("div", "times");
    const words = [];
    let end = 0;
    for (const [state, count] of [...parts, ["absent", this.run.frames.length]]) {
      const part = element("i", state);
      part.style.width = `${(100 * Math.min(count, this.run.frames.length - end)) / this.run.frames.length}%`;
      times.append(part);
      if (state !== "absent") words.push(`${state} in steps ${end + 1} to ${end + count}`);
      end += count;
    }
    line.title = words.join(", ");
    line.append(element("span", "tag owned", letter), times, element("span", "unseen", line.title));
    return line;
  }

  // --- numbers and charts ---

  showNumbers(frame, speed) {
    const number = (id, value, unit) => {
      this.$(id).textContent = value;
      if (unit) this.$(id).append(" ", element("small", "", unit));
    };
    const percent = (100 * frame.kv_blocks_used) / frame.kv_blocks;
    number("speed", speed === null ? "\u2013" : grouped.format(Math.round(speed)));
    number("use", `${percent.toFixed(percent > 0 && percent < 1 ? 1 : 0)}%`, `${grouped.format(frame.kv_blocks_used)} blocks`);
    number("hits", grouped.format(frame.prefix_cache_hit_tokens), `of ${plural(frame.prompt_tokens, "token")}`);
    this.$("guessed").hidden = frame.draft_tokens === undefined; // an engine that does not guess
    if (!this.$("guessed").hidden) number("guesses", grouped.format(frame.accepted_draft_tokens), `of ${grouped.format(frame.draft_tokens)}`);
    number("preemptions", grouped.format(frame.preemptions));
    number("step", grouped.format(frame.step));
  }

  // Steps and slopes alike: a curve through `values`, from the left edge to the right one.
  drawChart(id, values, top, position = null) {
    const parts = [75, 150, 225].map((at) => shape("line", { class: "tick", x1: at, x2: at, y1: 0, y2: 56 }));
    const x = (i) => (300 * i) / Math.max(1, values.length - 1);
    const y = (value) => 56 - 54 * Math.min(1, value / top);
    const points = values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    if (values.length > 1) {
      parts.push(shape("polygon", { class: "area", points: `0,56 ${points} 300,56` }));
      parts.push(shape("polyline", { class: "curve", points }));
    }
    if (position !== null) {
      parts.push(shape("line", { class: "now", x1: x(position), x2: x(position), y1: 0, y2: 56 }));
    }
    this.$(id).replaceChildren(...parts);
  }

  // `marks` are those of the time axis: at its start, in the middle, at its end.
  nameCharts(speed, use, top, marks) {
    for (const axis of this.shadowRoot.querySelectorAll(".axis")) {
      marks.forEach((mark, i) => (axis.children[i].textContent = mark));
    }
    this.$("speed-title").textContent = speed;
    this.$("use-title").textContent = use;
    this.$("speed-top").textContent = grouped.format(top);
  }

  // --- to play a run ---

  goTo(i) {
    const { run } = this;
    if (!run) return;
    const count = run.frames.length;
    this.i = Math.min(count - 1, Math.max(0, i || 0));
    const frame = run.frames[this.i];
    const top = roundUp(Math.max(2, ...this.speeds));
    const noun = run.frames.some(({ steps }) => steps > 1) ? "picture" : "step";
    const position = `${noun} ${this.i + 1} of ${count}`;
    const marks = [`${noun} 1`, Math.ceil(count / 2), count];
    if (this.timed.length > MOST_LINES) {
      const alive = new Set(idsOf(frame));
      this.showTimes(Math.max(0, this.timed.findIndex((id) => alive.has(id))));
    }
    this.$("slider").value = this.i;
    this.$("slider").setAttribute("aria-valuetext", position);
    this.$("position").textContent = position;
    this.$("told").textContent = this.told[this.i].text;
    for (const [id, by] of [["previous-event", -1], ["next-event", 1]]) this.$(id).disabled = this.eventFrom(by) < 0;
    this.$("timeline").style.setProperty("--at", (this.i + 0.5) / count);
    this.show(frame);
    this.showNumbers(frame, frame.output_tokens_per_second);
    this.nameCharts("Output tokens in each step", "Cache in use in each step", top, marks);
    this.drawChart("speed-chart", this.speeds, top, this.i);
    this.drawChart("use-chart", this.uses, 1, this.i);
  }

  play() {
    if (!this.run) return;
    if (this.i === this.run.frames.length - 1) this.goTo(0);
    const next = () => {
      this.goTo(this.i + 1);
      if (this.i === this.run.frames.length - 1) this.pause();
      else wait();
    };
    const wait = () => {
      const isLong = this.told[this.i].isEvent && this.frame.steps === 1;
      this.timer = setTimeout(next, isLong ? EVENT_MILLISECONDS : STEP_MILLISECONDS);
    };
    wait();
    this.$("told").ariaLive = "off"; // a screen reader does not read all steps
    this.$("play").textContent = "Pause";
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.$("told").ariaLive = "polite";
    this.$("play").textContent = "Play";
  }

  // The next or the previous step with an event, or -1.
  eventFrom(by) {
    let i = this.i + by;
    while (this.told[i] && !this.told[i].isEvent) i += by;
    return this.told[i] ? i : -1;
  }

  jump(by) {
    const i = this.eventFrom(by);
    if (i >= 0) this.stepBy(i - this.i);
  }

  playOrPause() {
    if (this.timer) this.pause();
    else this.play();
  }

  stepBy(count) {
    this.pause();
    this.goTo(this.i + count);
  }

  // The arrow keys step, and space plays, unless what has the focus uses them itself.
  onKey(event) {
    if (!this.run || event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const target = event.composedPath()[0];
    if (by && !target.closest("input, textarea, select, .grid, #log")) {
      event.preventDefault();
      this.stepBy(by);
    }
    if (event.key === " " && !target.closest("input:not([type=range]), textarea, select, button, summary, a, #log")) {
      event.preventDefault();
      this.playOrPause();
    }
  }
}

customElements.define("nano-run", NanoRun);
