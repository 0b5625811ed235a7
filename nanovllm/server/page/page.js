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

// --- chat ---

const chat = { messages: [], controller: null };

function startChat() {
  chat.controller?.abort();
  chat.controller = null;
  chat.messages = [];
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("question").focus();
}

function addMessage(role, text) {
  const isAtEnd = atEnd();
  const message = element("article", `message ${role}`);
  const reasoning = element("details");
  reasoning.hidden = true;
  reasoning.append(element("summary", "", "Reasoning"), element("div"));
  message.append(element("h3", "", role === "user" ? "You" : "Answer"), reasoning);
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
  setBusy(true);
  const answer = { text: "", reasoning: "", usage: null, reason: null, begin: performance.now() };
  try {
    await stream({ ...options(), messages }, controller.signal, (event) => take(event, answer, message));
    note(message, summaryOf(answer));
  } catch (error) {
    if (controller.signal.aborted) note(message, "Stopped.");
    else note(message, readable(error), true);
  }
  if (chat.controller !== controller) return; // a new chat has begun meanwhile
  chat.controller = null;
  setBusy(false);
  if (answer.text) {
    chat.messages = [...messages, { role: "assistant", content: answer.text }];
  } else {
    message.querySelector(".text").hidden = true;
    if (!$("question").value) $("question").value = question; // it was not answered: try again
  }
}

function setBusy(isBusy) {
  $("log").setAttribute("aria-busy", isBusy); // a reader hears the answer when it is complete
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
}

async function stream(body, signal, onEvent) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model: chat.model,
      stream: true,
      stream_options: { include_usage: true },
      ...body,
    }),
    signal,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  for await (const data of dataLines(response.body)) {
    if (data === "[DONE]") return;
    onEvent(JSON.parse(data));
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
  if (event.error) throw new Error(event.error.message);
  const isAtEnd = atEnd();
  answer.usage = event.usage ?? answer.usage;
  const choice = event.choices?.[0];
  answer.reason = choice?.finish_reason ?? answer.reason;
  const { content, reasoning } = choice?.delta ?? {};
  if (content) {
    answer.text += content;
    message.querySelector(".text").textContent = answer.text;
  }
  if (reasoning) {
    answer.reasoning += reasoning;
    const folded = message.querySelector("details");
    folded.hidden = false;
    folded.querySelector("div").textContent = answer.reasoning;
  }
  if (isAtEnd) scrollToEnd();
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
    chat.controller?.abort();
    $("question").focus();
  });
  $("new-chat").addEventListener("click", () => {
    startChat();
    setBusy(false);
  });
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

// --- who owns what: each request has a letter and a colour while it lives ---

const NUM_COLORS = 8;
const owners = new Map(); // id -> {letter, color}
let numNamed = 0;

function letterOf(n) {
  const letter = String.fromCharCode(65 + (n % 26));
  return n < 26 ? letter : letter + Math.floor(n / 26);
}

