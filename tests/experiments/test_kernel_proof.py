"""The kernel proof counts what it says, catches seeded faults, and compiles where it can."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from configs import chips
from experiments import bundles, compilers, proof_kernels, proof_table, sass
from experiments.proof_kernels import Shape
from paged_jax.measure import results

ROOT = Path(__file__).resolve().parents[2]
BASE = Shape("decode", "bfloat16", 16, 128, 4, 8)
COPY = "%9 = dma.hbm_to_vmem [thread:$0]  (%p1), /*hbm=*/%s1, /*size_in_granules=*/{} }}"
MATMUL = "%v1 = vmatmul.f32.vlgmr.msra.gmra.mxu0 %v2 }"
WORK = "%s1 = sadd.s32 1, %s2 }"


def listing(*lines: str) -> str:
    """A dump of bundles at addresses 0, 1, 2 ..., each line being ``label depth text``."""
    texts = []
    for address, line in enumerate(lines):
        label, depth, text = line.split("|")
        name = f"{address:#x}" if address else "0"
        texts.append(f"{name:>6} {label:>2}: {depth:>3} {{{' ' * (text[0] != '}')}{text}")
    return "= control target key start\nLB: loop body\n\n" + "\n".join(texts) + "\n"


NEST = listing(
    "||" + WORK,
    "||%s20 = smov 0 }",
    "LB|>|%s1 = smov 0 } /* Start region 4 :: Start region 5 */",
    "|>|" + COPY.format(64),
    "|>|%7 = sbr.rel (%p3) target = $region9 }",
    "|>|" + COPY.format(32) + " \nhlo: spans lines\n */ }",
    "||} /* End region 8 */",
    "LB|>>|%s21 = sphi %s20, %s22 } /* Start/End empty region 9 :: Start region 7 */",
    "|>>|" + MATMUL,
    "|>>|%s22 = sadd.s32 2, %s21 }",
    "|>>|%p4 = scmp.ge.s32.totalorder %s22, 7 }",
    "|>|%8 = sbr.rel (!%p4) target = $region7 }",
    "|>>|" + WORK,
    "||}",
    "|>|" + WORK,
    "|>|%8 = sbr.rel (!%p5) target = $region4 }",
    "||}",
    "||" + WORK,
)


def test_bundles_are_counted_times_trips_through_all_nested_loops():
    program = bundles.parse(NEST)
    loop = bundles.main_loop(program)
    (inner,) = loop.inner
    assert (loop.first, loop.last, loop.trips) == (2, 16, None)
    assert (inner.first, inner.last) == (7, 13), "the slots behind the branch, the empty one too"
    assert inner.trips == 4, "0, 2, 4, 6"
    own = 5 + 3  # before the inner loop, and after
    rare = 2  # jumped over: the second copy, and the empty bundle
    assert bundles.cost(loop, 64 * 32) == bundles.Cost(own + 4 * 7, own - rare + 4 * 7, 64 * 32, 0)
    assert bundles.cost(loop, 96 * 32).steady == own + 4 * 7, "this trip takes both copies"


def test_trips_of_a_loop_that_copies_follow_from_what_a_trip_has_to_copy():
    text = NEST.replace("%s20 = smov 0", "%s20 = smov %s3").replace("vmatmul", "vmatpush")
    text = text.replace(MATMUL.replace("vmatmul", "vmatpush"), COPY.format(16), 1)
    text = text.replace("%s1 = smov 0 }", MATMUL, 1)
    loop = bundles.main_loop(bundles.parse(text))
    assert loop.inner[0].trips is None
    cost = bundles.cost(loop, (64 + 32 + 5 * 16) * 32)
    assert (cost.bundles, cost.copied_bytes) == (8 + 5 * 7, (64 + 32 + 5 * 16) * 32)
    still = bundles.parse(NEST.replace("%s20 = smov 0", "%s20 = smov %s3"))
    assert bundles.cost(bundles.main_loop(still), 0).assumed == 1, "nothing tells its trips"


def test_steady_way_never_jumps_over_a_multiplication():
    text = listing(
        "LB|>|" + COPY.format(64) + " /* Start region 4 */",
        "|>|%7 = sbr.rel (%p3) target = $region9 }",
        "|>|" + MATMUL,
        "|>|%1 = vnop } /* Start region 9 */",
        "|>|%8 = sbr.rel (!%p5) target = $region4 }",
    )
    assert bundles.cost(bundles.main_loop(bundles.parse(text)), 2048).steady == 5


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda text: text.replace("target = $region4", "target = $region40"), "no branch back"),
        (lambda text: text.replace("dma.hbm_to_vmem", "dma.vmem_to_hbm"), "no loop copies"),
        (lambda text: text.replace("vmatmul", "vmul"), "no loop copies from HBM and multiplies"),
        (lambda text: text.replace("   0x5 ", "   0x6 "), "addresses 0, 1, 2"),
        (lambda text: "", "addresses 0, 1, 2"),
    ],
)
def test_damaged_bundle_listings_are_refused(fault, message):
    with pytest.raises(ValueError, match=message):
        bundles.main_loop(bundles.parse(fault(NEST)))


def test_vmem_is_what_the_kernel_allocates():
    text = """
  #allocation1 [shape = 's32[1]{0}', space=sflag, size = 0x4, scoped, tag = 'scoped']
  #allocation2 [shape = 'u32[72,128]', space=vmem, size = 0x9000, scoped, tag = 'scratch']
  #allocation3 [shape = 'bf16[2,8]', space=vmem, size = 0x10000, scoped, tag = 'operand']
  #allocation4 [shape = 'u32[]', space=vmem, size = 0x4, offset = 0, fixed_abs, tag = 'constant']
  #allocation7 [shape = 'u8[512]{0}', space=smem, size = 0x200, scoped, tag = 'prefetched']
