// The page of the lab: which sheet is open, its file, and what its buttons do.
import { newEditor } from "./editor.js";
import { element, newResults, summary } from "./results.js";
import { fetchAll, Workers } from "./workers.js";

const LIMITS = { run: 60, sheet: 60, tests: 180, points: 300 }; // seconds
const KEPT = "nanovllm.lab.";
const LAST = `${KEPT}last`;
const MOST_RUNS = 10; // of a sheet, in the list
const MOST_SEED = 2 ** 31 - 1;
const FIRST = "order"; // the sheet that is open at first: sliders before code

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const workers = new Workers();
let open = null; // {name, is, ...} of data
let isBusy = false;
let isReady = false;

// --- what the browser keeps; it may refuse ---

function kept(name, store = "localStorage") {
  try {
    return window[store].getItem(name);
  } catch {
    return null;
  }
}

function keep(name, text, store = "localStorage") {
  try {
    window[store].setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

// A file is kept for this tab, and for tabs that are opened later.
function keepFile(text) {
  if (!open) return;
  keep(KEPT + open.name, text, "sessionStorage");
  if (!keep(KEPT + open.name, text)) warn("This browser keeps nothing: save your file.");
}

function warn(text) {
  $("kept").textContent = text;
  $("kept").classList.add("is-problem");
}

// What this tab knows of a sheet: its load, its seed, its controls, and its runs.
const tab = () => JSON.parse(kept(`${KEPT}tab.${open.name}`, "sessionStorage") ?? "{}");
const keepTab = (news) => keep(`${KEPT}tab.${open.name}`, JSON.stringify({ ...tab(), ...news }), "sessionStorage");

// --- sheets ---

const editor = newEditor($("editor"), keepFile, () => start("run"));

function show(name) {
  open = data.sheets.find((sheet) => sheet.name === name) ?? data.sheets.find((sheet) => sheet.name === FIRST);
  keep(LAST, open.name);
  $("sheet").value = open.name;
  if (location.hash !== `#${open.name}`) history.replaceState(null, "", `#${open.name}`);
  const isCode = open.starter !== undefined;
  $("with-editor").hidden = !isCode;
  $("with-controls").hidden = isCode;
  document.body.classList.toggle("is-code", isCode);
  $("title").textContent = open.title;
  $("about").replaceChildren(...about(open));
  $("results").replaceChildren();
  say("");
  $("kept").textContent = "Your file is kept in this browser; save it, too.";
  $("kept").classList.remove("is-problem");
  if (isCode) showFile();
  else showControls();
  showButtons();
  if (!isCode) start("sheet");
}

function about({ text, goals: wanted = [], question, try_this: tryThis, handout }) {
  const texts = [text, tryThis].filter(Boolean).map((one) => element("p", "", one));
  const list = element("ul", "wanted", undefined, ...wanted.map((one) => element("li", "", one)));
  if (handout) texts.push(element("p", "", "What is asked, and hints: ", handoutLink(handout)));
  return [...(question ? [element("p", "question", question)] : []), ...texts, ...(wanted.length ? [list] : [])];
}

function handoutLink(href) {
  const link = element("a", "", "the handout");
  link.href = href;
  return link;
}

function showFile() {
  const sheet = open;
  const text = kept(KEPT + sheet.name, "sessionStorage") ?? kept(KEPT + sheet.name) ?? sheet.starter;
  open = null; // nothing is kept while the text is exchanged
  editor.text = text;
  open = sheet;
  const { part = 0, seed = 1 } = tab();
  $("part").replaceChildren(...open.parts.map((name, i) => new Option(name, i)));
  $("part").value = part;
  $("seed").value = seed;
  showRuns();
  if (runs().length) showRun(runs().at(-1));
  $("part-label").hidden = open.parts.length < 2;
  for (const id of ["tests", "points"]) $(id).hidden = !open.is_assignment;
}

// --- runs of a sheet ---

const known = new Map(); // by sheet: with their films, which are too long to be kept

function runs() {
  if (!known.has(open.name)) known.set(open.name, tab().runs ?? []);
  return known.get(open.name);
}

function addRun(run) {
  const all = [...runs(), { ...run, number: (runs().at(-1)?.number ?? 0) + 1 }].slice(-MOST_RUNS);
  known.set(open.name, all);
  const short = all.map((one) => ({ ...one, answers: one.answers.map(({ film, ...rest }) => rest) }));
  if (!keepTab({ runs: short })) keepTab({ runs: short.slice(-1) }); // a browser keeps some megabytes
  showRuns(all.at(-1));
}

const WHAT = { run: ({ part, seed }) => `${part}, seed ${seed}`, tests: () => "public tests", points: () => "points" };

function showRuns(shown = runs().at(-1)) {
  const items = runs().toReversed().map((run) => {
    const button = element("button", "", `${run.number}. ${WHAT[run.what](run)}: ${summary(run.answers)}`);
    button.type = "button";
    if (run === shown) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => isBusy || showRun(run));
    return element("li", "", undefined, button);
  });
  $("runs").replaceChildren(...items);
  $("with-runs").hidden = !items.length;
}

function showRun(run) {
  const results = newResults({ ...run, parts: open.parts });
  for (const answer of run.answers) results.add(answer);
  $("results").replaceChildren(results.box);
  say(`Run ${run.number} of this sheet, of ${run.time}.`);
  showRuns(run);
}

// --- controls ---

function showControls() {
  $("controls").replaceChildren(...open.controls.map(control));
  showNeeds();
}

// A control that needs another one's value does nothing without it.
function showNeeds() {
  const values = valuesOfControls();
  for (const { name, needs } of open.controls) $(`control-${name}`).disabled = Boolean(needs) && values[needs[0]] !== needs[1];
}

function control({ name, label, values, start: usual }) {
  const first = tab().values?.[name] ?? usual;
  const id = `control-${name}`;
  const isNumber = typeof first === "number";
  const input = element(isNumber ? "input" : "select");
  input.id = id;
  const output = element("output", "", isNumber ? first.toLocaleString("en-US") : "");
  if (isNumber) {
    Object.assign(input, { type: "range", min: 0, max: values.length - 1, value: values.indexOf(first) });
  } else {
    input.append(...values.map((value, i) => new Option(value, i)));
    input.value = values.indexOf(first);
  }
  input.name = name;
  const tell = () => {
    const value = values[input.value];
    if (isNumber) output.textContent = value.toLocaleString("en-US");
    if (isNumber) input.setAttribute("aria-valuetext", output.textContent);
  };
  tell();
  input.addEventListener("input", tell);
  input.addEventListener("change", () => {
    showNeeds();
    keepTab({ values: valuesOfControls() });
    start("sheet");
  });
  const text = element("label", "", label);
  text.htmlFor = id;
  return element("div", "control", undefined, text, input, output);
}

const valuesOfControls = () =>
  Object.fromEntries(open.controls.map(({ name, values }) => [name, values[$(`control-${name}`).value]]));

// --- to run ---

function say(text, isProblem = false) {
  $("status").textContent = text;
  $("status").classList.toggle("is-problem", isProblem);
}

function showButtons() {
  for (const id of ["run", "tests", "points", "play"]) $(id).disabled = isBusy || !isReady;
  $("stop").disabled = !isBusy;
  $("stop-sheet").disabled = !isBusy;
}

let again = null; // what was asked for while another run was on its way

async function start(what) {
  if (!isReady) return;
  if (isBusy) {
    if (what === "sheet") again = open.name; // a slider goes on moving
    return;
  }
  const seed = Number($("seed").value);
  if (what === "run" && !($("seed").value && Number.isInteger(seed) && seed >= 0 && seed <= MOST_SEED)) {
    say(`Seed ${$("seed").value} is not allowed: it must be an integer from 0 to ${MOST_SEED.toLocaleString("en-US")}.`, true);
    return;
  }
  isBusy = true;
  showButtons();
  const sheet = open;
  const isSheet = what === "sheet";
  const source = editor.text;
  const part = Number($("part").value || 0);
  const question = isSheet
    ? { do: what, name: sheet.name, values: valuesOfControls() }
    : { do: what, task: sheet.name, part, seed, source };
  if (!isSheet) editor.markLine(null);
  say(isSheet || what === "run" ? "Simulating \u2026" : "Running \u2026");
  const run = { what, part: sheet.parts?.[part], seed, answers: [], time: new Date().toLocaleTimeString("en-GB") };
  const results = newResults({ ...run, parts: sheet.parts });
  const begin = performance.now();
  let hasProblem = false;
  const sentence = await workers.ask(question, LIMITS[what], (answer) => {
    if (sheet.name !== open.name) return; // another sheet was opened meanwhile
    if (answer.sentence) {
      hasProblem = true;
      if (answer.line && editor.text === source) editor.markLine(answer.line);
    }
    if (answer.progress) say(`${answer.progress} \u2026`);
    else run.answers.push(answer);
    results.add(answer);
    if (!results.box.isConnected) $("results").replaceChildren(results.box);
  });
  isBusy = false;
  if (sheet.name === open.name) {
    if (!results.box.isConnected) $("results").replaceChildren(); // they are those of an earlier run
    if (!isSheet && !sentence) addRun(run);
    const seconds = ((performance.now() - begin) / 1000).toFixed(1);
    say(sentence || (hasProblem ? "Your file has raised an error." : `Done in ${seconds} s.`), Boolean(sentence) || hasProblem);
  }
  showButtons();
  if (again === open.name) {
    again = null;
    start("sheet");
  }
}

// --- files ---

const fileName = () => (open.name === "a8" ? "my_router.py" : "my_scheduler.py");

function save() {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([editor.text], { type: "text/x-python" }));
  link.download = fileName();
  link.click();
  URL.revokeObjectURL(link.href);
}

