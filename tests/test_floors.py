# SPDX-License-Identifier: Apache-2.0
"""Imports run downhill, in no circle, and the host's modules never reach jax."""

import ast
import importlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "sharding", "checkpoints", "engine", "scripts")

# From the ground up. A module belongs to the longest name that it begins with, and may import from
# its own floor and those below.
FLOORS = [
    ["sharding", "checkpoints"],
    ["pallas_kernels"],
    [
        "engine.config",
        "engine.params",
        "engine.template_worker",
        "engine.chips",
        "engine.radix",
        "engine.expert_balance",
    ],
    ["engine.request", "engine.metrics", "engine.pages", "engine.buckets"],
    ["engine.moves", "engine.kept_pages", "engine.tiers", "engine.prefix_cache"],
    ["engine.settings"],
    ["engine.plan", "engine.rows", "engine.reuse", "engine.waiting", "engine.scheduler"],
    ["engine.partitions"],
    ["engine.detokenize", "engine.text", "engine.chat", "engine.log", "engine.memo"],
    ["engine.models.rope", "engine.models.config", "engine.models.stages"],
    ["engine.models.specs", "engine.models.tree"],
    ["engine.vocabulary"],
    ["engine.kv", "engine.layers", "engine.logits", "engine.sampling", "engine.strict"],
    ["engine.experts", "engine.expert_places"],
    ["engine.models"],
    ["engine.pipeline", "engine.rebalance"],
    ["engine.batch", "engine.state", "engine.step_config"],
    ["engine.tokens"],
    ["engine.attend", "engine.step", "engine.loading", "engine.export"],
    ["engine.prompts", "engine.results", "engine.capacity", "engine.listing"],
    ["engine.traffic", "engine.roofline", "engine.hlo"],
    ["engine.program_store", "engine.programs", "engine.host_pages"],
    [
        "engine.memory",
        "engine.fingerprint",
        "engine.segment_file",
        "engine.disk_cache",
        "engine.mover",
    ],
    ["engine.worker"],
    ["engine.company", "engine.loop", "engine.aot"],
    ["engine.deterministic"],
    ["engine.build", "engine.cache_control"],
    ["engine.api", "engine"],
    ["scripts"],
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}

HOST_ONLY = [*(name for floor in FLOORS[2:9] for name in floor), "engine.batch"]


def module_name(path, root):
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_modules(root):
    """Returns {module name: path} of every file of the packages under `root`."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return {module_name(path, root): path for path in paths}


def imported(path, modules):
    """Returns the names that a file imports: modules of ours as precisely as can be told."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in modules else node.module)
    return names


def import_graph(modules):
    return {name: imported(path, modules) - {name} for name, path in modules.items()}


def level(name):
    """Returns the floor of a module, or None when no line of FLOORS covers it."""
    while name not in LEVEL and "." in name:
        name = name.rpartition(".")[0]
    return LEVEL.get(name)


def uphill(graph):
    """Yields a line for each import of a module that stands on a higher floor."""
    for here, names in sorted(graph.items()):
        for there in sorted(names & graph.keys()):
            if level(there) > level(here):
                yield f"{here} (floor {level(here)}) imports {there} (floor {level(there)})"


def find_circle(graph):
    """Returns modules that import one another in a circle, or None."""
    done = set()

    def visit(name, trail):
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for there in sorted(graph[name] & graph.keys()):
            if circle := visit(there, [*trail, name]):
                return circle
        done.add(name)
        return None

    circles = (visit(name, []) for name in sorted(graph))
    return next((circle for circle in circles if circle), None)


def path_to_jax(graph, name, trail=()):
    """Returns the chain of imports by which a module reaches jax, or None.

    The `__init__` of a package that holds a module is not counted: it is the package's, not its.
    """
    trail = (*trail, name)
    for there in sorted(graph[name]):
        if there.split(".")[0] in ("jax", "jaxlib", "flax"):
            return (*trail, there)
        if there in graph and there not in trail:
            if chain := path_to_jax(graph, there, trail):
                return chain
    return None


def test_imports_run_downhill():
    graph = import_graph(find_modules(ROOT))
    assert not list(uphill(graph))


def test_imports_make_no_circle():
    assert find_circle(import_graph(find_modules(ROOT))) is None


def test_host_modules_never_reach_jax():
    graph = import_graph(find_modules(ROOT))
    missing = [name for name in HOST_ONLY if name not in graph]
    assert not missing, f"HOST_ONLY names modules that are gone: {missing}"
    chains = [path_to_jax(graph, name) for name in HOST_ONLY]
    assert not [" -> ".join(chain) for chain in chains if chain]


def test_planted_faults_are_found(tmp_path):
    sources = {
        "engine/config.py": "from engine.loop import run\n",
        "engine/loop.py": "import engine.config\nimport jax\n",
        "sharding/mesh.py": "def f():\n    from scripts import generate\n",
        "scripts/generate.py": "",
    }
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    graph, low = import_graph(find_modules(tmp_path)), LEVEL["engine.config"]
    assert list(uphill(graph)) == [
        f"engine.config (floor {low}) imports engine.loop (floor {LEVEL['engine.loop']})",
        f"sharding.mesh (floor 0) imports scripts.generate (floor {LEVEL['scripts']})",
    ]
    assert find_circle(graph) == ["engine.config", "engine.loop", "engine.config"]
    assert path_to_jax(graph, "engine.config") == ("engine.config", "engine.loop", "jax")


def test_every_module_imports():
    """The peers' scripts run in an environment of their own, with packages we do not have."""
    modules = find_modules(ROOT).keys() - {"scripts.peer_transformers", "scripts.peer_llama_cpp"}
    for name in sorted(modules):
        importlib.import_module(name)
