"""Least squares of a roofline: two efficiencies and a launch time from measured steps.

    seconds = max(bytes / (bandwidth x a), flops / (peak x b)) + launch,  0 < a, b <= 1, launch >= 0

Errors are relative, since steps differ by orders of magnitude. Whatever a and b are, the steps that
computing bounds are those of the most operations a byte, so every cut of the steps in that order is
tried: within one the model is linear, solved exactly for coefficients that are not negative, and
judged by the maximum above. Cost: a small linear problem for each step.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from paged_jax.config import DeviceConfig

LEAST_BOUND = 3  # steps that an efficiency is fitted to: it would follow the noise of fewer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A calibrated device, and which of its efficiencies the steps say nothing about."""

    device: DeviceConfig
    memory_bound: int  # steps; 0: bandwidth_efficiency is what it was before
    compute_bound: int  # steps; 0: flops_efficiency is what it was before


def seconds(device: DeviceConfig, bytes_X: np.ndarray, flops_X: np.ndarray) -> np.ndarray:
    """Seconds of steps on a device."""
    memory_X = bytes_X / (device.memory_bandwidth * device.bandwidth_efficiency)
    compute_X = flops_X / (device.flops * device.flops_efficiency)
    return np.maximum(memory_X, compute_X) + device.launch_seconds


def fit(
    device: DeviceConfig, bytes_X: np.ndarray, flops_X: np.ndarray, seconds_X: np.ndarray
) -> Fit:
    """The device with the efficiencies and the launch time that fit the steps best.

    An efficiency that bounds none of them stays what it was.
    """
    peak_XC = np.stack([bytes_X / device.memory_bandwidth, flops_X / device.flops], axis=1)
    kept_C = np.array([1 / device.bandwidth_efficiency, 1 / device.flops_efficiency])
    order_X = np.argsort(peak_XC[:, 1] / peak_XC[:, 0], kind="stable")
    best_C, best_launch, best_cost = kept_C, device.launch_seconds, np.inf
    for cut in range(len(order_X) + 1):
        computing_X = np.zeros(len(order_X), bool)
        computing_X[order_X[cut:]] = True
        slower_C, launch = _solve(peak_XC, computing_X, seconds_X, kept_C)
        error_X = ((peak_XC * slower_C).max(axis=1) + launch) / seconds_X - 1
        is_fitted_C = np.array([cut > 0, cut < len(order_X)])
        is_known = (_bound(peak_XC, slower_C)[is_fitted_C] >= LEAST_BOUND).all()
        if is_known and (error_X**2).sum() < best_cost:
            best_C, best_launch, best_cost = slower_C, launch, (error_X**2).sum()
    memory_bound, compute_bound = _bound(peak_XC, best_C).tolist()
    calibrated = dataclasses.replace(
        device,
        bandwidth_efficiency=float(1 / best_C[0]),
        flops_efficiency=float(1 / best_C[1]),
        launch_seconds=best_launch,
    )
    return Fit(device=calibrated, memory_bound=memory_bound, compute_bound=compute_bound)


def _bound(peak_XC: np.ndarray, slower_C: np.ndarray) -> np.ndarray:
    """How many steps memory bounds, and how many computing."""
    return np.bincount((peak_XC * slower_C).argmax(axis=1), minlength=2)


def _solve(
    peak_XC: np.ndarray, computing_X: np.ndarray, seconds_X: np.ndarray, kept_C: np.ndarray
) -> tuple[np.ndarray, float]:
    """How many times as long as at the peaks, and the launch, for a given cut of the steps.

    What goes beyond the peaks' time is the unknown, so that none is faster than its peak. The time
    of nearly equal bytes and a launch are hard to tell apart: without that bound noise decides.
    """
    bound_XC = np.stack([~computing_X, computing_X], axis=1)
    used_C = bound_XC.any(axis=0)
    columns = [*np.flatnonzero(used_C), 2]
    bound_peak_XC = peak_XC * bound_XC
    design = np.column_stack([bound_peak_XC, np.ones(len(seconds_X))])[:, columns]
    excess_X = (seconds_X - bound_peak_XC.sum(axis=1)) / seconds_X
    solution = np.zeros(3)
    solution[columns] = least_squares(design / seconds_X[:, None], excess_X)
    return np.where(used_C, 1 + solution[:2], kept_C), float(solution[2])


def least_squares(design_XC: np.ndarray, target_X: np.ndarray) -> np.ndarray:
    """Coefficients, none negative, that minimise ``|design @ coefficients - target|``; few columns.

    The optimum is the free solution over the columns that it uses, so all sets of them are tried.
    """
    columns = design_XC.shape[1]
    best, best_cost = np.zeros(columns), float(target_X @ target_X)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            found = np.zeros(columns)
            found[list(chosen)] = np.linalg.lstsq(design_XC[:, chosen], target_X)[0]
            error_X = design_XC @ found - target_X
            if (found >= 0).all() and error_X @ error_X < best_cost:
                best, best_cost = found, float(error_X @ error_X)
    return best
