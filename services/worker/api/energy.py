"""Energy that the machine has used, where the kernel (RAPL) or the GPUs' library (NVML) counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"
_MICROJOULES, _MILLIJOULES = 1e6, 1e3
ReadJoules = Callable[[], float | None]  # None: it cannot be read now


class RaplPackage:
    """A processor's counter, which begins again at zero when it is full."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or ValueError where its files cannot be read."""
        self._counter = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._counter.read_text())
        self._total = self._last

    def joules(self) -> float | None:
        """Joules since the counter began, or None. Scrapes must be closer than the counter's range (minutes)."""
        try:
            now = int(self._counter.read_text())
        except (OSError, ValueError):
            return None
        self._total += now - self._last + (self._range if now < self._last else 0)
        self._last = now
        return self._total / _MICROJOULES


def rapl_packages(root: Path = _POWERCAP) -> dict[str, ReadJoules]:
    """The processors whose counters can be read, by name."""
    readers: dict[str, ReadJoules] = {}
    for folder in sorted(root.glob("*-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            if name.startswith("package"):  # other zones are parts of packages, or of the whole machine
                readers[name] = RaplPackage(folder).joules
        except (OSError, ValueError):  # since 2020 kernels let only root read them
            continue
    return readers


def nvml_devices(library: str = _NVML) -> dict[str, ReadJoules]:
    """The GPUs that count their energy (Volta and newer), by number."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return {}
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    readers: dict[str, ReadJoules] = {}
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        reader = _device_reader(nvml, handle)
        if reader() is not None:
            readers[f"gpu-{index}"] = reader
    return readers


def _device_reader(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> ReadJoules:
    def read() -> float | None:
        energy = ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
        return None if failed else energy.value / _MILLIJOULES

    return read


class EnergyMetrics(Collector):
    """Counters of the machine's energy, read at each scrape."""

    def __init__(self, readers: Mapping[str, ReadJoules]) -> None:
        """`readers`: by device."""
        self._readers = readers

    def collect(self) -> Iterable[Metric]:
        """Read every counter."""
        about = "Energy that a processor or GPU of the machine has used, for all that runs there"
        family = CounterMetricFamily("ryzanstein_worker_energy_joules", about, labels=["device"])
        for device, read in self._readers.items():
            joules = read()
            if joules is not None:
                family.add_metric([device], joules)
        yield family
