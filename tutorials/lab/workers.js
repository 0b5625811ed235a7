// Two workers: one that answers, and a spare one that is warm. To stop a run means to end its worker.

const FILES = { python: "python.zip", stdlib: "python_stdlib.zip" };

// Fetches everything once, and then allows no more connections: to nowhere, for this page and its workers.
export async function fetchAll(base) {
  const read = async (name) => {
    const response = await fetch(new URL(name, base));
    if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
    return response;
  };
  const bytes = async (name) => (await read(name)).arrayBuffer();
  const text = async (name) => (await read(name)).text();
  const [wasm, stdlib, python, lock, code] = await Promise.all([
    bytes("pyodide.asm.wasm").then((all) => WebAssembly.compile(all)),
    bytes(FILES.stdlib),
    bytes(FILES.python),
    text("pyodide-lock.json"),
    text("worker.js"),
  ]);
  const policy = document.createElement("meta");
  policy.httpEquiv = "Content-Security-Policy";
  policy.content = "connect-src 'none'";
  document.head.append(policy);
  // a worker of a blob inherits the policy of the page; one of a file would have none on a static host
  const script = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  return { script, given: { base: String(base), wasm, stdlib, python, lock } };
}

class Warm {
  constructor({ script, given }) {
    this.worker = new Worker(script, { type: "module" });
    this.ready = new Promise((resolve, reject) => {
      this.hear = ({ ready, broken }) => (ready ? resolve() : reject(new Error(broken)));
    });
    this.worker.onmessage = ({ data }) => this.hear(data);
    this.worker.onerror = (event) => this.hear({ broken: event.message ?? "the worker has ended" });
    this.worker.postMessage(given);
  }

  end() {
    this.worker.terminate();
  }
}

export class Workers {
  current = null;
  spare = null;
  stop = null; // ends what runs, with a sentence

  async start(all) {
    this.all = all;
    this.current = new Warm(all);
    await this.current.ready;
    this.warmUp();
  }

  warmUp() {
    if (this.spare === null) {
      this.spare = new Warm(this.all);
      this.spare.ready.catch(() => (this.spare = null));
    }
  }

  replace() {
    this.current.end();
    this.current = this.spare ?? new Warm(this.all);
    this.spare = null;
    this.current.ready.then(() => this.warmUp(), () => {});
  }

  // Calls `onAnswer` for each answer. Returns a sentence if it was stopped, or has broken down.
  async ask(question, seconds, onAnswer) {
    const { current } = this;
    const sentence = await new Promise((resolve) => {
      const late = `Stopped after ${seconds} seconds, which is the limit. Does something never end?`;
      const timer = setTimeout(() => this.stop(late), seconds * 1000);
      const end = (text) => {
        clearTimeout(timer);
        this.stop = null;
        resolve(text);
      };
      this.stop = end;
      current.ready.then(
        () => {
          if (this.stop !== end) return;
          current.hear = ({ answer, broken }) => {
            if (broken !== undefined) return end(`Python has broken down, and was started again: ${broken}`);
            try {
              const said = JSON.parse(answer);
              onAnswer(said);
              if (said.done) end("");
            } catch (error) {
              end(`The worker has sent what is no answer: ${error.message}`); // the file can do so, too
            }
          };
          current.worker.postMessage(JSON.stringify(question));
        },
        (error) => end(`Python did not start: ${error.message}`),
      );
    });
    if (sentence) this.replace();
    return sentence;
  }
}