"""
    assert bundles.vmem_bytes(text) == 0x19000


REPORT = """ptxas info    : Compiling entry function 'paged' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 16 barriers, 17 bytes smem
info    : used 80 registers, used 16 barriers, 0 stack, 1025 bytes smem
"""
SPILL = REPORT.replace("0 bytes spill stores", "24 bytes spill stores")

SASS = """
paged:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 BRA `(.L_x_4) ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_8) ;
.L_x_2:
        /*0040*/                   HGMMA.64x8x16.F32.BF16 R4, gdesc[UR8], RZ ;
        /*0050*/                   MUFU.EX2 R3, R3 ;
        /*0060*/              @!P1 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_4:
        /*0080*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_5:
        /*0090*/                   UTMALDG.5D [UR8], [UR6] ;
        /*00a0*/              @!P2 BRA `(.L_x_5) ;
        /*00b0*/              @!P1 BRA `(.L_x_4) ;
        /*00c0*/                   EXIT ;
.L_x_8:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00e0*/              @!P0 BRA `(.L_x_8) ;
        /*00f0*/                   BRA `(.L_x_2) ;
.L_x_9:
        /*0100*/                   BRA `(.L_x_9);
"""


def main_loops(text: str, copies: int = 1) -> sass.Main:
    return sass.main_loops(sass.parse(text), copies)


def test_issue_slots_leave_out_the_retries_of_a_wait():
    loop = main_loops(SASS).steady
    # The way back from the retries, 0xf0, is the loop's; the two instructions that retry are not.
    assert [one.address for one in loop.own] == [0x20, 0x30, 0x40, 0x50, 0x60, 0xF0]
    assert (loop.count(sass.TENSOR), loop.count(sass.EXPONENTIAL)) == (1, 1)
    assert sass.slots(loop) == 6


def test_producer_runs_over_blocks_where_its_loop_copies_less_than_a_trip():
    one, eight = main_loops(SASS).producer, main_loops(SASS, copies=8).producer
    assert one is not None
    assert sass.slots(one) == 2
    assert eight is not None
    assert sass.slots(eight, copies=8) == 2 + 8 * 2


MASKED = """
.L_x_6:
        /*0070*/                   HGMMA.64x8x16.F32.BF16 R4, gdesc[UR8], RZ ;
        /*0071*/                   ISETP.GE.AND P3, PT, R2, R3, PT ;
        /*0072*/              @!P1 BRA `(.L_x_6) ;
.L_x_7:
        /*0073*/                   UTMALDG.5D [UR8], [UR6] ;
        /*0074*/              @!P1 BRA `(.L_x_7) ;
