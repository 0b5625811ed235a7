// The page of the server: a chat, and a view of the engine that answers it (player.js). No library, no build.
"use strict";

const $ = (id) => document.getElementById(id);

const ORDINALS = { one: "st", two: "nd", few: "rd", other: "th" };
const ordinalRules = new Intl.PluralRules("en-US", { type: "ordinal" });
const ordinal = (n) => `${grouped.format(n)}${ORDINALS[ordinalRules.select(n)]}`;

// --- what this tab keeps until it is closed; a browser may refuse ---

function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(`nanovllm.${name}`));
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    sessionStorage.setItem(`nanovllm.${name}`, JSON.stringify(value));
  } catch {
    // the page works without
  }
}

// --- requests to the server ---

const server = { key: kept("key") };

class Refusal extends Error {}

// As `fetch`, with the API key. Raises a Refusal if the server refuses, with its sentence.
async function request(path, options = {}) {
  const headers = { ...options.headers };
  // a header has bytes
  if (server.key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(server.key))}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const refusal = new Refusal(await problemOf(response));
  refusal.status = response.status;
  if (response.status === 401) askForKey();
  throw refusal;
}

function askForKey() {
  $("key-problem").textContent = server.key ? "The server refuses this key." : "";
  if ($("key-form").hidden) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

function useKey() {
  server.key = $("key").value.trim();
  keep("key", server.key);
  $("key").value = $("key-problem").textContent = "";
  $("key-form").hidden = true;
  nameModel();
  if (mode() === "live") {
    disconnect();
    connect();
  }
  $("question").focus();
}

// --- chat ---

// what ends the answer, and the twenty; what was noted below each message
const chat = { messages: [], notes: [], controller: null, many: null, pending: null };

function startChat() {
  stopAll();
  chat.controller = null;
  chat.many = null;
  remember([], []);
  showBusy();
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("question").focus();
}

function remember(messages, notes) {
  chat.messages = messages;
  chat.notes = notes;
  chat.pending = null;
  keep("chat", { messages, notes });
}

// The conversation of this tab before it was loaded again.
function restoreChat() {
  const { messages = [], notes = [] } = kept("chat") ?? {};
  if (!messages.length) return;
  chat.messages = messages;
  chat.notes = notes;
  $("welcome").hidden = true;
  messages.forEach(({ role, content }, i) => {
    const message = addMessage(role, content);
    if (notes[i]) note(message, notes[i]);
  });
  scrollToEnd();
}

// An answer that is not complete when the page is left.
function keepPending() {
  const { messages, answer } = chat.pending ?? {};
  if (!answer?.text) return;
  chat.controller = null; // what happens from now on is no end of the answer
  const notes = [...chat.notes, "", "The page was left before the end of the answer."];
  keep("chat", { messages: [...messages, { role: "assistant", content: answer.text }], notes });
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
  const heading = element("h3");
  heading.append(element("span", "who", role === "user" ? "You" : "Answer"));
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
  const answer = { text: "", reasoning: "", usage: null, reason: null, begin: performance.now(), first: null };
  chat.pending = { messages, answer };
  const followed = follow(message.querySelector(".tag"), message.querySelector(".state"));
  let why = "ended";
  try {
    const body = { ...options(), messages };
    await stream("v1/chat/completions", body, controller.signal, (event) => {
      followed.id = `${event.id}-0`;
      take(event, answer, message);
    });
    note(message, summaryOf(answer));
  } catch (error) {
    why = controller.signal.aborted ? "stopped" : "failed";
    if (why === "stopped") note(message, "Stopped.");
    else note(message, readable(error), true);
    if (!answer.text && why === "failed") {
      message.querySelector(".who").textContent = error instanceof Refusal ? "Refused" : "No answer";
      why = "";
    }
  }
  unfollow(followed, why);
  if (chat.controller !== controller) return; // a new chat has begun meanwhile
  chat.controller = null;
  showBusy();
  if (answer.text) {
    const notes = [...chat.notes, "", message.querySelector(".note").textContent];
    remember([...messages, { role: "assistant", content: answer.text }], notes);
  } else {
    chat.pending = null;
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
  $("question").setCustomValidity(isBusy ? "An answer is on its way. Escape stops it." : ""); // shown by Enter
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify({ model: chat.model, ...body }), signal });
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
async function* dataLines(body, onRead = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    onRead();
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
  if (content || reasoning) answer.first ??= { time: performance.now(), tokens: answer.usage?.completion_tokens ?? 1 };
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

// A step brings one token, unless draft tokens were accepted: then the text shows it.
function piece(content, numTokens) {
  const isGuessed = numTokens > 1 && live.frame?.accepted_draft_tokens > 0;
  if (!isGuessed) return content;
  const several = element("span", "several", content);
  several.title = `${numTokens} tokens in one step`;
  return several;
}

// The wait in the queue is in the time to the first token, and not in the speed after it.
function summaryOf(answer) {
  const parts = [];
  if (answer.usage) {
    const { completion_tokens: count, prompt_tokens: prompt, prompt_tokens_details: details } = answer.usage;
    const { time, tokens } = answer.first ?? { time: performance.now(), tokens: count };
    const seconds = Math.max(0.001, (performance.now() - time) / 1000);
    parts.push(plural(count, "token"), `the first after ${((time - answer.begin) / 1000).toFixed(2)} s`);
    if (count > tokens) parts.push(`then ${grouped.format(Math.round((count - tokens) / seconds))} tokens/s`);
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
    chat.model = (await (await request("v1/models")).json()).data[0].id;
    $("model").textContent = chat.model;
  } catch (error) {
    $("model").textContent = error.status === 401 ? "needs an API key" : readable(error);
  }
}

function submitQuestion() {
  const question = $("question").value.trim();
  if (!question || chat.controller) return;
  $("question").value = "";
  $("options").open = false;
  $("question").focus(); // the button that was pressed is hidden now
  ask(question);
}

function setUpChat() {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey();
  });
  addEventListener("pagehide", keepPending);
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submitQuestion();
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chat.controller) stopAll();
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
  restoreChat();
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
  let why = "ended";
  try {
    const prompt = await Promise.all(QUESTIONS.map((question) => tokensOf(question, signal)));
    const body = { max_tokens: LONGEST_OF_MANY, ...options(), prompt };
    await stream("v1/completions", body, signal, (event) => takeForMany(event, rows));
    note(box, `${rows.length} answers in ${((performance.now() - begin) / 1000).toFixed(1)} s`);
  } catch (error) {
    if (signal.aborted) note(box, "Stopped.");
    else note(box, readable(error), true);
    why = signal.aborted ? "stopped" : error instanceof Refusal ? "refused" : "failed";
  }
  for (const { followed } of rows) unfollow(followed, why);
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
    const owner = view.owners.get(id);
    const place = owner && placeOf(id, frame);
    if (!place) continue;
    followed.tag.textContent = owner.letter;
    followed.tag.className = `tag owner-${owner.color} ${place === "running" ? "owned" : "owned idle"}`;
    followed.state.textContent = place;
  }
}

