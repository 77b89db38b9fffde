# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch and their pages: what running requests hold, and what the device is told."""

from collections.abc import Sequence

import numpy as np

from engine.moves import DEVICE, DISK, Delete, Load, Move, Save
from engine.pages import NULL_PAGE, PageGroup, PagePool
from engine.prefix_cache import Match, PrefixCache
from engine.radix import Tip, common_tokens, page_key
from engine.request import Request

_PARTITION = 0  # the scheduler plans one partition
_NEVER = 1 << 62


class Rows:
    """Rows and pages of the running requests, mirrored in two arrays as they change.

    tables: int32 [group, row, place], the page of each place; the null page where there is none.
    lengths: int32 [group, row], cells in use.
    Row `max_num_seqs` is the null row of both, always zero. A row's pages are in place order, so
    place p of a table holds cells p * page_size and on. A windowed group frees a page once no
    later query sees any of its cells; the places keep their numbers.

    With `prefix_cache`, a row begins with the pages that the cache has of its request, and gives
    it each page that is full once the step that filled it was read, so that nothing of a step that
    failed is kept. Without, nothing is kept. `lower`: the pools of the tiers below the device.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_num_seqs: int,
        page_size: int,
        max_model_len: int,
        step_tokens: int,
        groups: Sequence[PageGroup],
        pool: PagePool,
        chunk: int = 1,
        pinned: bool = False,
        prefix_cache: bool = False,
        lower: Sequence[PagePool] = (),
    ):
        assert pool.num_partitions == 1, "pages of one request over partitions are not planned"
        self._page_size = page_size
        self._step_tokens = step_tokens
        self._groups = tuple(groups)
        self._pool = pool
        self._chunk = chunk
        self._pinned = pinned
        self._prefix_cache = prefix_cache
        self.cache = PrefixCache(groups, page_size, (pool, *lower))
        self._copies: dict[Request, list[Move]] = {}
        self._pins: list[tuple[Tip, list[int]]] = []
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._passed = [[0] * max_num_seqs for _ in groups]  # places freed, by group and row
        pages_per_row = -(-max_model_len // page_size)
        self.tables = np.zeros((len(groups), max_num_seqs + 1, pages_per_row), np.int32)
        self.lengths = np.zeros((len(groups), max_num_seqs + 1), np.int32)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def keeps(self) -> bool:
        """Whether pages are kept."""
        return self._prefix_cache

    @property
    def num_free_pages(self) -> int:
        """Pages that can be taken, those included that only the cache has."""
        return self._pool.num_available(_PARTITION)

    def least_pages(self, cells: int) -> int:
        """Returns the most pages ever held at once while cells up to `cells` are written.

        That is with steps that end at the latest where a page does, which take the fewest pages:
        the peak is at the start of the last page, when the ones before the window are gone.
        """
        query = (cells - 1) // self._page_size * self._page_size
        last = query // self._page_size
        return sum(last + 1 - g.first_cell(query) // self._page_size for g in self._groups)

    def step_pages(self, cells: int) -> int:
        """Returns a bound on the pages held while chunks of any length a step has are written."""
        whole = -(-cells // self._page_size)
        total = 0
        for group in self._groups:
            if group.window is None:
                total += whole
            else:  # window - 1 cells before a step's first and the step's own, in any alignment
                total += min(whole, (group.window + self._step_tokens - 3) // self._page_size + 2)
        return total

    def is_narrow(self, cells: int) -> bool:
        """Whether the pool only fits `cells` if each step writes within one page."""
        return self.step_pages(cells) > self._pool.capacity

    def fits(self, cells: int) -> bool:
        """Whether a request of `cells` cells fits an empty pool."""
        if self._pinned:
            return not self.is_narrow(cells)
        return self.least_pages(cells) <= self._pool.capacity

    def admission_pages(self, request: Request) -> int:
        """Returns the pages to have before `request` starts: its known tokens and the next one.

        Where only the known tokens fit the pool, the whole pool will do.
        """
        cells = min(request.known + 1, request.most_cells)
        if self.is_narrow(request.known):
            need = self.least_pages(cells)
        else:
            need = self.step_pages(cells)
        return min(need, self._pool.capacity)

    def promised_pages(self, request: Request) -> int:
        """Returns the pages that running `request` will still take: for its chunks, or one ahead.

        The page ahead keeps a newcomer from being preempted as soon as a decode crosses a page.
        """
        if request.prefills:
            need = self.admission_pages(request)
        else:
            need = self.least_pages(min(request.length + self._page_size, request.most_cells))
        row = request.running_row
        held = sum(
            len(pages) - passed[row]
            for pages, passed in zip(request.pages, self._passed, strict=True)
        )
        return max(0, need - held)

    def page_end(self, cell: int) -> int:
        """Returns the first cell after the page of `cell`."""
        return (cell // self._page_size + 1) * self._page_size

    def match(self, request: Request, most: int, deepest: int = DISK) -> Match:
        """Returns what the cache has of the known tokens of `request`, at most `most` of them.

        Of the tiers down to `deepest`.
        """
        if not self._prefix_cache or most <= 0:
            return self.cache.nothing()
        if self._pinned:  # a chunk begins where chunks begin, and no part of a page is copied
            grain = max(self._page_size, self._chunk)
            most = min(most, len(request.prompt_token_ids)) // grain * grain
        size, keys = self._page_size, request.page_keys
        self._add_keys(request, request.known // size)
        del keys[request.known // size :]  # of outputs that are drawn again
        rest = page_key(request.tokens(len(keys) * size, request.known))
        return self.cache.match(request.cache_space, keys, rest, most, deepest)

    def lift(self, match: Match, most: int) -> tuple[int, bool]:
        """Brings up what a match has below the device; see `Tiers.lift`."""
        return self.cache.tiers.lift(match.low, most)

    def _add_keys(self, request: Request, places: int) -> None:
        """Brings the keys of a request up to so many pages."""
        keys, size = request.page_keys, self._page_size
        for start in range(len(keys) * size, places * size, size):
            keys.append(page_key(request.tokens(start, start + size)))

    def shared_pages(self, match: Match) -> int:
        """Returns how many pages of a match others hold, so that they take none from the pool."""
        places = sum(count for node, count in match.path if node.tier == DEVICE)
        return sum(self._pool.num_held(_PARTITION, pages[:places]) for pages in match.pages)

    def source_pages(self, match: Match) -> int:
        """Returns how many pages nobody holds are pinned while part of a page is copied."""
        assert match.source is not None
        node, index = match.source
        numbers = [pages[index] for pages in node.nearest]
        below = node.tier != DEVICE
        return sum(below or not self._pool.is_held(_PARTITION, number) for number in numbers)

    def common_tokens(self, request: Request, other: Request, most: int) -> int:
        """Returns how many of `most` tokens of `request` the cache has once `other` is computed.

        They are the same as far as the cache has those of `other` now.
        """
        place, size = other.sealed, self._page_size
        one, two = request.page_keys, other.page_keys
        last = min(len(one), len(two), other.target // size)
        while place < last and one[place] == two[place]:
            place += 1
        start = min(place * size, most)
        if self._pinned:
            return start // max(size, self._chunk) * max(size, self._chunk)
        stop = min(start + size, most, other.target)
        if start >= stop:
            return start
        pair = (page_key(each.tokens(start, stop)) for each in (request, other))
        return start + common_tokens(*pair)

    def open(self, request: Request, match: Match) -> None:
        """Gives `request` a row with the pages of `match`; the part of a page is to be copied."""
        request.row = row = self._free_rows.pop()
        request.pages, places = match.pages, len(match.pages[0])
        request.computed = request.opened = request.stored = match.cells
        request.sealed, request.seal_at = places, _NEVER
        self.lengths[:, row] = match.cells
        for group, pages in enumerate(match.pages):
            passed = min(places, self._groups[group].first_cell(match.cells) // self._page_size)
            self._passed[group][row] = passed
            self.cache.kept.hold(group, pages[passed:])
            self.tables[group, row, :places] = pages
        if self._prefix_cache:
            request.tip = self.cache.enter(request.cache_space, match)
        if match.source is not None:
            pin = self.cache.pin(match.source)
            self._pins.append(pin)
            self.extend(request, match.cells)
            own = [pages[places] for pages in request.pages]
            copies = [Move("copy", *pair) for pair in zip(pin[1], own, strict=True)]
            self._copies[request] = copies
            self.cache.kept.moves += copies

    def take_moves(self) -> tuple[Move | Save | Load | Delete, ...]:
        """Returns, once, what is to be moved before the step that is planned now, in order."""
        moves = tuple(self.cache.kept.moves)
        self.cache.kept.moves.clear()
        self._copies.clear()
        for pin in self._pins:
            self.cache.unpin(*pin)
        self._pins.clear()
        return moves

    def missing_pages(self, request: Request, cells: int) -> int:
        """Returns the pages to take until `request` has `cells` cells in every group."""
        places = -(-cells // self._page_size)
        return sum(max(0, places - len(pages)) for pages in request.pages)

    def extend(self, request: Request, cells: int) -> None:
        """Takes the missing pages of `request` up to `cells` cells; OutOfPages takes none."""
        row, places = request.running_row, -(-cells // self._page_size)
        for group, pages in enumerate(request.pages):
            held = len(pages)
            if places > held:
                self.cache.kept.make_room(places - held)
                pages += self._pool.take(_PARTITION, group, places - held)
                self.tables[group, row, held:places] = pages[held:]
        self._set_quiet(request)

    def drop_passed(self, request: Request) -> None:
        """Frees the windowed pages that no query from `request.computed` on can see.

        To be called before a step of the request is planned, never after: the queries of the
        step itself still read what they see, and another row may write the freed pages in it.
        """
        row = request.running_row
        for group, pages in enumerate(request.pages):
            passed = self._passed[group][row]
            first = self._groups[group].first_cell(request.computed) // self._page_size
            if first > passed:
                self.cache.kept.let_go(group, pages[passed:first])
                pages[passed:first] = [NULL_PAGE] * (first - passed)
                self.tables[group, row, passed:first] = NULL_PAGE
                self._passed[group][row] = first
        self._set_quiet(request)

    def _set_quiet(self, request: Request) -> None:
        """Notes up to which length the row's decodes fit its pages and see all of them."""
        row, size = request.running_row, self._page_size
        cells = min(len(pages) for pages in request.pages) * size
        for group, passed in zip(self._groups, self._passed, strict=True):
            if group.window is not None:
                cells = min(cells, (passed[row] + 1) * size + group.window - 1)
        request.quiet_cells = cells

    def set_lengths(self, request: Request) -> None:
        """Brings the lengths of the row up to what is computed."""
        self.lengths[:, request.running_row] = request.computed

    def grow(self, rows: Sequence[int], cells: int) -> None:
        """Adds `cells` cells to the lengths of the rows."""
        index = np.fromiter(rows, np.intp, len(rows))
        for lengths_R in self.lengths:  # an index beside a slice takes twice as long
            lengths_R[index] += cells

    def store(self, request: Request, cells: int) -> None:
        """Notes that `cells` cells of a row were stored by steps that were read and sound."""
        request.stored = cells
        self.seal(request)
        if cells == request.target:
            self.put_tail(request)  # for others that wait for the same prompt

    def seal(self, request: Request) -> None:
        """Gives the cache the pages of a row that are full."""
        tip, size = request.tip, self._page_size
        if tip is None or tip.node is None:
            request.seal_at = _NEVER
            return
        first, last = request.sealed, self._stored(request) // size
        if first < last:
            self._add_keys(request, last)
            own = [pages[first:last] for pages in request.pages]
            for group, index, number in self.cache.insert(tip, request.page_keys[first:last], own):
                if number != own[group][index] != NULL_PAGE:
                    self._replace(request, group, first + index, number)
            request.sealed = last
        if request.stored >= request.target and not self._pinned:
            request.seal_at = (request.sealed + 1) * size + 1 - len(request.prompt_token_ids)

    def _replace(self, request: Request, group: int, place: int, number: int) -> None:
        """Lets a row share the cache's page in place of its own."""
        self.cache.kept.hold(group, [number])
        self.cache.kept.let_go(group, [request.pages[group][place]])
        request.pages[group][place] = number
        self.tables[group, request.running_row, place] = number

    def _stored(self, request: Request) -> int:
        """Returns the cells whose content is known, of those that the cache may have.

        The last token of a row that decodes may have ended it, and is not stored then. With
        pinned bodies what a decode stored is not what a chunk would have.
        """
        cells = request.stored
        if cells >= request.target:
            cells = max(cells, request.known - 1)
        cells = min(cells, request.known)  # a text that ended it may have cut tokens off
        return min(cells, len(request.prompt_token_ids)) if self._pinned else cells

    def put_tail(self, request: Request) -> None:
        """Leaves the last page of a row, which is not full, for others to copy."""
        start, stop = request.sealed * self._page_size, self._stored(request)
        tip = request.tip
        if tip is not None and tip.node is not None and start < stop and not self._pinned:
            pages = [pages[request.sealed] for pages in request.pages]
            self.cache.put_tail(tip, page_key(request.tokens(start, stop)), pages)

    def forget(self, request: Request) -> None:
        """Keeps nothing more of a row: its numbers are not sound."""
        if request.tip is not None:
            self.cache.detach(request.tip)

    def close(self, request: Request, park: int = 0) -> None:
        """Frees the row and pages of `request`; what of them is full, the cache keeps.

        Up to `park` pages of that are copied to the host at once.

        Steps planned before may still write to them: the device runs steps in order, so whoever
        takes the pages next writes after that.
        """
        row = request.running_row
        for copy in self._copies.pop(request, ()):
            self.cache.kept.moves.remove(copy)
        self.seal(request)
        self.put_tail(request)
        for group, pages in enumerate(request.pages):
            self.cache.kept.let_go(group, pages[self._passed[group][row] :][::-1])
            self.tables[group, row, : len(pages)] = NULL_PAGE
            self._passed[group][row] = 0
        self.lengths[:, row] = 0
        if request.tip is not None:
            last = request.tip.tail or request.tip.node
            if park and last is not None:
                self.cache.tiers.park(last, park)
            self.cache.leave(request.tip)
            request.tip = None
        request.pages = [[] for _ in self._groups]
        request.quiet_cells = 0
        request.row = None
        self._free_rows.append(row)
