// Habits of a reader, kept in the browser: chapters that are read, the place in the book, light or dark; and the search.
// Without JavaScript or storage, all text is there.
"use strict";

const script = document.currentScript;
const root = script.dataset.root.replace(/\/?$/, "/"); // of the site, as seen from this page
const page = script.dataset.page;
const $ = (id) => document.getElementById(`site-${id}`); // no heading and no name in a module has such an id

// Not `element`: player.js, a script of the same page, has a function of that name.
function newElement(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text; // text is never markup
  if (className) made.className = className;
  return made;
}

// --- what is kept: if the browser keeps nothing, it lasts as long as the page ---

const unkept = new Map();

function kept(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`nanovllm-${key}`)) ?? otherwise;
  } catch {
    return unkept.get(key) ?? otherwise;
  }
}

function keep(key, value) {
  unkept.set(key, value);
  try {
    localStorage.setItem(`nanovllm-${key}`, JSON.stringify(value));
  } catch {
    // it is in `unkept`
  }
}

// --- light and dark ---

const SCHEMES = ["", "light", "dark"];

function showScheme(scheme) {
  document.documentElement.style.colorScheme = scheme;
  $("scheme").textContent = scheme ? `${scheme[0].toUpperCase()}${scheme.slice(1)}` : "Auto";
  $("scheme").setAttribute("aria-label", `Colours: ${$("scheme").textContent}`);
  $("scheme").title = scheme ? "" : "The colours are those of your system";
}

function nextScheme() {
  const scheme = SCHEMES[(SCHEMES.indexOf(kept("scheme", "")) + 1) % SCHEMES.length];
  keep("scheme", scheme);
  showScheme(scheme);
}

// --- what is read ---

const chapterLinks = () => [...document.querySelectorAll("nav a")].filter((link) => numberOf(link.href));
const numberOf = (address) => address.match(/\/tutorials\/(\d\d)_\w+\.html/)?.[1];

function showRead() {
  const read = kept("read", []);
  const links = chapterLinks().filter((link) => !link.hash);
  for (const link of links) link.classList.toggle("read", read.includes(numberOf(link.href)));
  const count = `${links.filter((link) => link.classList.contains("read")).length} of ${links.length} read`;
  for (const box of document.querySelectorAll("input[data-chapter]")) {
    box.checked = read.includes(box.dataset.chapter);
    box.closest("p").querySelector("span").textContent = `(${count})`;
  }
  for (const mark of document.querySelectorAll("[data-read]")) {
    mark.dataset.minutes ??= mark.textContent;
    mark.textContent = mark.dataset.minutes + (read.includes(mark.dataset.read) ? ", read" : "");
  }
  if ($("progress")) showPlace(count);
}

// The first page says where to go on.
function showPlace(count) {
  const place = kept("place", null);
  $("progress").replaceChildren(`${count}. `);
  if (!place) return;
  const link = newElement("a", place.title);
  link.href = root + place.page + (place.anchor ? `#${place.anchor}` : "");
  $("progress").append("Go on: ", link);
}

function tick(box) {
  const others = kept("read", []).filter((number) => number !== box.dataset.chapter);
  keep("read", box.checked ? [...others, box.dataset.chapter] : others);
  showRead();
}

// The last heading above the middle of the window.
function notePlace() {
  const headings = [...document.querySelectorAll("main h2[id]")];
  const heading = headings.findLast((one) => one.getBoundingClientRect().top < innerHeight / 2);
  const chapter = document.querySelector("h1").textContent;
  const title = heading ? `${chapter}: ${heading.textContent}` : chapter;
  keep("place", { page, anchor: heading?.id ?? "", title });
}

// --- search ---

const MOST_FOUND = 20;
let loading = null;

function load() {
  loading ??= new Promise((resolve, reject) => {
    const made = newElement("script");
    made.src = `${root}static/search_index.js`;
    made.onload = resolve;
    made.onerror = reject;
    document.head.append(made);
  });
  return loading;
}

// Each word must be there; in a heading it counts more, and at the beginning of a word, and all of them together.
function score(row, words) {
  const heading = `${row[1] || row[0]}`.toLowerCase();
  const title = row[0].toLowerCase();
  const text = (row.lower ??= row[3].toLowerCase());
  const phrase = words.join(" ");
  let sum = 100 * (heading === phrase) + 20 * heading.includes(phrase) + 5 * text.includes(phrase);
  for (const word of words) {
    const inHeading = heading.includes(word);
    const at = text.search(new RegExp(`(^|[^a-z0-9])${word.replace(/[^\w]/g, "\\$&")}`));
    const points = 20 * inHeading + 3 * title.includes(word) + 2 * (at >= 0) + text.includes(word);
    if (points === 0) return 0;
    sum += points;
  }
  return sum;
}

// Words that each page has. They do not count, unless there is no other word.
const COMMON = new Set("a an and are can do does for how i in is it of on or the this to what when where which who why with".split(" "));

// The words of all pages, and how often each of them occurs. They are read when a word is not found.
let vocabulary = null;

