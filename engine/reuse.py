# SPDX-License-Identifier: Apache-2.0
"""What a waiting request can start with: pages that are kept, or that a running one will store."""

from collections import Counter
from collections.abc import Iterable

from engine.moves import DISK
from engine.prefix_cache import Match
from engine.request import Request, Status
from engine.rows import Rows

COUNTED = ("prompt_tokens", "hits", "hit_tokens", "resumed_tokens", "copied_pages")


class Reuse:
    """Looks up what the cache has of requests, and counts what they took of it."""

    def __init__(self, rows: Rows, page_size: int, num_groups: int) -> None:
        self._rows = rows
        self._page_size = page_size
        self._num_groups = num_groups
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    def stats(self) -> dict[str, int]:
        """Returns tokens of prompts, those of them that were cached, and pages that were copied."""
        return dict(self.counts)

    def cells(self, request: Request) -> int:
        """Returns how many tokens of a request are kept."""
        return self._rows.match(request, request.most_cached).cells

    def best(self, request: Request, available: int, deepest: int = DISK) -> tuple[Match, int]:
        """Returns what the cache has of a request, and the pages that it needs beside."""
        most, rows = request.most_cached, self._rows
        match = rows.match(request, most, deepest)
        need = rows.admission_pages(request) - rows.shared_pages(match)
        if match.source is None:
            return match, need
        # What is copied from is held until it is, beside all that the request needs.
        extra = rows.source_pages(match)
        if need + extra <= available:
            return match, need + extra
        whole = match.cells // self._page_size * self._page_size
        match = rows.match(request, whole, deepest)
        return match, rows.admission_pages(request) - rows.shared_pages(match)

    def lift(self, request: Request, match: Match, most: int) -> tuple[bool, int]:
        """Brings up to `most` pages of a match to the device.

        Returns whether all of it is there, or as much as can be, and how many pages are moved.
        """
        if most <= 0:
            return False, 0
        taken, is_coming = self._rows.lift(match, most)
        again = self._rows.match(request, match.cells)
        return not again.low or not (taken or is_coming), taken

    def follows(self, request: Request) -> bool:
        """Whether `request` still waits for what a running one is about to store."""
        if request.leader is None:
            return False
        other, admission, cells = request.leader
        same = other.status is Status.RUNNING and other.admissions == admission
        if same and other.stored < cells and other.tip is not None and other.tip.node is not None:
            return True
        request.leader = None
        return False

    def finds_leader(self, request: Request, match: Match, running: Iterable[Request]) -> bool:
        """Whether a running request is about to store a page more of its tokens than there are.

        So those that arrive together with one prefix compute it once.
        """
        for other in running:
            tip = other.tip
            if tip is None or other.stored >= other.target:
                continue
            if self._rows.cache.stands_at(tip, request.cache_space, match):
                cells = self._rows.common_tokens(request, other, request.most_cached)
                if cells - match.cells >= self._page_size:
                    last = self._rows.page_end(cells - 1)
                    request.leader = other, other.admissions, min(last, other.target)
                    return True
        return False

    def count(self, request: Request, match: Match) -> None:
        """Counts what a request starts with."""
        if request.cached_tokens is None:
            request.cached_tokens = min(match.cells, len(request.prompt_token_ids))
            self.counts["prompt_tokens"] += len(request.prompt_token_ids)
            self.counts["hit_tokens"] += request.cached_tokens
            self.counts["hits"] += match.cells > 0
        else:
            self.counts["resumed_tokens"] += match.cells
        self.counts["copied_pages"] += self._num_groups * (match.source is not None)
