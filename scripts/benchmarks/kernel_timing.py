# SPDX-License-Identifier: Apache-2.0
"""How long a call takes on the device, without its dispatch; for the suite kernels and the tuner.

Calls stand one after another in one program. What a call is given passes a barrier together with
what the call before it gave, so that calls neither overlap nor are found to be the same one, and
nothing of them is done ahead of the loop.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scripts.benchmarks.rounds import Figures

Call = Callable[..., Any]
LEAST_S = 0.05  # of a run: dispatch and the clock no longer show
FIRST_CALLS, MOST_CALLS = 4, 20_000
IN_PLACE = ("kv_write",)  # of operations: the first argument is what comes back


class Program(NamedTuple):
    """`calls` calls in a row, compiled; `in_place`: the first argument is donated."""

    run: Callable[..., Any]
    calls: int
    in_place: bool


class Contender(NamedTuple):
    """Something to be timed: `make` gives its arguments, anew for each run, on the device.

    So that no two contenders' arguments have to be in memory at once.
    """

    call: Call
    make: Callable[[], Any]
    in_place: bool = False


def chained(call: Call, calls: int, in_place: bool = False) -> Call:
    """Returns the function of `call`'s arguments that does it so often and gives the last result.

    A new function each time: jax traces it, and asks for block sizes, anew.
    """

    def run(*arguments: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            given, _ = carry
            result = call(*given)
            if in_place:
                return jax.lax.optimization_barrier(((result, *given[1:]), None))
            return jax.lax.optimization_barrier((given, result))

        nothing = None if in_place else jax.tree.map(unlike, jax.eval_shape(call, *arguments))
        # The number of calls is known to the compiler: a GPU's loop then asks no host to go on.
        given, result = jax.lax.fori_loop(0, calls, step, (arguments, nothing))
        return given[0] if in_place else result

    return run


def unlike(array: Any) -> jax.Array:
    """Returns an array as no result is: one that nothing is written to is then found out."""
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    return jnp.full(array.shape, jnp.nan if is_float else 0, array.dtype)


def compiled(call: Call, arguments: Any, calls: int, in_place: bool = False) -> Program:
    """Returns the program of so many calls; raises whatever the compiler does."""
    donated = 0 if in_place else ()
    made = jax.jit(chained(call, calls, in_place), donate_argnums=donated)
    return Program(made.lower(*arguments).compile(), calls, in_place)


def seconds_once(program: Program, arguments: Any) -> tuple[float, Any]:
    """Returns (seconds of one run, what it gave); of arguments that may be donated."""
    jax.block_until_ready(arguments)
    begin = time.perf_counter()
    result = jax.block_until_ready(program.run(*arguments))
    return time.perf_counter() - begin, result


def long_enough(contender: Contender, least_s: float | None = None) -> Program:
    """Returns a program of as many calls as take LEAST_S, or thereabouts."""
    least_s = LEAST_S if least_s is None else least_s
    calls = FIRST_CALLS
    while True:
        arguments = contender.make()
        program = compiled(contender.call, arguments, calls, contender.in_place)
        seconds, result = seconds_once(program, arguments)
        if not contender.in_place:
            seconds = min(seconds, seconds_once(program, arguments)[0])
        del arguments, result
        if seconds >= least_s / 2 or calls >= MOST_CALLS:
            return program
        # Dispatch is part of a short run: it may take another, longer one to see the calls.
        calls = min(MOST_CALLS, max(2 * calls, round(calls * least_s / seconds)))


def timed(contender: Contender, program: Program) -> Figures:
    """Returns the seconds of a call in one run, after one to warm up."""
    arguments = contender.make()
    result = seconds_once(program, arguments)[1]
    if program.in_place:
        arguments = (result, *arguments[1:])
    del result
    return {"seconds": seconds_once(program, arguments)[0] / program.calls}


def difference(found: Any, wanted: Any) -> float:
    """Returns the largest difference of two results as a share of the largest number wanted.

    NaN where either is not finite.
    """

    @jax.jit
    def share(one: Any, other: Any) -> jax.Array:
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        return jnp.max(jnp.abs(one - other)) / jnp.maximum(jnp.max(jnp.abs(other)), 1e-30)

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    shares = [float(share(one, other)) for one, other in pairs if one.size]
    return float("nan") if any(part != part for part in shares) else max(shares, default=0.0)


def first_line(error: BaseException) -> str:
    """Returns what an error says first, and of which kind it is."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

