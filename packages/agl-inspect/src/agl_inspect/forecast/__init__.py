"""Forecasts: the size of rollouts, waiting, memory and time on a device, faults of the data."""

from agl_inspect.forecast.costs import (
    Device,
    DeviceForecast,
    Memory,
    Recorded,
    StepShape,
    Training,
    device_of,
    forecast_on,
)
from agl_inspect.forecast.faults import Examined, Fault, faults_in, faults_of_tasks
from agl_inspect.forecast.models import ModelShape, shape_of_model
from agl_inspect.forecast.observed import Observed, observe
from agl_inspect.forecast.queueing import Spread, StepForecast, at_once, forecast, spread_of, uncertainty_of
from agl_inspect.forecast.silence import NEARLY, SilentShare, best_size, loud_groups, silent_shares

__all__ = [
    "NEARLY",
    "Device",
    "DeviceForecast",
    "Examined",
    "Fault",
    "Memory",
    "ModelShape",
    "Observed",
    "Recorded",
    "SilentShare",
    "Spread",
    "StepForecast",
    "StepShape",
    "Training",
    "at_once",
    "best_size",
    "device_of",
    "faults_in",
    "faults_of_tasks",
    "forecast",
    "forecast_on",
    "loud_groups",
    "observe",
    "shape_of_model",
    "silent_shares",
    "spread_of",
    "uncertainty_of",
]
