"""A device that made the rows is found again; rows of something else are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.devices import A100_80GB
from experiments import calibrate, roofline_fit, step_timing
from experiments.step_timing import Cell
from paged_jax.config import DeviceConfig, EngineConfig
from paged_jax.measure import results
from paged_jax.model.weights import Loaded
from paged_jax.serving import settings
from tests.support import models
from tests.support.commands import Done, call, one_line

TRUE = dataclasses.replace(
    A100_80GB, bandwidth_efficiency=0.7, flops_efficiency=0.45, launch_seconds=2e-3
)
FITTED = ("bandwidth_efficiency", "flops_efficiency", "launch_seconds")
Rows = dict[tuple[float, ...], float]


def made_by(device: DeviceConfig, noise: float = 0.0) -> Rows:
    """Seconds of decode steps and prefill chunks of Llama-3-8B, from its shape alone."""
    random = np.random.default_rng(0)
    layer = 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 14336 + 2 * 4096
    head = 4096 * 128256
    rows: Rows = {}
    cells: list[tuple[float, ...]] = [
        (b, b, b * c, b * c) for b in (1, 8, 64, 256) for c in (100, 900, 4000)
    ]
    cells += [(q, 1, c + q, q * c + q * (q + 1) / 2) for q in (512, 2048) for c in (0, 3000)]
    for query, draws, context, attended in cells:
        bytes_ = 2 * (32 * layer + 4096 + head) + (context + query) * 32 * 2 * 8 * 128 * 2
        flops = 2 * query * 32 * (layer - 2 * 4096) + 2 * draws * head
        flops += 4 * attended * 32 * 32 * 128
        memory = bytes_ / (device.memory_bandwidth * device.bandwidth_efficiency)
        compute = flops / (device.flops * device.flops_efficiency)
        seconds = max(memory, compute) + device.launch_seconds
        rows[query, draws, context, attended] = seconds * (1 + noise * random.normal())
    return rows


def write(folder: Path, rows: Rows, factors: tuple[str, ...] = calibrate.COUNTS) -> Path:
    """The rows as a run of measurements leaves them."""
    metrics = [(calibrate.METRIC, "s")]
    with results.Table.open(
        folder, factors=factors, metrics=metrics, cells=list(rows), run={}
    ) as table:
        for cell, seconds in rows.items():
            table.append(cell, {calibrate.METRIC: seconds})
    return folder


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Calibrates Llama-3-8B on an A100 of 80 GB from rows; flags given later win."""

    def run(rows: Rows, *flags: str) -> Done:
        measured = write(tmp_path / "measured", rows)
        fixed = ("--model=llama_3_8b", "--device=a100_80gb", f"--out={tmp_path / 'out'}")
        return call(calibrate, *fixed, f"--measured={measured}", *flags)

    return run


def test_the_device_is_found_again(run: Run, tmp_path: Path) -> None:
    done = run(made_by(TRUE))
    assert done.code == 0, done.err
    written = tmp_path / "out" / calibrate.DEVICE
    found = DeviceConfig(**json.loads(written.read_text()))
    assert found == calibrate.find_device(str(written))
    fitted = {name: getattr(found, name) for name in FITTED}
    assert fitted == pytest.approx({name: getattr(TRUE, name) for name in FITTED}, rel=1e-6)
    assert found == dataclasses.replace(TRUE, **fitted), "nothing else changes"
    assert "4 rows held out: off by 0.0% on average" in done.out


def test_noise_is_seen_on_rows_held_out(run: Run, tmp_path: Path) -> None:
    done = run(made_by(TRUE, noise=0.05))
    assert done.code == 0, done.err
    found = calibrate.find_device(str(tmp_path / "out" / calibrate.DEVICE))
    assert found.bandwidth_efficiency == pytest.approx(0.7, rel=0.1)
    assert found.flops_efficiency == pytest.approx(0.45, rel=0.1)
    assert "held out: off by 0.0%" not in done.out


