// Light or dark, as the reader has chosen in the book (tutorials/site/static/site.js). This script stands in the head, so
// that the page is never drawn in the wrong colours.
"use strict";

function followScheme() {
  try {
    document.documentElement.style.colorScheme = JSON.parse(localStorage.getItem("nanovllm-scheme")) ?? "";
  } catch {
    // nothing is kept: as the system has it
  }
}

followScheme();
addEventListener("storage", followScheme);
