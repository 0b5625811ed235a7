// The worker of the lab: Python, the simulator and the student's file. It reads nothing from the network: the page
// gives it all that it needs, and the page's content security policy, which it inherits, allows no more.
//
//   page -> worker  { base, wasm, stdlib, lock, python }, then { id, question: JSON }
//   worker -> page  { ready }, { id, answer: JSON }, { id, broken: text }
import { loadPyodide } from "pyodide";
import createPyodideModule from "pyodide/pyodide.asm.mjs"; // here, so that no worker needs a server

const MOST_BYTES = 2 ** 30; // of memory; beyond that Python raises MemoryError
const PAGE = 2 ** 16;

const send = self.postMessage.bind(self); // the student's file may replace it
let session = null;

function limitMemory() {
  const { grow } = WebAssembly.Memory.prototype;
  WebAssembly.Memory.prototype.grow = function (pages) {
    if (this.buffer.byteLength + pages * PAGE > MOST_BYTES) throw new RangeError("the lab gives no more memory");
    return grow.call(this, pages);
  };
}

// What Pyodide would fetch is here already; the module is compiled once for all workers.
function answerFromMemory({ wasm, stdlib }) {
  const wasmHeaders = { headers: { "Content-Type": "application/wasm" } };
  self.fetch = async (url) =>
    String(url).endsWith(".zip") ? new Response(stdlib) : new Response(new Uint8Array(), wasmHeaders);
  WebAssembly.instantiateStreaming = async (_, imports) => ({
    instance: await WebAssembly.instantiate(wasm, imports),
    module: wasm,
  });
}

async function start(given) {
  limitMemory();
  answerFromMemory(given);
  const silent = { stdout() {}, stderr() {} };
  const python = await loadPyodide({ indexURL: given.base, lockFileContents: given.lock, createPyodideModule, ...silent });
  python.unpackArchive(given.python, "zip", { extractDir: "/lab" });
  session = python.runPython(`
import sys
from pathlib import Path
sys.path.insert(0, "/lab")
sys.dont_write_bytecode = True
from tutorials.lab.session import Session
Session(Path("/home/pyodide"))
`);
  send({ ready: true });
}

function answer({ id, question }) {
  const texts = session.texts(question);
  for (const text of texts) send({ id, answer: text });
  texts.destroy();
}

self.onmessage = async ({ data }) => {
  try {
    if (session === null) await start(data);
    else answer(data);
  } catch (error) {
    // the last line of a traceback says what is wrong
    send({ id: data.id, broken: String(error?.message ?? error).trim().split("\n").at(-1).slice(0, 500) });
  }
};