function nameOwners(frame, keepsOld) {
  const ids = new Set(frame.requests.map((request) => request.id));
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

// --- the blocks ---

const MOST_CELLS = 2000; // as elements; more are drawn on a canvas
const view = { frame: null, cells: [], blocks: [], marks: new Map(), columns: 1, size: 0, cursor: -1 };

// Of a large cache only the part that has ever been used: the rest is empty.
function numShown(frame) {
  if (frame.kv_blocks <= MOST_CELLS) return frame.kv_blocks;
  const last = frame.blocks.at(-1);
  const used = frame.kv_blocks - (last[1] === "empty" ? last[0] : 0);
  let shown = Math.max(256, view.blocks.length);
  while (shown < used) shown *= 2;
  return Math.min(shown, frame.kv_blocks);
}

function expand(frame, count) {
  const blocks = [];
  for (const run of frame.blocks) {
    for (let i = 0; i < run[0] && blocks.length < count; i++) blocks.push(run);
  }
  return blocks;
}

// What has happened to a block just now, in words.
function marksOf(moves) {
  const marks = new Map();
  for (const [block] of moves.out) marks.set(block, { text: "what it held went to the host's memory just now" });
  for (const [, block] of moves.in) marks.set(block, { text: "swapped in just now", isNew: true });
  for (const [from, to] of moves.copies) marks.set(to, { text: `copied from block ${from} just now`, isNew: true });
  return marks;
}

function showBlocks(frame) {
  const count = numShown(frame);
  const isNewSize = count !== view.blocks.length;
  view.blocks = expand(frame, count);
  view.marks = marksOf(frame.moves);
  const hidden = frame.kv_blocks - count;
  const rest = hidden ? `, and ${grouped.format(hidden)} more that are empty` : "";
  $("size").textContent = `${plural(count, "block")} of ${plural(frame.block_size, "token")}${rest}`;
  if (isNewSize) layOut();
  if (view.canvas) drawCanvas();
  else view.cells.forEach(showCell);
  if (view.cursor >= 0) sayBlock(view.cursor);
}

function layOut() {
  const count = view.blocks.length;
  const width = $("blocks").clientWidth;
  if (!width) return;
  const isCanvas = count > MOST_CELLS;
  const sizes = isCanvas ? [12, 10, 8, 6, 5, 4, 3] : [48, 40, 32, 26, 20, 14, 10];
  view.size = sizes.find((size) => Math.ceil(count / Math.floor(width / size)) * size <= 320) ?? sizes.at(-1);
  view.columns = Math.min(Math.floor(width / view.size), Math.max(count, 1));
  $("blocks").classList.toggle("small", view.size < 26);
  if (isCanvas) layOutCanvas(width, count);
  else layOutCells(count);
}

function layOutCells(count) {
  view.canvas = null;
  const columns = Math.floor($("blocks").clientWidth / view.size);
  $("blocks").style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  if (view.cells.length === count) return;
  view.cells = Array.from({ length: count }, () => element("div", "cell"));
  $("blocks").replaceChildren(...view.cells);
}

function layOutCanvas(width, count) {
  const height = Math.ceil(count / view.columns) * view.size;
  view.cells = [];
  view.canvas = element("canvas");
  view.canvas.width = width * devicePixelRatio;
  view.canvas.height = height * devicePixelRatio;
  view.canvas.style.width = `${width}px`;
  view.canvas.style.height = `${height}px`;
  $("blocks").style.gridTemplateColumns = "none";
  $("blocks").replaceChildren(view.canvas);
}

function ownerOf(run) {
  return owners.get(view.frame.requests[run[1]].id);
}

function showCell(cell, i) {
  const run = view.blocks[i];
  const classes = ["cell"];
  let letter = "";
  if (run[1] === "cached") classes.push("cached");
  else if (run[1] !== "empty") {
    const owner = ownerOf(run);
    letter = owner.letter;
    classes.push("owned", `owner-${owner.color}`);
    if (run[2] > 1) classes.push("shared");
  }
  if (view.marks.get(i)?.isNew) classes.push("moved");
  if (i === view.cursor) classes.push("cursor");
  const className = classes.join(" ");
  if (cell.className !== className) cell.className = className;
  if (cell.textContent !== letter) cell.textContent = letter;
}

function drawCanvas() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "accent", "ground", "line", "hatch"];
  for (let i = 0; i < NUM_COLORS; i++) names.push(`owner-${i}`);
  const colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
  const context = view.canvas.getContext("2d");
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.clearRect(0, 0, view.canvas.width, view.canvas.height);
  view.blocks.forEach((run, i) => drawBlock(context, colors, run, i));
}

