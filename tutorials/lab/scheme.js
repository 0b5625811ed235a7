// Light or dark, as the reader has chosen in the book (tutorials/site/static/site.js). This script stands in the head, so
// that the page is never drawn in the wrong colours.
"use strict";

const SCHEMES = ["", "light", "dark"];
const SCHEME = "nanovllm-scheme";

function keptScheme() {
  try {
    return JSON.parse(localStorage.getItem(SCHEME)) ?? "";
  } catch {
    return "";
  }
}

function showScheme(scheme) {
  document.documentElement.style.colorScheme = scheme;
  const button = document.getElementById("scheme");
  if (!button) return;
  button.hidden = false;
  button.textContent = scheme ? `${scheme[0].toUpperCase()}${scheme.slice(1)}` : "Auto";
  button.setAttribute("aria-label", `Colours: ${button.textContent}`);
}

function nextScheme() {
  const scheme = SCHEMES[(SCHEMES.indexOf(keptScheme()) + 1) % SCHEMES.length];
  try {
    localStorage.setItem(SCHEME, JSON.stringify(scheme));
  } catch {
    // it lasts as long as the page
  }
  showScheme(scheme);
}

showScheme(keptScheme());
addEventListener("storage", ({ key }) => key === SCHEME && showScheme(keptScheme()));
addEventListener("DOMContentLoaded", () => {
  showScheme(keptScheme());
  document.getElementById("scheme").addEventListener("click", nextScheme);
});