// --- the view of the engine ---

const view = $("view"); // see player.js

function showHint(frame) {
  $("hint").hidden = mode() !== "live" || frame.kv_blocks <= MOST_CELLS;
  const command = element("code", "", "nanovllm serve --show");
  $("hint").replaceChildren(`${plural(frame.kv_blocks, "block")}: start the server with `, command, " to see them fill up.");
}

const SECONDS = 60;
const live = { controller: null, points: [], speed: 0, frame: null };

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
  view.nameCharts("Output tokens per second, last minute", "Cache in use, last minute", top, ["60 s ago", "30 s", "now"]);
  view.drawChart("speed-chart", speeds, top);
  view.drawChart("use-chart", times.map(useAt), 1);
  live.speed = speeds.at(-1);
  view.showNumbers(view.frame, live.speed);
}

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

function say(text, isGood = false) {
  if ($("connection").textContent === text) return; // a reader would hear it again
  $("connection").textContent = text;
  $("connection").classList.toggle("good", isGood);
}

// --- live ---

const RETRY_MILLISECONDS = 2000;
const SILENCE_MILLISECONDS = 12000; // a server that lives sends a comment every 5 seconds
// A browser has six connections to a server, for all its windows together. So only the newest ones watch.
const MOST_WATCHING = 3;
const windows = new BroadcastChannel("nanovllm.live");
const WINDOW = Math.random(); // the name of this window
const newer = new Set(); // windows that watch, and started after this one

async function connect() {
  if (live.controller || document.hidden) return;
  const controller = new AbortController();
  live.controller = controller;
  newer.clear();
  windows.postMessage({ id: WINDOW, watches: true });
  say("Connecting");
  try {
    while (live.controller === controller) await watch(controller.signal);
  } catch (error) {
    if (live.controller !== controller) return;
    disconnect();
    if (error.status === 401) say("The server asks for an API key");
    else playInstead(error.status === 404 ? "This server has no live view" : error.message);
  }
}