function drawBlock(context, colors, run, i) {
  const inner = view.size - (view.size > 4 ? 1 : 0.5);
  const x = (i % view.columns) * view.size;
  const y = Math.floor(i / view.columns) * view.size;
  const names = { empty: "line", cached: "hatch" };
  context.fillStyle = colors[names[run[1]] ?? `owner-${ownerOf(run).color}`];
  context.fillRect(x, y, inner, inner);
  if (run[2] > 1) {
    context.fillStyle = colors.ground;
    context.fillRect(x + inner / 3, y + inner / 3, inner / 3, inner / 3);
  }
  if (i === view.cursor || view.marks.get(i)?.isNew) {
    context.strokeStyle = i === view.cursor ? colors.ink : colors.accent;
    context.strokeRect(x - 0.5, y - 0.5, inner + 1, inner + 1);
  }
}

function sayBlock(i) {
  const words = $("words");
  const text = i < 0 ? "Point at a block, or move there with the arrow keys, to read what it is." : wordsOf(i);
  if (words.textContent !== text) words.textContent = text;
}

function wordsOf(i) {
  const run = view.blocks[i];
  const mark = view.marks.get(i);
  let what = "free and empty";
  if (run[1] === "cached") what = "free, but what it holds can still be found by its prefix";
  else if (run[1] !== "empty") {
    const { id } = view.frame.requests[run[1]];
    const sharing = run[2] > 1 ? `shared by ${run[2]} sequences` : "of one sequence";
    what = `request ${ownerOf(run).letter} (${id}), ${sharing}`;
  }
  return `Block ${i}: ${what}${mark ? `; ${mark.text}` : ""}.`;
}

function moveCursor(i) {
  view.cursor = i < view.blocks.length ? i : -1;
  if (view.canvas && view.frame) drawCanvas();
  else view.cells.forEach((cell, j) => cell.classList.toggle("cursor", j === i));
  sayBlock(view.cursor);
}

function blockAt(event) {
  if (!view.canvas) return view.cells.indexOf(event.target);
  const box = view.canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / view.size);
  const row = Math.floor((event.clientY - box.top) / view.size);
  const i = row * view.columns + column;
  return column < view.columns && i < view.blocks.length ? i : -1;
}

function onBlocksKey(event) {
  const columns = view.canvas ? view.columns : Math.floor($("blocks").clientWidth / view.size);
  const last = view.blocks.length - 1;
  const jumps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -last, End: last };
  if (!(event.key in jumps)) return;
  event.preventDefault();
  moveCursor(Math.min(last, Math.max(0, view.cursor + jumps[event.key])));
}

function setUpBlocks() {
  const blocks = $("blocks");
  blocks.addEventListener("pointermove", (event) => moveCursor(blockAt(event)));
  blocks.addEventListener("pointerleave", () => moveCursor(-1));
  blocks.addEventListener("focus", () => view.cursor < 0 && view.blocks.length && moveCursor(0));
  blocks.addEventListener("blur", () => moveCursor(-1));
  blocks.addEventListener("keydown", onBlocksKey);
  const redraw = () => {
    if (!view.frame) return;
    layOut();
    showBlocks(view.frame);
  };
  new ResizeObserver(redraw).observe(blocks);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  sayBlock(-1);
}

// --- the requests ---

const MOST_ROWS = 20; // in each queue
const QUEUES = [
  ["Running", ["running"]],
  ["Preempted", ["preempted", "swapped"]],
  ["Waiting", ["waiting"]],
];

function showRequests(frame) {
  const longest = Math.max(32, ...frame.requests.map((request) => request.prompt + request.output));
  const scale = 2 ** Math.ceil(Math.log2(longest)); // so that bars do not change their scale in each step
  const parts = QUEUES.map(([title, states]) => {
    const requests = frame.requests.filter((request) => states.includes(request.state));
    return queue(title, requests, scale);
  });
  const ended = frame.requests.filter((request) => request.state === "ended");
  const letters = ended.map((request) => owners.get(request.id).letter);
  parts.push(element("p", "more", letters.length ? `Ended just now: ${letters.join(", ")}` : ""));
  $("queues").replaceChildren(...parts);
}

