# SPDX-License-Identifier: Apache-2.0
"""What is read from a compiled program: its collectives, temporaries, and what it moves."""

from engine import hlo
from engine.traffic import Collective

HLO = """HloModule jit_program, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%inner_condition (p: (s32[], s32[])) -> pred[] {
  ROOT %lt.1 = pred[] compare(%gte.1, %gte.2), direction=LT
}

%inner (p: (s32[], s32[])) -> (s32[], s32[]) {
  %rows = bf16[8,2,16]{2,1,0:T(2,128)(2,1)} ragged-all-to-all(%a, %b, %c), channel_id=1
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(5), metadata={op_name="x"}
  ROOT %lt.2 = pred[] compare(%gte.3, %constant.3), direction=LT
}

%layer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %psum = f32[4]{0} all-reduce(%x), to_apply=%add
  %w = (s32[], s32[]) while(%tuple.1), condition=%inner_condition, body=%inner
}

%fused (p: f32[999]) -> f32[2] {
  %twice = f32[999]{0} add(%p, %p)
}

%past (p: f32[4]) -> f32[8] {
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), dimensions={0}
  ROOT %d = f32[8]{0} all-gather-done(%g)
}

ENTRY %main.1 (a: f32[4]) -> f32[4] {
  %both = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce(%a, %b), to_apply=%add
  %large = f32[999]{0} parameter(1)
  %near = f32[999]{0:T(128)S(1)} copy(%large)
  %f = f32[2]{0} fusion(%large), kind=kLoop, calls=%fused
  %c = f32[8]{0} conditional(%i, %a, %a), branch_computations={%past, %add}
  ROOT %while.2 = (s32[], f32[4]) while(%tuple.2), condition=%condition, body=%layer
}
"""


def test_collectives_are_counted_as_often_as_their_loop_turns():
    assert hlo.collectives(hlo.parsed(HLO)) == [
        Collective("all-reduce", 1, 4 * 4 + 6 * 2),
        Collective("all-gather", 1, 32),
        Collective("all-reduce", 5, 16),
        Collective("ragged-all-to-all", 5, 8 * 2 * 16 * 2),
    ]


def test_the_largest_temporary_is_no_parameter_and_nothing_fused_or_in_place():
    program = hlo.parsed(HLO)
    assert hlo.largest_temporary(program, 10**6) == 8 * 2 * 16 * 2
    assert hlo.largest_temporary(program, 100) == 32
    assert hlo.largest_temporary(program, 3) == 0


MOVES = """HloModule jit_step, is_scheduled=true

%taken (p: bf16[4,8,16], i: s32[]) -> bf16[8,16] {
  %p.1 = bf16[4,8,16]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %one = bf16[1,8,16]{2,1,0} dynamic-slice(%p.1, %i.1, %i.1, %i.1), dynamic_slice_sizes={1,8,16}
  ROOT %flat = bf16[8,16]{1,0} bitcast(%one)
}

%product (w: bf16[4,8,16], x: bf16[3,16], i: s32[]) -> bf16[3,8] {
  %w.1 = bf16[4,8,16]{2,1,0} parameter(0)
  %x.1 = bf16[3,16]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %layer = bf16[8,16]{1,0} fusion(%w.1, %i.2), kind=kLoop, calls=%taken
  ROOT %dot = bf16[3,8]{1,0:T(8,128)S(1)} dot(%x.1, %layer), lhs_contracting_dims={1}
}

%put (all: f32[10,4], row: f32[1,4], i: s32[]) -> f32[10,4] {
  %all.1 = f32[10,4]{1,0} parameter(0)
  %row.1 = f32[1,4]{1,0} parameter(1)
  %i.3 = s32[] parameter(2)
  ROOT %dus = f32[10,4]{1,0} dynamic-update-slice(%all.1, %row.1, %i.3, %i.3)
}

%turned (t: bf16[100,16]) -> bf16[3,100] {
  %t.1 = bf16[100,16]{1,0} parameter(0)
  %as_is = bf16[100,16]{1,0} fusion(%t.1), kind=kLoop, calls=%same
  ROOT %dot.2 = bf16[3,100]{1,0} dot(%as_is, %as_is)
}

%same (s: bf16[100,16]) -> bf16[100,16] {
  %s.1 = bf16[100,16]{1,0} parameter(0)
  ROOT %b = bf16[100,16]{1,0} bitcast(%s.1)
}

%condition (p: (s32[], bf16[4,8,16])) -> pred[] {
  %constant.3 = s32[] constant(4)
  ROOT %lt = pred[] compare(%gte, %constant.3), direction=LT
}

%layer_body (p: (s32[], bf16[4,8,16])) -> (s32[], bf16[4,8,16]) {
  %i.4 = s32[] get-tuple-element(%p), index=0
  %w.2 = bf16[4,8,16]{2,1,0} get-tuple-element(%p), index=1
  %x.2 = bf16[3,16]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=2
  %fusion.1 = bf16[3,8]{1,0:T(8,128)S(1)} fusion(%w.2, %x.2, %i.4), kind=kOutput, calls=%product
  %kernel = f32[4096]{0} custom-call(%w.2), custom_call_target="tpu_custom_call"
}

ENTRY %main.1 (a: f32[10,4], b: f32[1,4], c: bf16[100,16]) -> f32[10,4] {
  %a.1 = f32[10,4]{1,0} parameter(0)
  %b.1 = f32[1,4]{1,0} parameter(1)
  %c.1 = bf16[100,16]{1,0} parameter(2)
  %i.5 = s32[] parameter(3)
  %start = (bf16[100,16]{1,0:T(8,128)S(1)}, bf16[100,16]{1,0}, u32[]{:S(2)}) copy-start(%c.1)
  %done = bf16[100,16]{1,0:T(8,128)S(1)} copy-done(%start)
  %looked = bf16[2,16]{1,0} gather(%c.1, %i.5), slice_sizes={1,16}
  %all_of_it = bf16[3,100]{1,0} fusion(%c.1), kind=kLoop, calls=%turned
  %w = (s32[], bf16[4,8,16]) while(%tuple.2), condition=%condition, body=%layer_body
  ROOT %put.1 = f32[10,4]{1,0} fusion(%a.1, %b.1, %i.5), kind=kLoop, calls=%put
}
"""


def test_what_is_moved_outside_of_kernels():
    """Slices are read and written as such, a loop's as often as it turns; near memory is free."""
    found = {one.name: one for one in hlo.moved(hlo.parsed(MOVES))}
    figures = {name: (one.times, one.read_bytes, one.written_bytes) for name, one in found.items()}
    assert figures == {
        "start": (1, 100 * 16 * 2, 0),  # into near memory
        "looked": (1, 2 * 16 * 2 + 4, 2 * 16 * 2),
        "all_of_it": (1, 100 * 16 * 2, 3 * 100 * 2),
        "fusion.1": (4, 8 * 16 * 2 + 4, 0),
        "put.1": (1, 4 * 4 + 4, 4 * 4),
    }
    assert found["fusion.1"].operand_bytes == [4 * 8 * 16 * 2, 3 * 16 * 2, 4]
    assert found["all_of_it"].made_bytes == [3 * 100 * 2]
