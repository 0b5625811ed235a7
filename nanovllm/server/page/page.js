// The page of the server: a chat, and a view of the engine that answers it. No library, no build.
"use strict";

const $ = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text; // text is never markup
  return made;
}

const grouped = new Intl.NumberFormat("en-US");
const plural = (n, one) => `${grouped.format(n)} ${one}${n === 1 ? "" : "s"}`;

const ORDINALS = { one: "st", two: "nd", few: "rd", other: "th" };
const ordinalRules = new Intl.PluralRules("en-US", { type: "ordinal" });
const ordinal = (n) => `${grouped.format(n)}${ORDINALS[ordinalRules.select(n)]}`;

// --- chat ---

const chat = { messages: [], controller: null, many: null }; // what ends the answer, and the twenty

function startChat() {
  stopAll();
  chat.controller = null;
  chat.many = null;
  chat.messages = [];
  showBusy();
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("question").focus();
}

function stopAll() {
  chat.controller?.abort();
  chat.many?.abort();
}

function addMessage(role, text) {
  const isAtEnd = atEnd();
  const message = element("article", `message ${role}`);
  const reasoning = element("details");
  reasoning.hidden = true;
  reasoning.append(element("summary", "", "Reasoning"), element("div"));
  const heading = element("h3", "", role === "user" ? "You" : "Answer");
  if (role !== "user") heading.append(element("span", "tag"), element("span", "state"));
  message.append(heading, reasoning);
  message.append(element("div", "text", text));
  if (role !== "user") message.append(element("p", "note"));
  $("log").append(message);
  if (isAtEnd) scrollToEnd();
  return message;
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 30;
}

function scrollToEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

// What the fields say; an empty one leaves it to the model.
function options() {
  const chosen = {};
  for (const field of $("options").querySelectorAll("input")) {
    if (field.value !== "") chosen[field.name] = Number(field.value);
  }
  return chosen;
}

async function ask(question) {
  $("welcome").hidden = true;
  addMessage("user", question);
  scrollToEnd();
  const message = addMessage("assistant", "");
  const messages = [...chat.messages, { role: "user", content: question }];
  const controller = new AbortController();
  chat.controller = controller;
  showBusy();
  const answer = { text: "", reasoning: "", usage: null, reason: null, begin: performance.now() };
  const followed = follow(message.querySelector(".tag"), message.querySelector(".state"));
  try {
    const body = { ...options(), messages };
    await stream("v1/chat/completions", body, controller.signal, (event) => {
      followed.id = `${event.id}-0`;
      take(event, answer, message);
    });
    note(message, summaryOf(answer));
  } catch (error) {
    if (controller.signal.aborted) note(message, "Stopped.");
    else note(message, readable(error), true);
  }
  unfollow(followed, controller.signal.aborted ? "stopped" : "ended");
  if (chat.controller !== controller) return; // a new chat has begun meanwhile
  chat.controller = null;
  showBusy();
  if (answer.text) {
    chat.messages = [...messages, { role: "assistant", content: answer.text }];
  } else {
    message.querySelector(".text").hidden = true;
    if (!$("question").value) $("question").value = question; // it was not answered: try again
  }
}

function showBusy() {
  const isBusy = chat.controller !== null;
  $("log").setAttribute("aria-busy", isBusy); // a reader hears the answer when it is complete
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy && chat.many === null;
  $("ask-many").disabled = chat.many !== null;
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model: chat.model, ...body }),
    signal,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  return response;
}

const COUNTS = { include_usage: true, continuous_usage_stats: true }; // of tokens, in each event