async function loadFile() {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  if (file.size > 1e6) say(`${file.name} has more than a million bytes: it is no scheduler.`, true);
  else editor.text = await file.text();
}

// --- begin ---

for (const [id, what] of [["run", "run"], ["tests", "tests"], ["points", "points"], ["play", "sheet"]]) {
  $(id).addEventListener("click", () => start(what));
}
for (const id of ["stop", "stop-sheet"]) $(id).addEventListener("click", () => workers.stop?.("Stopped."));
$("save").addEventListener("click", save);
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", loadFile);
$("starter").addEventListener("click", () => {
  if (confirm("Replace your file by the starter?")) editor.text = open.starter;
});
function go(name) {
  if (name === open.name) return;
  workers.stop?.("Stopped.");
  show(name);
}
$("sheet").addEventListener("change", () => {
  location.hash = $("sheet").value; // the back button leads to the sheet before
});
for (const id of ["seed", "part"]) $(id).addEventListener("change", () => keepTab({ seed: $("seed").value, part: $("part").value }));
window.addEventListener("storage", ({ key, newValue }) => {
  if (key !== KEPT + open.name || newValue === null || newValue === editor.text) return;
  warn("Another tab has another file for this sheet. Each tab keeps its own; a new tab gets the one that was typed last.");
});
window.addEventListener("hashchange", () => go(location.hash.slice(1)));

for (const [group, label] of [["sliders", "Sliders"], ["assignments", "Assignments"], ["free", "Free"]]) {
  const options = data.sheets.filter((sheet) => sheet.group === group).map((sheet) => new Option(sheet.label, sheet.name));
  const made = element("optgroup", "", undefined, ...options);
  made.label = label;
  $("sheet").append(made);
}
$("needs-server").hidden = true;
$("lab").hidden = false;
show(location.hash.slice(1) || kept(LAST) || FIRST);
say("Python is loading \u2026");
const megabytes = (count) => (count / 1e6).toFixed(1);
try {
  const all = await fetchAll(new URL("lab/", document.baseURI), (count, total) =>
    say(`Python is loading: ${megabytes(count)} MB${total ? ` of ${megabytes(total)} MB` : ""} \u2026`));
  say("Python starts \u2026");
  await workers.start(all);
  isReady = true;
  document.body.dataset.ready = Math.round(performance.now()); // milliseconds, for who measures
  say("Ready.");
  showButtons();
  if (open.starter === undefined) start("sheet"); // the first one was opened before Python was there
} catch (error) {
  say(`Python cannot be loaded: ${error.message}`, true);
}
