// Two workers: one that answers, and a spare one that is warm. To stop a run means to end its worker.

const NAMES = ["pyodide.wasm.gzip", "python_stdlib.zip", "python.zip", "pyodide-lock.json", "worker.js"];

// Fetches everything once, and then allows no more connections: to nowhere, for this page and its workers. Calls
// `onProgress` with the number of bytes, and how many there are (0: unknown).
export async function fetchAll(base, onProgress) {
  const responses = await Promise.all(NAMES.map((name) => fetch(new URL(name, base))));
  const refused = responses.find((response) => !response.ok);
  if (refused) throw new Error(`${refused.url}: ${refused.status} ${refused.statusText}`);
  const lengths = responses.map(({ headers }) => (headers.has("Content-Encoding") ? NaN : Number(headers.get("Content-Length"))));
  const total = lengths.every((length) => length > 0) ? lengths.reduce((sum, length) => sum + length) : 0;
  let count = 0;
  const counted = ({ body }) => body.pipeThrough(new TransformStream({
    transform(chunk, controller) {
      count += chunk.byteLength;
      onProgress(count, total);
      controller.enqueue(chunk);
    },
  }));
  const bytes = (stream) => new Response(stream).arrayBuffer();
  const text = (stream) => new Response(stream).text();
  const [wasm, stdlib, python, lock, code] = responses.map(counted);
  const all = await Promise.all([
    bytes(wasm.pipeThrough(new DecompressionStream("gzip"))).then((module) => WebAssembly.compile(module)),
    bytes(stdlib),
    bytes(python),
    text(lock),
    text(code),
  ]);
  const policy = document.createElement("meta");
  policy.httpEquiv = "Content-Security-Policy";
  policy.content = "connect-src 'none'";
  document.head.append(policy);
  // a worker of a blob inherits the policy of the page; one of a file would have none on a static host
  const script = URL.createObjectURL(new Blob([all[4]], { type: "text/javascript" }));
  return { script, given: { base: String(base), wasm: all[0], stdlib: all[1], python: all[2], lock: all[3] } };
}

class Warm {
  constructor({ script, given }) {
    this.worker = new Worker(script, { type: "module" });
    this.ready = new Promise((resolve, reject) => {
      this.hear = ({ ready, broken }) => (ready ? resolve() : reject(new Error(broken)));
    });
    this.worker.onmessage = ({ data }) => this.hear(data);
    this.worker.onerror = (event) => this.hear({ broken: event.message ?? "the worker has ended", isEnd: true });
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

  // Calls `onAnswer` for each answer. Returns a sentence if it was stopped, or has broken down. The answers to a question
  // have its id, which the student's file does not know: another message is not one of ours.
  async ask(question, seconds, onAnswer) {
    const { current } = this;
    const id = crypto.getRandomValues(new Uint32Array(4)).join("-");
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
          current.hear = ({ id: of, answer, broken, isEnd }) => {
            if (of !== id && !isEnd) return;
            if (broken !== undefined) return end(`Python has broken down, and was started again: ${broken}`);
            try {
              const said = JSON.parse(answer);
              onAnswer(said);
              if (said.done) end("");
            } catch (error) {
              end(`An answer cannot be shown: ${error.message}`);
            }
          };
          current.worker.postMessage({ id, question: JSON.stringify(question) });
        },
        (error) => end(`Python did not start: ${error.message}`),
      );
    });
    if (sentence) this.replace();
    return sentence;
  }
}
