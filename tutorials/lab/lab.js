// The page of the lab: which sheet is open, its file, and what its buttons do.
import { newEditor } from "./editor.js";
import { check, element, film, goals, meanings, problem, table, test, timeLines } from "./results.js";
import { fetchAll, Workers } from "./workers.js";

const LIMITS = { run: 60, sheet: 60, tests: 180, points: 300 }; // seconds
const KEPT = "nanovllm.lab.";
const LAST = `${KEPT}last`;
const FIRST = "order"; // the sheet that is open at first: sliders before code

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const workers = new Workers();
let open = null; // {name, is, ...} of data
let isBusy = false;
let isReady = false;

// --- what the browser keeps; it may refuse ---

function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function keep(name, text) {
  try {
    localStorage.setItem(name, text);
  } catch {
    $("kept").textContent = "This browser keeps nothing: save your file.";
  }
}

// --- sheets ---

const editor = newEditor($("editor"), (text) => open && keep(KEPT + open.name, text), () => start("run"));

function show(name) {
  open = data.sheets.find((sheet) => sheet.name === name) ?? data.sheets.find((sheet) => sheet.name === FIRST);
  keep(LAST, open.name);
  $("sheet").value = open.name;
  history.replaceState(null, "", `#${open.name}`);
  const isCode = open.starter !== undefined;
  $("with-editor").hidden = !isCode;
  $("with-controls").hidden = isCode;
  document.body.classList.toggle("is-code", isCode);
  $("title").textContent = open.title;
  $("about").replaceChildren(...about(open));
  $("results").replaceChildren();
  say("");
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
  const { name } = open;
  open = { ...open, name: null }; // nothing is kept while the text is exchanged
  const text = kept(KEPT + name) ?? open.starter;
  open = { ...open, name };
  editor.text = text;
  $("part").replaceChildren(...open.parts.map((part, i) => new Option(part, i)));
  $("part-label").hidden = open.parts.length < 2;
  for (const id of ["tests", "points"]) $(id).hidden = !open.is_assignment;
}

function showControls() {
  $("controls").replaceChildren(...open.controls.map(control));
}

function control({ name, label, values, start: first }) {
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
  input.addEventListener("change", () => start("sheet"));
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
  isBusy = true;
  showButtons();
  const sheet = open;
  const isSheet = what === "sheet";
  const source = editor.text;
  const question = isSheet
    ? { do: what, name: sheet.name, values: valuesOfControls() }
    : { do: what, task: sheet.name, part: Number($("part").value || 0), seed: seedOf($("seed")), source };
  if (!isSheet) editor.markLine(null);
  say(isSheet || what === "run" ? "Simulating \u2026" : "Running \u2026");
  const found = element("div");
  const list = element("ul", "checks");
  const begin = performance.now();
  let hasProblem = false;
  const sentence = await workers.ask(question, LIMITS[what], (answer) => {
    if (sheet.name !== open.name) return; // another sheet was opened meanwhile
    if (answer.sentence) {
      hasProblem = true;
      found.append(problem(answer));
      if (answer.line && editor.text === source) editor.markLine(answer.line);
    }
    if (answer.progress) say(`${answer.progress} \u2026`);
    if (answer.test) list.append(test(answer));
    if (answer.check) list.append(check(answer));
    if (answer.total !== undefined) found.append(element("p", "total", `${answer.total} of ${answer.most} points that the lab can give, on the public seeds`));
    if (answer.table) found.append(table(answer.table), meanings(), goals(answer.goals), timeLines(answer.lines), film(answer.film));
    if (answer.printed) found.append(element("h3", "", "Printed"), element("pre", "printed", answer.printed));
    if (list.children.length && !list.isConnected) found.prepend(list);
    if (!found.isConnected) $("results").replaceChildren(found);
  });
  isBusy = false;
  if (sheet.name === open.name) {
    if (!found.isConnected) $("results").replaceChildren(); // they are those of an earlier run
    const seconds = ((performance.now() - begin) / 1000).toFixed(1);
    say(sentence || (hasProblem ? "Your file has raised an error." : `Done in ${seconds} s.`), Boolean(sentence) || hasProblem);
  }
  showButtons();
  if (again === open.name) {
    again = null;
    start("sheet");
  }
}

function seedOf(input) {
  const seed = Number(input.value);
  const isSeed = Number.isInteger(seed) && seed >= 0 && seed < 2 ** 31;
  if (!isSeed) input.value = 1;
  return isSeed ? seed : 1;
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
$("sheet").addEventListener("change", () => go($("sheet").value));
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
try {
  await workers.start(await fetchAll(new URL("lab/", document.baseURI)));
  isReady = true;
  document.body.dataset.ready = Math.round(performance.now()); // milliseconds, for who measures
  say("Ready.");
  showButtons();
  if (open.starter === undefined) start("sheet"); // the first one was opened before Python was there
} catch (error) {
  say(`Python cannot be loaded: ${error.message}`, true);
}