function queue(title, requests, scale) {
  const box = element("div");
  const heading = element("h3", "", title);
  heading.append(element("small", "", requests.length));
  box.append(heading, ...requests.slice(0, MOST_ROWS).map((request) => row(request, scale)));
  const rest = requests.length - MOST_ROWS;
  if (rest > 0) box.append(element("p", "more", `and ${grouped.format(rest)} more`));
  return box;
}

function row(request, scale) {
  const { letter, color } = owners.get(request.id);
  const made = element("div", `request owner-${color}`);
  const track = element("div", "track");
  const all = request.prompt + request.output;
  for (const [name, tokens] of [["all", all], ["done", request.computed], ["prompt", request.prompt]]) {
    const part = element("div", name);
    part.style.width = `${(100 * tokens) / scale}%`;
    track.append(part);
  }
  const prefix = request.state === "swapped" ? "on host, " : request.sequences > 1 ? `${request.sequences} \u00d7, ` : "";
  const count = element("span", "count", `${prefix}${request.prompt} + ${request.output}`);
  made.title = wordsOfRequest(request);
  made.append(element("span", request.state === "running" ? "tag owned" : "tag idle", letter), track, count);
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
const live = { source: null, points: [], speed: 0 };

function showNumbers(frame, speed) {
  const number = (id, value, unit) => {
    $(id).textContent = value;
    if (unit) $(id).append(element("small", "", unit));
  };
  const percent = (100 * frame.kv_blocks_used) / frame.kv_blocks;
  number("speed", speed === null ? "\u2013" : grouped.format(Math.round(speed)));
  number("use", `${percent.toFixed(percent > 0 && percent < 1 ? 1 : 0)}%`, `${grouped.format(frame.kv_blocks_used)} blocks`);
  number("hits", grouped.format(frame.prefix_cache_hit_tokens), `of ${grouped.format(frame.prompt_tokens)}`);
  const onHost = frame.host_blocks_used ? `${frame.host_blocks_used} on host` : "";
  number("preemptions", grouped.format(frame.preemptions), onHost);
  number("step", grouped.format(frame.step));
}

// Steps and slopes alike: a curve through `values`, from the left edge to the right one.
function drawChart(id, values, top, position = null) {
  const parts = [];
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

function nameCharts(speed, use, top) {
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
  nameCharts("Output tokens per second, last minute", "Cache in use, last minute", top);
  drawChart("speed-chart", speeds, top);
  drawChart("use-chart", times.map(useAt), 1);
  live.speed = speeds.at(-1);
  showNumbers(view.frame, live.speed);
}

// --- a frame, from wherever it comes ---

function show(frame) {
  view.frame = frame;
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
  show(frame);
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
  view.blocks = [];
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
  const position = `step ${player.i + 1} of ${run.frames.length}`;
  $("slider").value = player.i;
  $("slider").setAttribute("aria-valuetext", position);
  $("position").textContent = position;
  show(frame);
  showNumbers(frame, frame.output_tokens_per_second);
  nameCharts("Output tokens in each step", "Cache in use in each step", top);
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
  view.blocks = [];
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

// The arrow keys step, unless what has the focus uses them itself.
function onKey(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const usesArrows = event.target.closest("input, textarea, select, #blocks, #log");
  if (!by || usesArrows || mode() !== "recorded" || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  step(by);
}

function setUpView() {
  for (const choice of document.querySelectorAll("input[name=mode]")) {
    choice.addEventListener("change", changeMode);
  }
  $("play").addEventListener("click", () => (player.timer ? pause() : play()));
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
  setUpBlocks();
  setInterval(showLastMinute, 500);
  if (location.protocol === "file:") playInstead("No server: the page was opened as a file");
  else connect();
}

setUpChat();
setUpView();
