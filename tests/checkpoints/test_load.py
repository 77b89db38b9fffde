# SPDX-License-Identifier: Apache-2.0
"""Each parameter is written exactly once, from the tensors its source names, or the load fails."""

import logging
import random

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import checkpoints
from checkpoints.load import load_parameters, warn_of_unused
from checkpoints.sources import Source, Target
from tests.checkpoints.gguf_files import write_gguf

LAYERS = 3


def tensors_of_a_model():
    rng = np.random.default_rng(0)
    shapes = {"embed": (10, 8), "norm": (8,)}
    shapes |= {f"layers.{i}.w": (6, 8) for i in range(LAYERS)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors_of_a_model(), tmp_path / "model.safetensors")
    return checkpoints.open_checkpoint(tmp_path)


def turn(array):
    return np.ascontiguousarray(array.T)


def table():
    """Returns sources and targets that fit the model, with a stack and a transform."""
    layers = tuple(f"layers.{i}.w" for i in range(LAYERS))
    sources = {
        "embed": Source(("embed",)),
        "norm": Source(("norm",), lambda array: array - 1),
        "layers/w": Source(layers, turn, stack=True),
    }
    targets = {
        "embed": Target((10, 8), jnp.float32),
        "norm": Target((8,), jnp.float32),
        "layers/w": Target((LAYERS, 8, 6), jnp.float32),
    }
    return sources, targets


def never_put(monkeypatch):
    """Makes taking device memory an error."""

    def put(*_):
        raise AssertionError("device memory was taken")

    monkeypatch.setattr(jax, "device_put", put)


def test_parameters_are_read_transformed_and_stacked(checkpoint):
    stored = tensors_of_a_model()
    parameters = load_parameters(checkpoint, *table())
    assert parameters.keys() == {"embed", "norm", "layers/w"}
    np.testing.assert_array_equal(parameters["embed"], stored["embed"])
    np.testing.assert_array_equal(parameters["norm"], stored["norm"] - 1)
    for i in range(LAYERS):
        np.testing.assert_array_equal(parameters["layers/w"][i], stored[f"layers.{i}.w"].T)


def test_the_targets_type_and_sharding_are_followed(checkpoint):
    sources, targets = table()
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "tensor", "data"))
    targets["layers/w"] = Target((LAYERS, 8, 6), jnp.bfloat16, sharding)
    parameter = load_parameters(checkpoint, sources, targets)["layers/w"]
    assert parameter.dtype == jnp.bfloat16 and parameter.sharding == sharding
    expected = np.stack([tensors_of_a_model()[f"layers.{i}.w"].T for i in range(LAYERS)])
    np.testing.assert_array_equal(parameter, expected.astype(jnp.bfloat16))


def change(**changes):
    def apply(sources, targets):
        for path, (source, target) in changes.items():
            for table, value in ((sources, source), (targets, target)):
                if value is None:
                    table.pop(path, None)
                else:
                    table[path] = value

    return apply


EMBED, NORM = Target((10, 8), jnp.float32), Target((8,), jnp.float32)


def upto(start, stop):
    return Source(("embed",), rows=(start, stop))


def rows(count):
    return Target((count, 8), jnp.float32)


WRONG = {
    "missing tensor": (
        change(embed=(Source(("embedding",)), EMBED)),
        "tensors are missing: embedding",
    ),
    "tensor used by two": (
        change(again=(Source(("embed",)), EMBED)),
        "tensor 'embed' is used twice, by parameters embed and again",
    ),
    "tensor used twice in a stack": (
        change(again=(Source(("norm",) * 2, None, True), Target((2, 8), jnp.float32))),
        "tensor 'norm' is used twice",
    ),
    "mis-shaped": (
        change(embed=(Source(("embed",)), Target((8, 10), jnp.float32))),
        r"tensor 'embed' has shape \(10, 8\); parameter embed needs \(8, 10\)",
    ),
    "mis-shaped after the transform": (
        change(embed=(Source(("embed",), turn), EMBED)),
        r"'embed' has shape \(10, 8\), after its transform \(8, 10\); parameter embed needs",
    ),
    "transform that cannot be": (
        change(embed=(Source(("embed",), lambda a: a.reshape(7, -1)), EMBED)),
        r"tensor 'embed' of shape \(10, 8\) does not suit its transform",
    ),
    "stack of another height": (
        change(norm=(Source(("norm",), None, True), Target((2, 8), jnp.float32))),
        r"parameter norm of shape \(2, 8\) is stacked from 1 tensors",
    ),
    "two without a stack": (
        change(norm=(Source(("norm", "embed")), NORM), embed=(None, None)),
        "parameter norm: 2 tensors, but no stack",
    ),
    "rows of two parameters": (
        change(embed=(None, None), a=(upto(0, 6), rows(6)), b=(upto(5, 10), rows(5))),
        r"tensor 'embed' has shape \(10, 8\); its parts are rows 0 to 6, 5 to 10",
    ),
    "rows of none": (
        change(embed=(None, None), a=(upto(0, 6), rows(6)), b=(upto(7, 10), rows(3))),
        "its parts are rows 0 to 6, 7 to 10",
    ),
    "rows beyond the last": (
        change(embed=(None, None), a=(upto(0, 6), rows(6)), b=(upto(6, 12), rows(6))),
        "its parts are rows 0 to 6, 6 to 12",
    ),
    "target without source": (change(norm=(None, NORM)), "parameters without a source: norm"),
    "source without target": (
        change(norm=(Source(("norm",)), None)),
        "sources without a parameter: norm",
    ),
}