async function stream(path, body, signal, onEvent) {
  const response = await post(path, { stream: true, stream_options: COUNTS, ...body }, signal);
  for await (const data of dataLines(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    onEvent(event);
  }
}

async function problemOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server says ${response.status} ${response.statusText}.`;
  }
}

// The data of server-sent events, one after another.
async function* dataLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

function take(event, answer, message) {
  const isAtEnd = atEnd();
  const numBefore = answer.usage?.completion_tokens;
  answer.usage = event.usage ?? answer.usage;
  const choice = event.choices?.[0];
  answer.reason = choice?.finish_reason ?? answer.reason;
  const { content, reasoning } = choice?.delta ?? {};
  if (content) {
    answer.text += content;
    message.querySelector(".text").append(piece(content, answer.usage?.completion_tokens - (numBefore ?? 0)));
  }
  if (reasoning) {
    answer.reasoning += reasoning;
    const folded = message.querySelector("details");
    folded.hidden = false;
    folded.querySelector("div").textContent = answer.reasoning;
  }
  if (isAtEnd) scrollToEnd();
}

// A step brings one token, unless guesses were right: then the text shows it.
function piece(content, numTokens) {
  const isGuessed = numTokens > 1 && live.frame?.accepted_guesses > 0;
  if (!isGuessed) return content;
  const several = element("span", "several", content);
  several.title = `${numTokens} tokens in one step`;
  return several;
}

function summaryOf(answer) {
  const parts = [];
  if (answer.usage) {
    const { completion_tokens: count, prompt_tokens: prompt, prompt_tokens_details: details } = answer.usage;
    const seconds = (performance.now() - answer.begin) / 1000;
    parts.push(plural(count, "token"), `${grouped.format(Math.round(count / seconds))} tokens/s`);
    parts.push(`${details?.cached_tokens ?? 0} of ${plural(prompt, "prompt token")} cached`);
  }
  if (answer.reason === "length") parts.push("ended by the limit of tokens");
  return parts.join(" \u00b7 ");
}

function note(message, text, isProblem = false) {
  const isAtEnd = atEnd();
  const line = message.querySelector(".note");
  line.textContent = text;
  line.classList.toggle("problem", isProblem);
  if (isAtEnd) scrollToEnd();
}

function readable(error) {
  if (error instanceof TypeError) return "The server cannot be reached.";
  return error.message;
}

async function nameModel() {
  if (location.protocol === "file:") {
    $("model").textContent = "no server";
    return;
  }
  try {
    const response = await fetch("v1/models");
    if (!response.ok) throw new Error(await problemOf(response));
    chat.model = (await response.json()).data[0].id;
    $("model").textContent = chat.model;
  } catch (error) {
    $("model").textContent = readable(error);
  }
}

function submitQuestion() {
  const question = $("question").value.trim();
  if (!question || chat.controller) return;
  $("question").value = "";
  $("options").open = false;
  ask(question);
}

function setUpChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submitQuestion();
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("stop").addEventListener("click", () => {
    stopAll();
    $("question").focus();
  });
  $("new-chat").addEventListener("click", startChat);
  $("ask-many").addEventListener("click", askMany);
  $("options").addEventListener("keydown", (event) => {
    if (event.key === "Escape") $("options").open = false;
  });
  for (const example of $("examples").querySelectorAll("button")) {
    example.addEventListener("click", () => {
      $("question").value = example.textContent;
      submitQuestion();
    });
  }
  nameModel();
}

// --- twenty questions at once ---

const BOOK = "phone book:\nAnna 4711\nOtto 0815\nMaya 9090\nTheo 7562\nwhat is the number of ";
const QUESTIONS = [
  "tell me a story about a shy fox",
  `${BOOK}Maya?`,
  "list all prime numbers within 100",
  `${BOOK}Otto?`,
  "tell me a story about a duck",
  "what is 347 + 285?",
  "count from 3 to 30",
  "tell me a story about a brave cat",
  "introduce yourself",
  "sort 52, 7, 98, 13, 71, 40",
  `${BOOK}Theo?`,
  "tell me a story about an old owl",
  "what is 502 - 178?",
  "list all prime numbers between 50 and 90",
  "count down from 20 to 1",
  "reverse the words: river stone apple cloud",
  `${BOOK}Anna?`,
  "tell me a story about a mouse",
  "is 91 a prime number?",
  "tell me a story about a clever horse",
];
const LONGEST_OF_MANY = 160; // tokens

// One call with twenty prompts: a browser has only six connections to a server.
async function askMany() {
  $("welcome").hidden = true;
  const box = element("article", "message many");
  const clear = element("button", "quiet", "Clear");
  clear.type = "button";
  const bar = element("div", "bar");
  bar.append(element("h3", "", `${QUESTIONS.length} questions`), clear);
  const list = element("ul");
  const rows = QUESTIONS.map((question) => addRow(list, question));
  box.append(bar, list, element("p", "note"));
  $("log").append(box);
  scrollToEnd();

  const controller = new AbortController();
  const { signal } = controller;
  clear.addEventListener("click", () => {
    controller.abort();
    box.remove();
    $("welcome").hidden = $("log").querySelector(".message") !== null;
  });
  chat.many = controller;
  showBusy();
  const begin = performance.now();
  try {
    const prompt = await Promise.all(QUESTIONS.map((question) => tokensOf(question, signal)));
    const body = { max_tokens: LONGEST_OF_MANY, ...options(), prompt };
    await stream("v1/completions", body, signal, (event) => takeForMany(event, rows));
    note(box, `${rows.length} answers in ${((performance.now() - begin) / 1000).toFixed(1)} s`);
  } catch (error) {
    if (signal.aborted) note(box, "Stopped.");
    else note(box, readable(error), true);
  }
  for (const { followed } of rows) unfollow(followed, signal.aborted ? "stopped" : "ended");
  if (chat.many !== controller) return;
  chat.many = null;
  showBusy();
}

function addRow(list, question) {
  const row = element("li");
  const folded = element("details");
  const line = element("summary");
  const tag = element("span", "tag");
  const state = element("span", "state", "sent");
  const begin = element("span", "begin");
  const text = element("div", "text");
  line.append(tag, element("span", "asked", question.split("\n").at(-1)), state, begin);
  folded.append(line, element("p", "asked", question), text);
  row.append(folded);
  list.append(row);
  return { begin, text, followed: follow(tag, state) };
}

// The tokens of a chat with one question.
async function tokensOf(question, signal) {
  const messages = [{ role: "user", content: question }];
  const response = await post("tokenize", { messages }, signal);
  return (await response.json()).tokens;
}

function takeForMany(event, rows) {
  rows.forEach(({ followed }, i) => {
    followed.id = `${event.id}-${i}`;
  });
  for (const choice of event.choices ?? []) {
    const { begin, text, followed } = rows[choice.index];
    text.textContent += choice.text;
    begin.textContent = text.textContent;
    if (choice.finish_reason) unfollow(followed, "ended");
  }
}

// --- where are my requests? ---

const mine = new Set(); // requests of this page that have not ended

function follow(tag, state) {
  const followed = { id: null, guess: null, tag, state, before: new Set(idsOf(live.frame)) };
  mine.add(followed);
  return followed;
}

function unfollow(followed, why) {
  if (!mine.delete(followed)) return;
  followed.state.textContent = why;
  followed.tag.classList.remove("idle");
}

// Those that have not ended, first those that run.
const idsOf = (frame) => (frame ? [...frame.running, ...frame.queue] : []);

function placeOf(id, frame) {
  if (frame.running.includes(id)) return "running";
  if (frame.preempted.includes(id)) return "preempted";
  if (frame.swapped.includes(id)) return "swapped out";
  const place = frame.queue.indexOf(id) + 1;
  return place ? `waiting, ${ordinal(place)}` : null;
}

// An answer says its id with its first token. Until then, the only chat that has come since then is
// the one that was asked here; if there are several, nothing is said.
function guessIds(frame) {
  for (const followed of mine) {
    if (followed.id || followed.guess) continue;
    const known = new Set([...mine].map(({ id, guess }) => id ?? guess));
    const isNew = (id) => id.startsWith("chatcmpl-") && !followed.before.has(id) && !known.has(id);
    const found = idsOf(frame).filter(isNew);
    if (found.length === 1) followed.guess = found[0];
  }
}

function showMine(frame) {
  guessIds(frame);
  for (const followed of mine) {
    const id = followed.id ?? followed.guess;
    const owner = owners.get(id);
    const place = owner && placeOf(id, frame);
    if (!place) continue;
    followed.tag.textContent = owner.letter;
    followed.tag.className = `tag owner-${owner.color} ${place === "running" ? "owned" : "owned idle"}`;
    followed.state.textContent = place;
  }
}

// --- who owns what: each request has a letter and a colour while it lives ---

const NUM_COLORS = 8;
const owners = new Map(); // id -> {letter, color}
let numNamed = 0;

function letterOf(n) {
  const letter = String.fromCharCode(65 + (n % 26));
  return n < 26 ? letter : letter + Math.floor(n / 26);
}

function nameOwners(frame, keepsOld) {
  const ids = new Set([...idsOf(frame), ...frame.ended]);
  if (!keepsOld) {
    for (const id of owners.keys()) if (!ids.has(id)) owners.delete(id);
  }
  const taken = new Set([...ids].map((id) => owners.get(id)?.color));
  for (const id of ids) {
    if (owners.has(id)) continue;
    let color = numNamed % NUM_COLORS;
    for (let i = 0; i < NUM_COLORS && taken.has(color); i++) color = (color + 1) % NUM_COLORS;
    taken.add(color);
    owners.set(id, { letter: letterOf(numNamed), color });
    numNamed += 1;
  }
}

function forgetOwners() {
  owners.clear();
  numNamed = 0;
}

// --- the picture: frames tell what has changed in it ---

const EMPTY = { kind: "empty" };
const CACHED = { kind: "cached" };
const picture = { tables: new Map(), hostTables: new Map(), cached: [] };

function forgetPicture() {
  picture.tables.clear();
  picture.hostTables.clear();
  picture.cached = [];
  kv.forget();
  host.forget();
}

function readFrame(frame) {
  if (frame.is_whole) {
    picture.tables.clear();
    picture.hostTables.clear();
  }
  readTables(picture.tables, frame.tables);
  readTables(picture.hostTables, frame.host_tables);
  if (picture.cached.length !== frame.kv_blocks) picture.cached = new Array(frame.kv_blocks).fill(false);
  const [begin, bits] = frame.cached;
  for (let i = 0; i < bits.length; i++) picture.cached[begin + i] = bits[i] === "1";
}

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
  constructor(id, noun, height) {
    this.box = $(id);
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
      const owner = owners.get(block.id);
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
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "accent", "ground", "line", "hatch"];
    for (let i = 0; i < NUM_COLORS; i++) names.push(`owner-${i}`);
    const colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
    const context = this.canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.blocks.forEach((block, i) => this.drawBlock(context, colors, block, i));
  }

  drawBlock(context, colors, block, i) {
    const inner = this.size - (this.size > 4 ? 1 : 0.5);
    const x = (i % this.columns) * this.size;
    const y = Math.floor(i / this.columns) * this.size;
    const names = { empty: "line", cached: "hatch" };
    context.fillStyle = colors[names[block.kind] ?? `owner-${owners.get(block.id).color}`];
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
    const words = $("words");
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
      what = `request ${owners.get(block.id).letter} (${block.id}), ${sharing}`;
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

const view = { frame: null };
const kv = new Grid("blocks", "Block", 260);
const host = new Grid("host-blocks", "Host block", 100);
host.most = FEW;
host.larger = kv;
host.isFromEnd = true;

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

function showBlocks(frame) {
  const free = picture.cached.map((isCached) => (isCached ? CACHED : EMPTY));
  kv.show(blocksOf(picture.tables, free), marksOf(frame.moves));
  $("size").textContent = kv.sizeInWords(frame);
  $("host").hidden = !frame.host_blocks;
  if (frame.host_blocks) {
    const all = new Array(frame.host_blocks).fill(EMPTY);
    host.show(blocksOf(picture.hostTables, all), hostMarksOf(frame.moves));
    $("host-size").textContent = host.sizeInWords(frame);
  } else host.forget();
  showHint(frame);
}

function showHint(frame) {
  $("hint").hidden = mode() !== "live" || frame.kv_blocks <= MOST_CELLS;
  const command = element("code", "", "nanovllm serve --show");
  $("hint").replaceChildren(`${plural(frame.kv_blocks, "block")}: start the server with `, command, " to see them fill up.");
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

function showRequests(frame) {
  const counts = countsOf(frame);
  for (const [state, count] of Object.entries(counts)) $(`num-${state}`).textContent = grouped.format(count);
  const states = new Map(frame.queue.map((id) => [id, "waiting"]));
  for (const state of ["running", "preempted", "swapped"]) {
    for (const id of frame[state]) states.set(id, state);
  }
  const longest = Math.max(32, ...frame.requests.map((request) => request.prompt + request.output));
  const scale = 2 ** Math.ceil(Math.log2(longest)); // so that bars do not change their scale in each step
  $("scale").textContent = grouped.format(scale);
  const parts = QUEUES.map(([title, ofQueue]) => {
    const rows = frame.requests.filter((request) => ofQueue.includes(states.get(request.id)));
    const count = ofQueue.reduce((sum, state) => sum + counts[state], 0);
    return queue(title, rows.map((request) => row(request, states.get(request.id), scale)), count);
  });
  const letters = frame.ended.map((id) => owners.get(id).letter);
  parts.push(element("p", "more", letters.length ? `Ended just now: ${letters.join(", ")}` : ""));
  $("queues").replaceChildren(...parts);
}

function queue(title, rows, count) {
  const box = element("div", title.toLowerCase());
  const heading = element("h4", "", title);
  heading.append(element("small", "", grouped.format(count)));
  box.append(heading, ...rows);
  const rest = count - rows.length;
  if (rest > 0) box.append(element("p", "more", `and ${grouped.format(rest)} more`));
  return box;
}

function row(request, state, scale) {
  const { letter, color } = owners.get(request.id);
  const made = element("div", `request owner-${color}`);
  const bar = element("div", "middle");
  const prompt = player.run?.prompts?.[request.id];
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
  made.title = wordsOfRequest(request);
  made.append(element("span", state === "running" ? "tag owned" : "tag owned idle", letter), bar, count);
  made.append(element("span", "unseen", made.title));
  return made;
}

function wordsOfRequest(request) {
  const parts = [plural(request.prompt, "prompt token"), plural(request.output, "output token")];
  parts.push(`${grouped.format(request.computed)} computed`);
  if (request.sequences > 1) parts.push(plural(request.sequences, "sequence"));
  const prompt = player.run?.prompts?.[request.id];
  return `${request.id}: ${parts.join(", ")}${prompt ? `\n${prompt}` : ""}`;
}

// --- numbers and charts ---

const SECONDS = 60;
const live = { source: null, points: [], speed: 0, frame: null };

function showNumbers(frame, speed) {
  const number = (id, value, unit) => {
    $(id).textContent = value;
    if (unit) $(id).append(" ", element("small", "", unit));
  };
  const percent = (100 * frame.kv_blocks_used) / frame.kv_blocks;
  number("speed", speed === null ? "\u2013" : grouped.format(Math.round(speed)));
  number("use", `${percent.toFixed(percent > 0 && percent < 1 ? 1 : 0)}%`, `${grouped.format(frame.kv_blocks_used)} blocks`);
  number("hits", grouped.format(frame.prefix_cache_hit_tokens), `of ${plural(frame.prompt_tokens, "token")}`);
  $("guessed").hidden = frame.guesses === undefined; // an engine that does not guess
  if (!$("guessed").hidden) number("guesses", grouped.format(frame.accepted_guesses), `of ${grouped.format(frame.guesses)}`);
  number("preemptions", grouped.format(frame.preemptions));
  number("step", grouped.format(frame.step));
}

// Steps and slopes alike: a curve through `values`, from the left edge to the right one.
function drawChart(id, values, top, position = null) {
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
  $(id).replaceChildren(...parts);
}

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

// `marks` are those of the time axis: at its begin, in the middle, at its end.
function nameCharts(speed, use, top, marks) {
  for (const axis of document.querySelectorAll(".axis")) {
    marks.forEach((mark, i) => (axis.children[i].textContent = mark));
  }
  $("speed-title").textContent = speed;
  $("use-title").textContent = use;
  $("speed-top").textContent = grouped.format(top);
}

// How many tokens there were at a time, between the frames that say it.
function tokensAt(time) {
  const { points } = live;
  const after = points.findIndex((point) => point.time > time);
  if (after < 0) return points.at(-1).tokens;
  if (after === 0) return points[0].tokens;
  const [a, b] = [points[after - 1], points[after]];
  return a.tokens + ((b.tokens - a.tokens) * (time - a.time)) / (b.time - a.time);
}

function useAt(time) {
  return live.points.findLast((point) => point.time <= time)?.use ?? 0;
}

function showLastMinute() {
  if (!live.points.length || mode() !== "live") return;
  const now = performance.now() / 1000;
  while (live.points.length > 1 && live.points[1].time < now - SECONDS - 2) live.points.shift();
  const times = Array.from({ length: SECONDS + 1 }, (_, i) => now - SECONDS + i);
  const tokens = [tokensAt(times[0] - 1), ...times.map(tokensAt)];
  const speeds = times.map((_, i) => tokens[i + 1] - tokens[i]);
  const top = roundUp(Math.max(10, ...speeds));
  nameCharts("Output tokens per second, last minute", "Cache in use, last minute", top, ["60 s ago", "30 s", "now"]);
  drawChart("speed-chart", speeds, top);
  drawChart("use-chart", times.map(useAt), 1);
  live.speed = speeds.at(-1);
  showNumbers(view.frame, live.speed);
}

// --- a frame, from wherever it comes ---

function show(frame) {
  view.frame = frame;
  readFrame(frame);
  showBlocks(frame);
  showRequests(frame);
}

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

function say(text, isGood = false) {
  $("connection").textContent = text;
  $("connection").classList.toggle("good", isGood);
}

// --- live ---

function connect() {
  if (live.source || document.hidden) return;
  forgetOwners();
  forgetPicture();
  live.points = [];
  say("Connecting");
  const source = new EventSource("live");
  live.source = source;
  source.onopen = () => say("Connected", true);
  source.onmessage = (event) => receive(JSON.parse(event.data));
  source.onerror = () => {
    if (source.readyState !== EventSource.CLOSED) {
      say("Connection lost, trying again");
      return;
    }
    disconnect();
    playInstead("This server has no live view");
  };
}

// Nobody watches: the engine need not make pictures.
function disconnect() {
  live.source?.close();
  live.source = null;
}

function receive(frame) {
  nameOwners(frame, false);
  const use = frame.kv_blocks_used / frame.kv_blocks;
  const time = performance.now() / 1000;
  // a server that was started again counts from the beginning
  if (frame.output_tokens < (live.points.at(-1)?.tokens ?? 0)) live.points = [];
  live.points.push({ time, tokens: frame.output_tokens, use });
  live.frame = frame;
  show(frame);
  showMine(frame);
  showNumbers(frame, live.speed);
  if (live.points.length === 1) showLastMinute();
}

// --- recorded ---

const STEP_MILLISECONDS = 250;
const player = { run: null, i: 0, timer: null, speeds: [], uses: [], note: "" };

function playInstead(why) {
  player.note = why;
  document.querySelector("input[value=recorded]").checked = true;
  changeMode();
}

async function listRuns() {
  if ($("run").options.length) return loadRun($("run").value);
  if (location.protocol === "file:") {
    explain("A page that was opened as a file may not read others: open one of the files in its folder \u201cruns\u201d.");
    $("run").hidden = true;
    $("controls").hidden = true;
    $("file").parentElement.classList.replace("quiet", "main");
    return;
  }
  try {
    const runs = await (await fetch("runs/index.json")).json();
    for (const { file, title } of runs) $("run").append(new Option(title, file));
    await loadRun(runs[0].file);
  } catch {
    explain("The recorded runs cannot be read from this server. You can open a file.", true);
  }
}

async function loadRun(file) {
  if (!file) return;
  try {
    openRun(await (await fetch(`runs/${file}`)).json());
  } catch (error) {
    explain(readable(error), true);
  }
}

async function openFile(file) {
  if (!file) return;
  try {
    openRun(JSON.parse(await file.text()));
  } catch (error) {
    const why = error instanceof SyntaxError ? "it is not JSON" : error.message;
    explain(`${file.name} is not a recorded run: ${why}.`, true);
    return;
  }
  $("run").hidden = false;
  $("run").prepend(new Option(player.run.title || file.name, ""));
  $("run").selectedIndex = 0;
}

function openRun(run) {
  if (!Array.isArray(run.frames) || !run.frames.length) throw new Error("it has no frames");
  if (!run.frames[0].tables) throw new Error("another version has recorded it");
  pause();
  forgetOwners();
  for (const frame of run.frames) nameOwners(frame, true);
  player.run = run;
  let before = 0;
  player.speeds = run.frames.map((frame) => {
    const tokens = frame.output_tokens - before;
    before = frame.output_tokens;
    return tokens;
  });
  player.uses = run.frames.map((frame) => frame.kv_blocks_used / frame.kv_blocks);
  forgetPicture();
  $("controls").hidden = false;
  $("slider").max = run.frames.length - 1;
  explain(run.explanation ?? "");
  goTo(0);
}

function explain(text, isProblem = false) {
  $("explanation").textContent = text;
  $("explanation").classList.toggle("problem", isProblem);
}

function goTo(i) {
  const { run } = player;
  if (!run) return;
  player.i = Math.min(run.frames.length - 1, Math.max(0, i));
  const frame = run.frames[player.i];
  const top = roundUp(Math.max(2, ...player.speeds));
  const count = run.frames.length;
  const position = `step ${player.i + 1} of ${count}`;
  const marks = ["step 1", Math.ceil(count / 2), count];
  $("slider").value = player.i;
  $("slider").setAttribute("aria-valuetext", position);
  $("position").textContent = position;
  show(frame);
  showNumbers(frame, frame.output_tokens_per_second);
  nameCharts("Output tokens in each step", "Cache in use in each step", top, marks);
  drawChart("speed-chart", player.speeds, top, player.i);
  drawChart("use-chart", player.uses, 1, player.i);
}

function play() {
  if (!player.run) return;
  if (player.i === player.run.frames.length - 1) goTo(0);
  player.timer = setInterval(() => {
    goTo(player.i + 1);
    if (player.i === player.run.frames.length - 1) pause();
  }, STEP_MILLISECONDS);
  $("play").textContent = "Pause";
}

function pause() {
  clearInterval(player.timer);
  player.timer = null;
  $("play").textContent = "Play";
}

function step(by) {
  pause();
  goTo(player.i + by);
}

function changeMode() {
  const isLive = mode() === "live";
  $("player").hidden = isLive;
  if (isLive) {
    pause();
    player.run = null;
    connect();
  } else {
    disconnect();
    say(player.note || "Playing a recorded run");
    player.note = "";
    listRuns();
  }
}

// The arrow keys step, and space plays, unless what has the focus uses them itself.
function onKey(event) {
  if (mode() !== "recorded" || event.altKey || event.ctrlKey || event.metaKey) return;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by && !event.target.closest("input, textarea, select, .grid, #log")) {
    event.preventDefault();
    step(by);
  }
  if (event.key === " " && !event.target.closest("input:not([type=range]), textarea, select, button, summary, a, #log")) {
    event.preventDefault();
    playOrPause();
  }
}

function playOrPause() {
  if (player.timer) pause();
  else play();
}

function setUpView() {
  for (const choice of document.querySelectorAll("input[name=mode]")) {
    choice.addEventListener("change", changeMode);
  }
  $("play").addEventListener("click", playOrPause);
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  $("slider").addEventListener("input", () => {
    pause();
    goTo(Number($("slider").value));
  });
  $("run").addEventListener("change", () => loadRun($("run").value));
  $("file").addEventListener("change", () => openFile($("file").files[0]));
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => {
    if (mode() !== "live") return;
    if (document.hidden) disconnect();
    else connect();
  });
  kv.say();
  setInterval(showLastMinute, 500);
  if (location.protocol === "file:") playInstead("No server: the page was opened as a file");
  else connect();
}

setUpChat();
setUpView();
