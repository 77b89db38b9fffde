# SPDX-License-Identifier: Apache-2.0
"""How long a call takes on the device, without its dispatch; for the suite kernels and the tuner.

Calls stand one after another in one program. What a call is given passes a barrier together with
what the call before it gave, so that calls neither overlap nor are found to be the same one, and
nothing of them is done ahead of the loop. In service no weight or page is in a cache from the call
before: calls take several copies of their arguments in turn, unless these are larger than caches.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scripts.benchmarks.rounds import Figures

Call = Callable[..., Any]
LEAST_S = 0.05  # of a run: dispatch and the clock no longer show
FIRST_CALLS, MOST_CALLS = 8, 20_000
CACHE_BYTES, MOST_COPIES = 128 * 2**20, 4
IN_PLACE = ("kv_write",)  # of operations: the first argument is what comes back


class Contender(NamedTuple):
    """Something to be timed: `make` gives its arguments, anew for each run, on the device, so that
    no two contenders' have to be in memory at once. in_place: the first is what comes back."""

    call: Call
    make: Callable[[], Any]
    in_place: bool = False

    @property
    def copies(self) -> int:
        """How many of its arguments a run takes in turn."""
        given = jax.tree.leaves(jax.eval_shape(self.make))
        size = sum(array.size * array.dtype.itemsize for array in given)
        return 1 if self.in_place else min(MOST_COPIES, -(-CACHE_BYTES // max(size, 1)))


class Program(NamedTuple):
    """`calls` calls in a row, compiled, of so many copies of arguments."""

    run: Callable[..., Any]
    calls: int
    copies: int


def chained(call: Call, loops: int, in_place: bool = False) -> Call:
    """Returns the function of (first argument, others) or (None, copies of all arguments) that does
    `call` so often with each copy, one after another. It gives the first argument as it is then, or
    the last result with each copy: a result that nobody asks for need not be computed.

    A new function each time: jax traces it, and asks for block sizes, anew.
    """

    def in_turn(_: Any, carry: Any) -> Any:
        copies, results = carry[0], []
        for place in range(len(copies)):
            copies, result = jax.lax.optimization_barrier((copies, call(*copies[place])))
            results.append(result)
        return copies, results

    def again(_: Any, carry: Any) -> Any:
        first, others = carry
        return jax.lax.optimization_barrier((call(first, *others), others))

    def run(first: Any, others: Any) -> Any:
        # The number of loops is known to the compiler: a GPU's then asks no host to go on.
        if in_place:
            return jax.lax.fori_loop(0, loops, again, (first, others))[0]
        nothing = [jax.tree.map(unlike, jax.eval_shape(call, *given)) for given in others]
        return jax.lax.fori_loop(0, loops, in_turn, (others, nothing))[1]

    return run


def unlike(array: Any) -> jax.Array:
    """Returns an array as no result is: one that nothing is written to is then found out."""
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    return jnp.full(array.shape, jnp.nan if is_float else 0, array.dtype)


def given(contender: Contender, copies: int) -> Any:
    """Returns what a program is run with."""
    if contender.in_place:
        first, *others = contender.make()
        return first, tuple(others)
    return None, tuple(contender.make() for _ in range(copies))


def compiled(contender: Contender, calls: int) -> Program:
    """Returns the program of so many calls, or a few more; raises whatever the compiler does."""
    copies = contender.copies
    loops = -(-calls // copies)
    run = chained(contender.call, loops, contender.in_place)
    arguments = jax.eval_shape(lambda: given(contender, copies))
    donated = 0 if contender.in_place else ()
    made = jax.jit(run, donate_argnums=donated).lower(*arguments).compile()
    return Program(made, loops * copies, copies)


def timed_twice(contender: Contender, program: Program) -> tuple[float, Any]:
    """Returns (seconds of a run, the last call's result), after one to warm up."""
    first, others = jax.block_until_ready(given(contender, program.copies))
    result = jax.block_until_ready(program.run(first, others))
    if contender.in_place:
        first = result
    del result
    begin = time.perf_counter()
    result = jax.block_until_ready(program.run(first, others))
    seconds = time.perf_counter() - begin
    return seconds, result if contender.in_place else result[-1]


def long_enough(contender: Contender, least_s: float | None = None) -> tuple[Program, Any]:
    """Returns (a program of as many calls as take LEAST_S, or thereabouts; the last result)."""
    least_s = LEAST_S if least_s is None else least_s
    calls = FIRST_CALLS
    while True:
        program = compiled(contender, calls)
        seconds, result = timed_twice(contender, program)
        if seconds >= least_s / 2 or calls >= MOST_CALLS:
            return program, result
        del result
        # Dispatch is part of a short run: it may take another, longer one to see the calls.
        calls = min(MOST_CALLS, max(2 * calls, round(calls * least_s / seconds)))


def timed(contender: Contender, program: Program) -> Figures:
    """Returns the seconds of a call."""
    return {"seconds": timed_twice(contender, program)[0] / program.calls}


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
