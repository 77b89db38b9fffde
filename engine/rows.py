# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch and their pages: what running requests hold, and what the device is told."""

from collections.abc import Sequence

import numpy as np

from engine.pages import NULL_PAGE, PageGroup, PagePool
from engine.request import Request

_PARTITION = 0  # the scheduler plans one partition


class Rows:
    """Rows and pages of the running requests, mirrored in two arrays as they change.

    tables: int32 [group, row, place], the page of each place; the null page where there is none.
    lengths: int32 [group, row], cells in use.
    Row `max_num_seqs` is the null row of both, always zero. A row's pages are in place order, so
    place p of a table holds cells p * page_size and on. A windowed group frees a page once no
    later query sees any of its cells; the places keep their numbers.
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
        never_narrow: bool = False,
    ):
        assert pool.num_partitions == 1, "pages of one request over partitions are not planned"
        self._page_size = page_size
        self._step_tokens = step_tokens
        self._groups = tuple(groups)
        self._pool = pool
        self._never_narrow = never_narrow
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._passed = [[0] * max_num_seqs for _ in groups]  # places freed, by group and row
        pages_per_row = -(-max_model_len // page_size)
        self.tables = np.zeros((len(groups), max_num_seqs + 1, pages_per_row), np.int32)
        self.lengths = np.zeros((len(groups), max_num_seqs + 1), np.int32)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free(_PARTITION)

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
        if self._never_narrow:
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

    def open(self, request: Request) -> None:
        """Gives `request` a row without pages."""
        request.row = self._free_rows.pop()
        request.pages = [[] for _ in self._groups]

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
                self._pool.release(_PARTITION, group, pages[passed:first])
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
        self.lengths[:, rows] += cells

    def close(self, request: Request) -> None:
        """Frees the row and pages of `request`.

        Steps planned before may still write to them: the device runs steps in order, so whoever
        takes the pages next writes after that.
        """
        row = request.running_row
        for group, pages in enumerate(request.pages):
            self._pool.release(_PARTITION, group, pages[self._passed[group][row] :][::-1])
            self.tables[group, row, : len(pages)] = NULL_PAGE
            self._passed[group][row] = 0
        self.lengths[:, row] = 0
        request.pages = [[] for _ in self._groups]
        request.quiet_cells = 0
        request.row = None
        self._free_rows.append(row)
