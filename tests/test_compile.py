"""Every kernel, at every tile the table can give, compiles for Hopper and Blackwell without a GPU, and into the
instructions it was written for: tensor cores, bulk tensor loads, 16-byte accesses, and no spilled register."""

import itertools
import os
import re
import subprocess
import tempfile
from types import SimpleNamespace

import kernels
import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SM_90, SM_100, SM_103 = 90, 100, 103
SHARED = 227 * 1024


def compiled(kernel, sm, args, warps=4, stages=3):
    """`args`: {name: a type, or the value of a constexpr}, in the kernel's order. → ptx, and registers, stack and
    local memory from the cubin, and shared memory."""
    types = {name: a if isinstance(a, str) and re.match(r"\*|i32$|tensordesc", a) else "constexpr"
             for name, a in args.items()}
    assert list(args) == kernel.arg_names
    # what a launch would tell the compiler: buffers are aligned, and strides and widths are multiples of 16
    aligned = [i for i, (name, kind) in enumerate(types.items())
               if kind[0] == "*" or kind == "i32" and (name in "NKMDF" or name.endswith("_stride"))]
    source = ASTSource(fn=kernel, signature=types,
                       constexprs={name: a for name, a in args.items() if types[name] == "constexpr"},
                       attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    result = triton.compile(source, target=GPUTarget("cuda", sm, 32),
                            options=dict(num_warps=warps, num_stages=stages))
    return SimpleNamespace(ptx=result.asm["ptx"], shared=result.metadata.shared, **resources(result.asm["cubin"]))


def resources(cubin):
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    assert found.keys() == {"REG", "STACK", "LOCAL"}, text
    return {name.lower(): int(value) for name, value in found.items()}


def assert_fits(code):
    assert (code.local, code.stack) == (0, 0), "registers spilled"
    assert code.shared <= SHARED, f"{code.shared} bytes of shared memory"


def assert_computes(code, sm, what):
    """The line that a report of this test shows with -s."""
    print(f"sm_{sm} {what}: {code.reg} registers, {code.shared} bytes shared")
    assert ("wgmma.mma_async" if sm < SM_100 else "tcgen05.mma") in code.ptx
    assert "cp.async.bulk.tensor" in code.ptx


def rows_args(dtype, sm, tile, gather, out_in, padded):
    desc = lambda *block: f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"
    return dict(
        x=desc(1, tile.inner) if gather else desc(1, tile.rows, tile.inner),
        w=desc(1, tile.cols, tile.inner) if out_in else desc(1, tile.inner, tile.cols),
        y=desc(1, tile.rows, tile.cols), x_ptr=f"*{dtype}", y_ptr=f"*{dtype}", tiles_ptr="*i32",
        row_ptr="*i64" if gather else None, row_tiles="i32", N="i32", K="i32", room="i32", x_stride="i32",
        y_stride="i32", GATHER=gather, OUT_IN=out_in, PADDED=padded,
        SPECIALIZE=kernels.specialized(sm // 10, padded, gather), BAND=kernels.BAND, ROWS=tile.rows,
        COLS=tile.cols, INNER=tile.inner)


def experts_args(dtype, tile, gather, padded, accumulate):
    desc = lambda *block: f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"
    return dict(
        dy=desc(1, tile.inner, tile.rows), x=desc(1, tile.cols) if gather else desc(1, tile.inner, tile.cols),
        x_ptr=f"*{dtype}", dw_ptr="*fp32" if accumulate else f"*{dtype}", row_ptr="*i64" if gather else None,
        starts_ptr="*i64", counts_ptr="*i64", L="i32", sources="i32", M="i32", N="i32", room="i32", x_stride="i32",
        dw_stride="i32", GATHER=gather, PADDED=padded, ACCUMULATE=accumulate, BAND=kernels.BAND, ROWS=tile.rows,
        COLS=tile.cols, INNER=tile.inner)


def tiles(sm, product):
    return [tile for _, tile in kernels.TILES[sm // 10, product]]


def gathers(sm):
    return "", kernels.gather_by(sm // 10, True)


@pytest.mark.parametrize("sm", [SM_90, SM_100, SM_103])
@pytest.mark.parametrize("gathered", [False, True])
def test_forward_and_data_gradient(sm, gathered):
    for tile, padded, out_in in itertools.product(tiles(sm, "rows"), (False, True), (True, False)):
        if gathered and not out_in:
            continue    # only the first product of a forward pass gathers
        for dtype in ("bf16", "fp16")[:1 + (padded and out_in and not gathered)]:
            gather = gathers(sm)[gathered]
            args = rows_args(dtype, sm, tile, gather, out_in, padded)
            code = compiled(kernels.rows_kernel, sm, args, tile.warps, tile.stages)
            assert_computes(code, sm, f"rows {dtype} {tile} {gather} padded={padded} out_in={out_in}")
            assert_fits(code)
            loads = re.findall(r"cp\.async\.bulk\.tensor\.\S*global\S*", code.ptx)
            assert any("tile::gather4" in load for load in loads) == (gather == "descriptor")
            assert ("setmaxnreg" in code.ptx) == kernels.specialized(sm // 10, padded, gather)


@pytest.mark.parametrize("sm", [SM_90, SM_100, SM_103])
@pytest.mark.parametrize("gathered", [False, True])
def test_weight_gradient(sm, gathered):
    for tile, padded, accumulate in itertools.product(tiles(sm, "experts"), (False, True), (False, True)):
        gather = gathers(sm)[gathered]
        args = experts_args("bf16", tile, gather, padded, accumulate)
        code = compiled(kernels.experts_kernel, sm, args, tile.warps, tile.stages)
        assert_computes(code, sm, f"experts {tile} {gather} padded={padded} accumulate={accumulate}")
        assert_fits(code)


@pytest.mark.parametrize("sm", [SM_90, SM_100, SM_103])
def test_exact_products_of_fp32(sm):
    tile = kernels.EXACT
    for padded in (False, True):
        for out_in in (False, True):
            args = rows_args("fp32", sm, tile, "", out_in, padded)
            assert_fits(compiled(kernels.rows_kernel, sm, args, tile.warps, tile.stages))
        args = experts_args("fp32", tile, "", padded, True)
        assert_fits(compiled(kernels.experts_kernel, sm, args, tile.warps, tile.stages))


@pytest.mark.parametrize("sm", [SM_90, SM_100, SM_103])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gathers_and_swiglu_move_16_bytes_at_once(sm, dtype):
    x, sizes = f"*{dtype}", kernels.POINTWISE
    for name, kernel, args in [
        ("permute", kernels.gather_kernel, dict(K=1)), ("unpermute, top-8", kernels.gather_kernel, dict(K=8)),
        ("swiglu", kernels.swiglu_kernel, dict(WEIGHTED=True)),
        ("swiglu backward", kernels.swiglu_backward_kernel, dict(WEIGHTED=True)),
    ]:
        kinds = dict(x_ptr=x, y_ptr=x, h_ptr=x, dy_ptr=x, dh_ptr=x, row_ptr="*i64", p_ptr="*fp32", dp_ptr="*fp32",
                     R="i32", D="i32", F="i32", x_stride="i32", y_stride="i32", h_stride="i32", **sizes, **args)
        code = compiled(kernel, sm, {arg: kinds[arg] for arg in kernel.arg_names})
        print(f"sm_{sm} {name} {dtype}: {code.reg} registers, {code.shared} bytes shared")
        assert_fits(code)
        loads, stores = (re.findall(kind + r"\.global[\w.:]*", code.ptx) for kind in ("ld", "st"))
        for moves in (loads, stores):
            assert any(".v4.b32" in move for move in moves), (name, moves)
            # rows of x, h and y move in no smaller pieces (an index has 8 bytes, a router weight 4)
            assert not any(re.search(r"\.v2\.b32|\.b16", move) for move in moves), (name, moves)