"""


def test_of_loops_that_multiply_alike_the_shortest_is_the_steady_one():
    main = main_loops(SASS.replace("        /*0070*/", MASKED + "        /*0078*/"))
    assert (len(main.steady.own), len(main.longest.own)) == (3, 6)
    assert main.copies == 2, "of both loops that copy"


def test_sass_with_scheduling_controls_reads_the_same():
    controlled = SASS.replace("        /*", "   -:-:2:Y:07        /*").replace(" ;\n", " \n")
    assert main_loops(controlled) == main_loops(SASS)


def test_no_producer_where_the_consumer_copies_itself():
    assert main_loops(SASS.replace("MUFU.EX2 R3, R3", "LDGSTS.E.128 [R3], [R4]")).producer is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda text: text.replace("@!P1 BRA `(.L_x_1)", "@!P1 BRA `(.L_x_9)"), "no loop multip"),
        (lambda text: text.replace("HGMMA", "FFMA"), "no loop multiplies"),
        (lambda text: text.replace(".L_x_8:", ".L_x_88:"), "no label .L_x_8"),
        (lambda text: "", "expected a listing"),
    ],
)
def test_damaged_sass_is_refused(fault, message):
    with pytest.raises(ValueError, match=message):
        main_loops(fault(SASS))


def test_report_of_ptxas():
    assert sass.read_report(REPORT) == sass.Report(80, 0, 17)
    assert sass.read_report(SPILL).spilled_bytes == 24
    with pytest.raises(ValueError, match="expected one line"):
        sass.read_report(REPORT + REPORT)


@pytest.mark.parametrize(
    ("registers", "threads", "smem", "ctas"),
    [
        (80, 256, 75_776, 3),  # three times 20,480 of 65,536 registers, 76,800 of 233,472 bytes
        (81, 256, 75_776, 2),  # registers come by eight: 88
        (80, 256, 77_000, 2),
        (103, 256, 114_688, 2),
        (219, 256, 157_696, 1),
        (32, 64, 0, 32),
    ],
)
def test_ctas_that_fit_an_sm(registers, threads, smem, ctas):
    assert sass.ctas_per_sm(registers, threads, smem) == ctas


def build(**changes: int) -> proof_kernels.Build:
    fields = dict(trip_bytes=1 << 16, copies=8, heads=1, queries=1) | changes
    return proof_kernels.Build(lambda: None, (), **fields)


def gpu_figures(report: str, threads: int = 256) -> proof_table.Figures:
    dump = compilers.GpuDump("decode", REPORT, report, SASS, 75_776, threads)
    return proof_table.gpu_figures(dump, BASE, chips.SM_90A, build(trip_bytes=1 << 15))


def test_figures_of_a_gpu_kernel():
    figures = gpu_figures(REPORT)
    assert set(figures) == {name for name, _ in proof_table.metrics("cuda")}
    assert (figures["consumer_slots"], figures["producer_slots"]) == (2 * 6, 2 * (2 + 8 * 2))
    assert (figures["ctas_per_sm"], figures["staged_bytes"]) == (3, 3 * 2 * (1 << 15))
    assert figures["bandwidth_fraction"] == 1.0


def test_kernel_that_fits_no_sm_is_refused():
    with pytest.raises(ValueError, match="fits no SM"):
        gpu_figures(REPORT.replace("Used 80", "Used 255"), threads=1024)


def test_trip_that_the_kernel_has_no_room_for_is_refused():
    dump = compilers.GpuDump("decode", REPORT, REPORT, SASS, 65_000, 256)
    with pytest.raises(ValueError, match="2 stages of 65,536 B in 65,017 B"):
        proof_table.gpu_figures(dump, BASE, chips.SM_90A, build())


def test_matrix_cycles_of_a_tile_of_queries():
    """128 x 4 query rows, 32,768 elements of a piece, 131,072 operations a cycle."""
    cycles = proof_table.matrix_cycles(BASE, chips.V5E, build(queries=128))
    assert cycles == pytest.approx(2 * 128 * 4 * 32_768 / 131_072, rel=0.01)


def test_figures_of_a_tpu_kernel():
    dump = compilers.TpuDump("decode", NEST, "")
    figures = proof_table.tpu_figures(dump, BASE, chips.V5E, build(trip_bytes=2048))
    assert set(figures) == {name for name, _ in proof_table.metrics("tpu")}
    assert figures["bundles_per_piece"] == 32 * (8 + 4 * 7)
    assert figures["memory_cycles"] == pytest.approx(120, abs=0.1)
    narrow = dataclasses.replace(BASE, width=64)
    padded = proof_table.tpu_figures(dump, narrow, chips.V5E, build(trip_bytes=1024))
    assert padded["memory_cycles"] == pytest.approx(240, abs=0.2), "lanes are padded to 128"


@pytest.mark.parametrize(("chip", "cycles"), [("v5e", 120), ("v5p", 83), ("v6e", 70), ("v7x", 39)])
def test_memory_cycles_of_64_kib(chip, cycles):
    assert round(chips.CHIPS[chip].memory_cycles(1 << 16)) == cycles


def test_spills_and_missed_goals_are_caught():
    own = (proof_kernels.OWN, BASE)
    clean, spilled = ({own: gpu_figures(report)} for report in (REPORT, SPILL))
    assert proof_table.faults(clean) == []
    assert proof_table.faults(spilled) == [
        "pallas_kernels decode bfloat16 block 16 width 128 group 4 kv heads 8 spills 24 bytes"
    ]
    assert proof_table.faults({("jax.paged_attention", BASE): spilled[own]}) == []
    goals = proof_table.GOALS["cuda"]
    assert all(verdict and verdict[0] for goal in goals if (verdict := judge(goal, clean)))
    for name, value in [("registers", 81), ("ctas_per_sm", 2), ("slots_per_piece", 751)]:
        worse = {own: {**clean[own], name: value}}
        missed = [goal.metric for goal in goals if not (judge(goal, worse) or (True,))[0]]
        assert missed == [name]
    other = {(proof_kernels.OWN, dataclasses.replace(BASE, block_size=8)): clean[own]}
    assert all(judge(goal, other) is None for goal in goals)


judge = proof_table.judge


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.kernel_proof", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("target", "extra"), [("v6e", "[tpu]"), ("sm_90a", "[cuda13]")])
def test_missing_extra_is_named_in_one_line(target, extra):
    if compilers.missing(chips.CHIPS[target]) is None:
        pytest.skip(f"the extra {extra} is installed")
    done = run(f"--targets={target}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: --targets: {target} needs")
    assert done.stderr.count("\n") == 1


def test_unknown_target_is_refused():
    done = run("--targets=v5e,h100")
    assert done.returncode == 1
    assert done.stderr.startswith("error: --targets: expected some of v5e, v5p, v6e, v7x, sm_90a")


@pytest.mark.parametrize("target", ["v5e", "sm_90a"])
def test_jax_kernels_compile_and_write_rows(target, tmp_path):
    if lack := compilers.missing(chips.CHIPS[target]):
        pytest.skip(f"{target} {lack}")
    flags = [f"--targets={target}", "--kernels=decode", "--block_sizes=16", "--changes=0"]
    flags += ["--sources=jax.paged_attention", "--groups=4", f"--out={tmp_path}"]
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    ((_, figures),) = proof_table.read(tmp_path / target).items()
    again = run(*flags)
    assert again.stderr == f"error: {tmp_path / target / 'rows.csv'} exists: take another --out\n"
    if target == "v5e":
        assert 400 < figures["bundles_per_piece"] < 600
    else:
        assert figures["spilled_bytes"] == 0


@pytest.mark.parametrize("target", chips.CHIPS)
def test_committed_rows_keep_the_goals(target):
    """The rows say what the command said of them; reprinting needs no compiler."""
    folder = ROOT / "results" / "kernel_proof" / target
    if not folder.exists():
        pytest.skip(f"no rows of {target} are committed")
    proved = proof_table.read(folder)
    verdicts = [judge(goal, proved) for goal in proof_table.GOALS[chips.CHIPS[target].platform]]
    assert all(verdict and verdict[0] for verdict in verdicts), verdicts
    assert proof_table.faults(proved) == []


def test_tables_are_reprinted_from_the_rows(tmp_path):
    shape = dataclasses.replace(BASE, group=8)
    with results.Table.open(
        tmp_path / "sm_90a",
        factors=proof_table.FACTORS,
        metrics=proof_table.metrics("cuda"),
        cells=[proof_table.cell(proof_kernels.OWN, shape)],
        run={},
    ) as table:
        table.append(proof_table.cell(proof_kernels.OWN, shape), gpu_figures(SPILL))
    assert list(proof_table.read(tmp_path / "sm_90a")) == [(proof_kernels.OWN, shape)]
    done = run("--reprint", "--targets=sm_90a", f"--out={tmp_path}")
    assert done.returncode == 1
    assert "FAIL  pallas_kernels decode" in done.stdout
    assert done.stderr == "error: sm_90a: lines above that say FAIL: 1\n"