// Until the stream ends, and a moment longer. Raises a Refusal.
async function watch(signal) {
  let silence;
  const isAlive = () => {
    clearTimeout(silence);
    silence = setTimeout(() => say("The server says nothing"), SILENCE_MILLISECONDS);
    say("Connected", true);
  };
  try {
    const response = await request("live", { signal });
    view.forget();
    live.points = [];
    isAlive();
    for await (const data of dataLines(response.body, isAlive)) draw(JSON.parse(data));
  } catch (error) {
    if (error instanceof Refusal || signal.aborted) throw error;
  } finally {
    clearTimeout(silence);
  }
  say("Connection lost, trying again");
  await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
}

// A fault of ours is reported, and is not a lost connection.
function draw(frame) {
  try {
    receive(frame);
  } catch (error) {
    reportError(error);
  }
}

// Nobody watches: the engine need not make pictures.
function disconnect() {
  if (!live.controller) return;
  live.controller.abort();
  live.controller = null;
  windows.postMessage({ id: WINDOW, watches: false });
}

function makeRoom({ data: { id, watches } }) {
  if (watches) newer.add(id);
  else newer.delete(id);
  if (!live.controller || newer.size < MOST_WATCHING) return;
  disconnect();
  say(`Paused: ${MOST_WATCHING} newer windows show the engine. Click in this window to go on`);
}

function receive(frame) {
  view.owners.name(frame, false);
  const use = frame.kv_blocks_used / frame.kv_blocks;
  const time = performance.now() / 1000;
  // a server that was started again counts from the beginning
  if (frame.output_tokens < (live.points.at(-1)?.tokens ?? 0)) live.points = [];
  live.points.push({ time, tokens: frame.output_tokens, use });
  live.frame = frame;
  view.show(frame);
  showHint(frame);
  showMine(frame);
  view.showNumbers(frame, live.speed);
  if (live.points.length === 1) showLastMinute();
}

// --- recorded ---

function playInstead(why) {
  document.querySelector("input[value=recorded]").checked = true;
  changeMode();
  say(why);
}

async function listRuns() {
  if ($("run").options.length) return loadRun($("run").value);
  if (location.protocol === "file:") {
    view.explain("A page that was opened as a file may not read others: open one of the files in its folder \u201cruns\u201d.");
    $("run").hidden = true;
    $("file").parentElement.classList.replace("quiet", "main");
    return;
  }
  try {
    const runs = await (await fetch("runs/index.json")).json();
    for (const { file, title } of runs) $("run").append(new Option(title, file));
    await loadRun(runs[0].file);
  } catch {
    view.explain("The recorded runs cannot be read from this server. You can open a file.", true);
  }
}

async function loadRun(file) {
  if (!file) return;
  try {
    view.run = await (await fetch(`runs/${file}`)).json();
  } catch (error) {
    view.explain(readable(error), true);
  }
}

async function openFile(file) {
  if (!file) return;
  try {
    view.run = JSON.parse(await file.text()) ?? {};
  } catch (error) {
    const why = error instanceof SyntaxError ? "it is not JSON" : error.message;
    view.explain(`${file.name} is not a recorded run: ${why}.`, true);
    return;
  }
  $("run").hidden = false;
  $("run").prepend(new Option(view.run.title || file.name, ""));
  $("run").selectedIndex = 0;
}

function changeMode() {
  const isLive = mode() === "live";
  view.$("player").hidden = isLive;
  if (isLive) {
    view.run = null;
    connect();
  } else {
    $("hint").hidden = true;
    disconnect();
    say("Playing a recorded run");
    listRuns();
  }
}

function setUpView() {
  for (const choice of document.querySelectorAll("input[name=mode]")) {
    choice.addEventListener("change", changeMode);
  }
  $("run").addEventListener("change", () => loadRun($("run").value));
  $("file").addEventListener("change", () => openFile($("file").files[0]));
  document.addEventListener("keydown", (event) => view.onKey(event));
  document.addEventListener("visibilitychange", () => {
    if (mode() !== "live") return;
    if (document.hidden) disconnect();
    else connect();
  });
  windows.onmessage = makeRoom;
  for (const event of ["focus", "pointerdown", "pageshow"]) addEventListener(event, () => mode() === "live" && connect());
  addEventListener("pagehide", disconnect);
  setInterval(showLastMinute, 500);
  if (location.protocol === "file:") playInstead("No server: the page was opened as a file");
  else connect();
}

setUpChat();
setUpView();