def test_what_no_row_is_bound_by_is_kept(run: Run, tmp_path: Path) -> None:
    decoding = {cell: seconds for cell, seconds in made_by(TRUE).items() if cell[0] < 200}
    done = run(decoding)
    assert done.code == 0, done.err
    found = calibrate.find_device(str(tmp_path / "out" / calibrate.DEVICE))
    assert found.flops_efficiency == 1
    assert found.bandwidth_efficiency == pytest.approx(0.7, rel=1e-6)
    assert "kept: no row is bound by it" in done.out


def shuffled(rows: Rows) -> Rows:
    """The same seconds, each beside another step's counts."""
    return dict(zip(rows, [*rows.values()][::-1], strict=True))


def swapped(rows: Rows, one: int, other: int) -> Rows:
    """Two columns of counts exchanged."""
    order = [0, 1, 2, 3]
    order[one], order[other] = other, one
    return {tuple(cell[column] for column in order): each for cell, each in rows.items()}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (shuffled(made_by(TRUE)), "on average on the rows held out, above 25%"),
        (made_by(dataclasses.replace(A100_80GB, flops=4e15, memory_bandwidth=2e13)), "held out"),
        (swapped(made_by(TRUE), 0, 2), "row 1: expected drawing_rows <= query_tokens <="),
        (swapped(made_by(TRUE), 0, 1), "row 13: expected drawing_rows"),
        (swapped(made_by(TRUE), 2, 3), "got 1, 512, 131328, 512 and"),
        (dict.fromkeys(made_by(TRUE), 0.0), "seconds above 0"),
        (dict([*made_by(TRUE).items()][:7]), "expected at least 8 steps, got 7"),
    ],
)
def test_rows_of_something_else_are_refused(
    run: Run, tmp_path: Path, rows: Rows, says: str
) -> None:
    done = run(rows)
    assert done.code == 1, done.out
    assert says in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out" / calibrate.DEVICE).exists()


def test_swapped_bytes_and_operations_do_not_fit() -> None:
    count_XC = np.array(list(made_by(TRUE)))
    bytes_X, flops_X = 1e6 * count_XC[:, 2] + 1e10, 1e10 * count_XC[:, 0]
    made_X = roofline_fit.seconds(TRUE, bytes_X, flops_X)
    right = roofline_fit.fit(A100_80GB, bytes_X, flops_X, made_X).device
    wrong = roofline_fit.fit(A100_80GB, flops_X, bytes_X, made_X).device
    np.testing.assert_allclose(roofline_fit.seconds(right, bytes_X, flops_X), made_X)
    error_X = roofline_fit.seconds(wrong, flops_X, bytes_X) / made_X - 1
    assert np.abs(error_X).mean() > 0.25


@pytest.mark.parametrize("seed", range(4))
def test_no_other_device_fits_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    bytes_X, flops_X = 10 ** random.uniform(9, 11, 20), 10 ** random.uniform(11, 14, 20)
    noise_X = 1 + 0.2 * random.normal(size=20)
    seconds_X = roofline_fit.seconds(TRUE, bytes_X, flops_X) * noise_X
    fit = roofline_fit.fit(A100_80GB, bytes_X, flops_X, seconds_X)

    def cost(device: DeviceConfig) -> float:
        error_X = roofline_fit.seconds(device, bytes_X, flops_X) / seconds_X - 1
        return float(error_X @ error_X)

    tried = [
        dataclasses.replace(A100_80GB, **dict(zip(FITTED, values, strict=True)))
        for values in random.uniform([0.5, 0.2, 0], [1, 0.8, 0.01], (3000, 3)).tolist()
    ]
    assert cost(fit.device) <= min(map(cost, tried))
    assert cost(fit.device) <= cost(TRUE)


@pytest.mark.parametrize("seed", range(8))
def test_least_squares_meets_its_conditions(seed: int) -> None:
    """No slope along coefficients above 0, none downwards along those at 0 (Karush and others)."""
    random = np.random.default_rng(seed)
    design_XC, target_X = random.normal(size=(12, 3)), random.normal(size=12)
    found_C = roofline_fit.least_squares(design_XC, target_X)
    slope_C = design_XC.T @ (design_XC @ found_C - target_X)
    assert (found_C >= 0).all()
    np.testing.assert_allclose(slope_C[found_C > 0], 0, atol=1e-9)
    assert (slope_C[found_C == 0] >= 0).all()


