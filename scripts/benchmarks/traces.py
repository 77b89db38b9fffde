# SPDX-License-Identifier: Apache-2.0
"""Requests with known sharing, and the most of it that a cache can have.

A trace is a list of requests in the order of arrival, the same for generators of the same seed.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

VOCABULARY = 30_000  # so many that what is drawn apart begins alike only by chance

Span = tuple[int, int]  # the least and the most of something
Trie = dict[int, "Trie"]


class TracedRequest(NamedTuple):
    """One request. Its prompt: all of the request `follows`, its output too, and then `tokens`.

    follows: an index of the trace, of an earlier request that is to have ended; None: of none.
    """

    tokens: list[int]
    new_tokens: int
    follows: int | None = None


Trace = list[TracedRequest]


class Lengths(NamedTuple):
    """Tokens of what requests share, of what each says itself, and of each output."""

    shared: Span
    own: Span
    new: Span


def few_shot(rng: random.Random, count: int, heads: int, lengths: Lengths) -> Trace:
    """Returns requests that begin with one of some heads; with one, with a system prompt."""
    shared = [message(rng, lengths.shared) for _ in range(heads)]
    return [
        TracedRequest(rng.choice(shared) + message(rng, lengths.own), rng.randint(*lengths.new))
        for _ in range(count)
    ]


def chats(rng: random.Random, count: int, users: int, lengths: Lengths) -> Trace:
    """Returns turns of some users, in any order: the user's whole talk so far, and a message.

    All talks begin with one system prompt.
    """
    system = message(rng, lengths.shared)
    trace: Trace = []
    last: dict[int, int] = {}
    for index in range(count):
        user = rng.randrange(users)
        tokens = message(rng, lengths.own)
        if user not in last:
            tokens = system + tokens
        trace.append(TracedRequest(tokens, rng.randint(*lengths.new), last.get(user)))
        last[user] = index
    return trace


def thoughts(rng: random.Random, count: int, branches: int, lengths: Lengths) -> Trace:
    """Returns a tree of thoughts, which grows anywhere: up to so many go on from each.

    The problem is shared; each further thought begins with one and the same instruction.
    """
    problem, instruction = message(rng, lengths.shared), message(rng, lengths.shared)
    trace = [TracedRequest(problem, rng.randint(*lengths.new))]
    places = [0] * branches
    while len(trace) < count:
        parent = places.pop(rng.randrange(len(places)))
        places += [len(trace)] * branches
        tokens = instruction + message(rng, lengths.own)
        trace.append(TracedRequest(tokens, rng.randint(*lengths.new), parent))
    return trace


def message(rng: random.Random, length: Span) -> list[int]:
    """Returns random tokens."""
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(*length))]


def most_hit_tokens(ran: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Returns how many prompt tokens a cache of any size can have had, token by token.

    ran: prompt and output of each request, in the order in which they ran. A token counts if one
    before stored it behind the same tokens. The last token of a prompt is always computed, for its
    logits, and that of an output is never stored.
    """
    root: Trie = {}
    hits = 0
    for prompt, output in ran:
        node: Trie | None = root
        for token in prompt[:-1]:
            node = node.get(token) if node is not None else None
            hits += node is not None
        node = root
        for token in [*prompt, *output[:-1]]:
            node = node.setdefault(token, {})
    return hits
