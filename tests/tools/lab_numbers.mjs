// node lab_numbers.mjs PYODIDE ROOT: prints what lab_numbers.py says in Pyodide, as JSON.
import { pathToFileURL } from "node:url";

const [, , folder, root] = process.argv;
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`));
const python = await loadPyodide();
python.FS.mkdir("/root");
python.FS.mount(python.FS.filesystems.NODEFS, { root }, "/root");
const text = python.runPython(`
import json, sys
sys.dont_write_bytecode = True
sys.path[:0] = ["/root", "/root/tests/tools"]
from pathlib import Path
from lab_numbers import numbers
json.dumps(dict(numbers(Path("/root"))))
`);
console.log(text);
