r"""Which files and symbols a version of vLLM has. Tests hold the book's tables "The same in vLLM" against it.

    pip download --no-deps vllm==0.33.0
    python -m tutorials.measure.vllm_symbols vllm-0.33.0-*.whl --json tutorials/results/vllm_symbols.json

Reads a wheel or an unpacked package. Nothing of it is imported or run. Only names are kept: of each
file its functions, and its classes with their methods and declared fields. Models, kernels of single
models, other projects' code and connectors are left out, but for some.
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from tutorials.arguments import experiment
from tutorials.machine import environment
from tutorials.report import write_json

LEFT_OUT = (
    *("distributed/ec_transfer", "distributed/kv_transfer", "distributed/weight_transfer"),
    *("entrypoints/pooling", "model_executor", "models", "third_party", "transformers_utils"),
    *("v1/attention/backends/mla", "v1/hisparse", "v1/kv_offload", "v1/simple_kv_offload"),
    *("vllm_flash_attn", "compilation/passes", "parser", "_aiter_ops.py"),
)
KEPT = (  # of what is left out
    *("distributed/kv_transfer/kv_connector/v1/base.py", "v1/kv_offload/base.py"),
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
    *("model_executor/model_loader", "model_executor/models/interfaces.py"),
    *("model_executor/models/llama.py", "model_executor/models/qwen2.py"),
    *("model_executor/models/qwen3.py", "model_executor/models/registry.py"),
    *("model_executor/models/utils.py", "model_executor/layers/activation.py"),
    *("model_executor/layers/attention/attention.py", "model_executor/layers/layernorm.py"),
    *("model_executor/layers/linear.py", "model_executor/layers/logits_processor.py"),
    *("model_executor/layers/rotary_embedding/base.py", "model_executor/parameter.py"),
    *("model_executor/layers/quantization/base_config.py", "model_executor/custom_op.py"),
    "model_executor/layers/vocab_parallel_embedding.py",
)


def sources(path: Path) -> Iterator[tuple[str, bytes]]:
    """The Python files of a wheel or of a package's folder, each with its path in the package."""
    if path.is_dir():
        for source in path.rglob("*.py"):
            yield source.relative_to(path).as_posix(), source.read_bytes()
        return
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            package, _, file = name.partition("/")
            if package == "vllm" and file.endswith(".py"):
                yield file, wheel.read(name)


def is_within(file: str, places: tuple[str, ...]) -> bool:
    return any(file == place or file.startswith(place + "/") for place in places)


def is_kept(file: str) -> bool:
    return is_within(file, KEPT) or not is_within(file, LEFT_OUT)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or a class, also behind an `if` or a `try`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from statements(getattr(node, part, []))


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """Functions, and fields that are declared with a type."""
    for node in statements(body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def symbols(source: bytes) -> dict[str, str]:
    """The names of each class, in their order, with a space between them; those of no class are
    under ""."""
    tree = ast.parse(source)
    found = {"": " ".join(dict.fromkeys(names_in(tree.body)))}
    for node in statements(tree.body):
        if isinstance(node, ast.ClassDef):
            found[node.name] = " ".join(dict.fromkeys(names_in(node.body)))
    return {name: names for name, names in found.items() if name or names}


def version_of(path: Path) -> str:
    """A wheel's name has its version; beside a package lies a folder that has it."""
    names = (
        [path.name] if path.is_file() else [p.name for p in path.parent.glob("vllm-*.dist-info")]
    )
    found = [match[1] for name in names if (match := re.match(r"vllm-([\d.]+\d)", name))]
    if len(found) != 1:
        raise ValueError(f"{path} does not say which version it is")
    return found[0]


def measure(path: Path) -> dict:
    """The report on one version."""
    files = {name: symbols(source) for name, source in sources(path) if is_kept(name)}
    if not files:
        raise ValueError(f"{path} has no files of vLLM")
    report = environment() | {"device": "none: source is read", "version": version_of(path)}
    report["date"] = datetime.now(timezone.utc).date().isoformat()
    report["files"] = {name: files[name] for name in sorted(files) if files[name]}
    return report


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("path", type=Path, help="a wheel, or the folder vllm of an unpacked one")
    args = parser.parse_args()
    try:
        report = measure(args.path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise SystemExit(str(error)) from error
    num_names = sum(
        len(names.split()) for file in report["files"].values() for names in file.values()
    )
    print(f"vLLM {report['version']}: {len(report['files'])} files, {num_names} names")
    write_json(report, args.json)


if __name__ == "__main__":
    main()