def test_parameters_cut_from_one_tensor_have_their_rows(checkpoint, monkeypatch):
    sources, targets = table()
    change(embed=(None, None), b=(upto(4, 10), rows(6)), a=(upto(0, 4), rows(4)))(sources, targets)
    whole, reads, read = checkpoint.read("embed"), [], checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda name: reads.append(name) or read(name))
    loaded = load_parameters(checkpoint, sources, targets)
    assert reads.count("embed") == 1
    np.testing.assert_array_equal(loaded["a"], whole[:4])
    np.testing.assert_array_equal(loaded["b"], whole[4:])


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_before_device_memory_is_taken(checkpoint, monkeypatch, case):
    apply, message = WRONG[case]
    sources, targets = table()
    apply(sources, targets)
    never_put(monkeypatch)
    with pytest.raises(ValueError, match=message) as caught:
        load_parameters(checkpoint, sources, targets)
    assert "\n" not in str(caught.value)


def test_a_sharding_that_does_not_divide_is_refused_first(checkpoint, monkeypatch):
    sources, targets = table()
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("tensor"))
    targets["embed"] = Target((10, 8), jnp.float32, sharding)
    never_put(monkeypatch)
    with pytest.raises(ValueError, match="parameter embed cannot be sharded so"):
        load_parameters(checkpoint, sources, targets)


def test_many_missing_tensors_make_one_short_line(checkpoint):
    sources = {f"p{i}": Source((f"t{i}",)) for i in range(9)}
    with pytest.raises(ValueError, match="tensors are missing: t0, t1, t2, t3 and 5 more"):
        load_parameters(checkpoint, sources, dict.fromkeys(sources, NORM))


def test_extra_tensors_are_one_warning_unless_ignored(checkpoint, caplog):
    sources, targets = table()
    del sources["norm"], targets["norm"]
    with caplog.at_level(logging.WARNING):
        warn_of_unused(checkpoint, sources)
    assert "tensors that no parameter needs: norm" in caplog.text
    caplog.clear()
    warn_of_unused(checkpoint, sources, ignored=["norm"])
    assert caplog.text == ""


@pytest.mark.parametrize("seed", range(10))
def test_any_table_loads_each_parameter_once_or_fails(checkpoint, monkeypatch, seed):
    """Tables with random faults: either all parameters come, each from a read of its own tensors
    and one transfer, or nothing is read at all."""
    rng = random.Random(seed)
    sources, targets = table()
    for path in list(sources):
        fault = rng.randrange(8)
        if fault == 0:
            del sources[path]
        elif fault == 1:
            targets[path] = targets[path]._replace(shape=(*targets[path].shape, 1))
        elif fault == 2:
            sources[path] = sources[path]._replace(names=("embed",))
    reads, puts, put = [], [], jax.device_put
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda name: reads.append(name) or read(name))
    monkeypatch.setattr(jax, "device_put", lambda *a: puts.append(a) or put(*a))
    try:
        parameters = load_parameters(checkpoint, sources, targets)
    except ValueError:
        assert not reads and not puts
        return
    assert parameters.keys() == targets.keys() and len(puts) == len(targets)
    assert sorted(reads) == sorted(name for s in sources.values() for name in s.names)
    for path, target in targets.items():
        assert (parameters[path].shape, parameters[path].dtype) == (target.shape, target.dtype)


def test_parameters_from_a_gguf_file_outlive_it(tmp_path):
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    quantized = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    path = write_gguf(
        tmp_path / "m.gguf",
        {
            "plain": (values, gguf.GGMLQuantizationType.F32),
            "coded": (quantized, gguf.GGMLQuantizationType.Q8_0),
        },
        # So aligned, the CPU device would take a view of the file as it is.
        [("add_custom_alignment", 4096)],
    )
    names = ("plain", "coded")
    parameters = load_parameters(
        checkpoints.open_checkpoint(path),
        {name: Source((name,)) for name in names},
        {name: Target((64, 64), jnp.float32) for name in names},
    )
    # A parameter that were a view of the mapped file would see this.
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    np.testing.assert_array_equal(parameters["plain"], values)
    expected = gguf.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(parameters["coded"], expected)