function readVocabulary() {
  vocabulary = new Map();
  for (const row of window.searchIndex) {
    for (const word of `${row[0]} ${row[1]} ${row[3]}`.toLowerCase().match(/[a-z]{3,}/g) ?? []) vocabulary.set(word, (vocabulary.get(word) ?? 0) + 1);
  }
}

const MOST_LETTERS = 2; // that may be wrong

// How many letters must be added, left out or exchanged.
function distance(one, other) {
  if (Math.abs(one.length - other.length) > MOST_LETTERS) return Infinity;
  let last = Array.from({ length: other.length + 1 }, (_, j) => j);
  for (let i = 1; i <= one.length; i++) {
    const row = [i];
    for (let j = 1; j <= other.length; j++) {
      row[j] = Math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (one[i - 1] !== other[j - 1]));
    }
    last = row;
  }
  return last.at(-1);
}

// The most similar word of the pages, and of several the most frequent one; or the same word.
function corrected(word) {
  if (word.length < 4 || window.searchIndex.some((row) => score(row, [word]) > 0)) return word;
  if (!vocabulary) readVocabulary();
  const [best] = [...vocabulary]
    .map(([other, count]) => [distance(word, other), -count, other])
    .filter(([letters]) => letters <= MOST_LETTERS)
    .sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  return best ? best[2] : word;
}

function excerpt(row, words) {
  const at = Math.max(0, row.lower.indexOf(words[0]));
  const begin = row[3].lastIndexOf(" ", Math.max(0, at - 40)) + 1;
  const made = newElement("small", begin ? "\u2026 " : "");
  const shown = row[3].slice(begin, begin + 140);
  const from = at - begin;
  const isThere = row.lower.includes(words[0]);
  const mark = newElement("mark", isThere ? shown.slice(from, from + words[0].length) : "");
  made.append(shown.slice(0, isThere ? from : undefined), mark, isThere ? shown.slice(from + words[0].length) : "");
  return made;
}

async function search() {
  const all = $("words").value.toLowerCase().split(/[\s?]+/).filter(Boolean);
  $("found").hidden = all.length === 0;
  if (all.length === 0) return;
  await load();
  const telling = all.filter((word) => !COMMON.has(word));
  const asked = telling.length ? telling : all;
  const words = asked.map(corrected);
  const scored = window.searchIndex.map((row) => [score(row, words), row]).filter(([points]) => points > 0);
  const rows = scored.sort((a, b) => b[0] - a[0]).slice(0, MOST_FOUND);
  const links = rows.map(([, row]) => {
    const link = newElement("a", row[1] ? `${row[1]} (${row[0]})` : row[0]);
    link.href = root + row[2];
    link.append(excerpt(row, words));
    return link;
  });
  const isOther = words.join(" ") !== asked.join(" ");
  const count = `${scored.length} found${isOther ? ` for \u201c${words.join(" ")}\u201d, 0 for \u201c${asked.join(" ")}\u201d` : ""}`;
  $("found").replaceChildren(newElement("p", count, "soft"), ...links);
  $("found").firstChild.setAttribute("role", "status");
}

function closeSearch() {
  $("found").hidden = true;
}

function onKey(event) {
  if (event.target.closest?.("input, textarea, select") && event.target !== $("words")) return;
  const isInSearch = $("search").contains(event.target);
  if (event.key === "/" && !isInSearch && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("words").focus();
  }
  if (!isInSearch) return;
  const links = [$("words"), ...$("found").querySelectorAll("a")];
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) {
    event.preventDefault();
    links[Math.min(links.length - 1, Math.max(0, links.indexOf(event.target) + by))].focus();
  }
  if (event.key === "Escape") {
    closeSearch();
    $("words").focus();
  }
}

// --- code can be copied ---

function addCopy(block) {
  const button = newElement("button", "Copy", "copy");
  button.type = "button";
  const code = block.querySelector("code").textContent;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(block.querySelector("code"));
      button.textContent = "Selected";
    }
  });
  block.append(button);
}

// --- the menu ---

// In the menu, the page that is open. `scrollIntoView` would also move the place from which Tab goes on.
function showCurrent() {
  const current = $("menu").querySelector("[aria-current]");
  const below = current ? current.getBoundingClientRect().bottom + 8 - innerHeight : 0;
  if (below > 0) $("menu").scrollTop += below;
}

// --- when the page is there ---

$("search").hidden = $("scheme").hidden = false;
showScheme(kept("scheme", ""));
$("scheme").addEventListener("click", nextScheme);
for (const box of document.querySelectorAll("input[data-chapter]")) {
  box.disabled = false;
  box.addEventListener("change", () => tick(box));
}
showRead();
if (numberOf(`/${page}`)) addEventListener("scrollend", notePlace);
$("menu").open = matchMedia("(min-width: 901px)").matches;
showCurrent();
$("words").addEventListener("focus", load);
$("words").addEventListener("input", search);
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  $("found").querySelector("a")?.click();
});
addEventListener("click", (event) => $("search").contains(event.target) || closeSearch());
addEventListener("keydown", onKey);
for (const block of document.querySelectorAll("pre.runs")) addCopy(block);