@pytest.mark.parametrize(
    ("cell", "counts"),
    [
        (Cell(rows=2, stored=8), (2, 2, 20, 20)),  # each stores token 9, 10, 11 in turn
        (Cell(rows=3, stored=0), (3, 3, 6, 6)),
        (Cell(chunk=6, stored=5), (6, 1, 11, 51)),  # which see 6 to 11 tokens
    ],
)
def test_cells_are_counted(cell: Cell, counts: tuple[int, ...]) -> None:
    found = step_timing.count_cell(models.TINY, cell, decode_steps=3)
    assert tuple(getattr(found, name) for name in calibrate.COUNTS) == counts


def test_steps_are_timed() -> None:
    """Rows hold what their cell says: ``step_timing`` asserts it of every timed run."""
    shape = dataclasses.replace(models.TINY, layers=1)
    model = Loaded(config=shape, decoder=models.random_decoder(shape), end_ids=())
    config = settings.fit_config(EngineConfig(block_size=4), model)
    cells = [Cell(stored=8), Cell(chunk=6, stored=5), Cell(stored=0)]
    found = step_timing.measure(model, config, cells, decode_steps=3, repeats=1)
    assert [counts.context_tokens for counts, _ in found] == [10, 11, 2]
    assert all(seconds > 0 for _, seconds in found)
    with pytest.raises(ValueError, match="a row comes to 65 tokens, the model's context is 64"):
        step_timing.measure(model, config, [Cell(stored=62)], decode_steps=3, repeats=1)


@pytest.mark.slow
def test_command_measures_a_model(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    model = shared_data("model_stories260k") / "stories260K.bin"
    device = tmp_path / "mine.json"
    device.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(A100_80GB, name="mine"))))
    out = tmp_path / "out"
    flags = (f"--model={model}", f"--device={device}", f"--out={out}", "--most_error=99")
    sizes = ("--batches=1,2", "--chunks=16", "--contexts=0,20,40", "--steps=3", "--repeats=1")
    done = call(calibrate, *flags, *sizes)
    assert done.code == 0, done.err
    counts, seconds_X = calibrate.read(out / "rows.csv")
    assert sorted(np.asarray(counts.query_tokens)) == [1, 1, 1, 2, 2, 2, 16, 16, 16]
    assert (seconds_X > 0).all()
    assert calibrate.find_device(str(out / "device.json")).name == "mine"
    again = call(calibrate, *flags, *sizes)
    one_line(again, "rows.csv exists", "--measured=")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device=a101",), "--device: expected one of a100_40gb,"),
        (("--device=wrong.json",), "wrong.json: not a device: "),
        (("--rows=4",), "--rows: cells have their own, got 4"),
        (("--cache=dense",), "--cache: cells have their own, got dense"),
        (("--device=none.json",), "none.json: No such file"),
    ],
)
def test_wrong_flags_are_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text('{"name": "mine", "flops": 1e12}')
    one_line(run(made_by(TRUE), *flags), says)


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "other", {(1.0,): 0.5}, factors=("query_tokens",))
    with pytest.raises(ValueError, match="it has no drawing_rows"):
        calibrate.read(folder)


def test_noise_of_one_step_is_no_efficiency() -> None:
    """Decode steps alone, the one of most operations a byte slowed: computing is not to blame."""
    bytes_X = np.linspace(2e10, 4e10, 12)
    flops_X = bytes_X * np.where(np.arange(12) == 11, 40, 20)
    seconds_X = roofline_fit.seconds(TRUE, bytes_X, flops_X)
    seconds_X[-1] *= 1.1
    fit = roofline_fit.fit(A100_80GB, bytes_X, flops_X, seconds_X)
    assert (fit.device.flops_efficiency, fit.compute_bound) == (1, 0)
    assert fit.device.bandwidth_efficiency == pytest.approx(TRUE.bandwidth_efficiency, rel=0.1)
