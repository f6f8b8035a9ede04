"""Energy counters of the kernel and of NVML become metrics."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.worker.api.energy import EnergyMetrics, nvml_devices, rapl_packages

NAME = "ryzanstein_worker_energy_joules_total"


def zone(root: Path, folder: str, name: str, energy: int) -> Path:
    made = root / folder
    made.mkdir()
    for file, text in (("name", name), ("energy_uj", str(energy)), ("max_energy_range_uj", "1000000000")):
        (made / file).write_text(f"{text}\n")
    return made


def test_energy_of_processors_grows_over_a_full_counter(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 5)
    zone(tmp_path, "intel-rapl:1", "psys", 5)
    (zone(tmp_path, "intel-rapl:2", "package-1", 5) / "energy_uj").unlink()
    registry = CollectorRegistry()
    registry.register(EnergyMetrics(rapl_packages(tmp_path)))
    assert registry.get_sample_value(NAME, {"device": "package-0"}) == 999.0
    (package / "energy_uj").write_text("500000\n")
    assert registry.get_sample_value(NAME, {"device": "package-0"}) == 1000.5
    assert registry.get_sample_value(NAME, {"device": "package-1"}) is None, "its counter cannot be read"
    (package / "energy_uj").unlink()
    assert registry.get_sample_value(NAME, {"device": "package-0"}) is None


_LIBRARY = """
int nvmlInit_v2(void) { return FAILS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *energy) {
  static unsigned long long used = 5000000000000ULL;
  if (handle == (void *)2) return 3;  /* an older device does not count */
  *energy = used += 1500;
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_energy_of_gpus_is_read_from_their_library(tmp_path: Path) -> None:
    for fails in (0, 9):
        source, library = tmp_path / f"{fails}.c", tmp_path / f"{fails}.so"
        source.write_text(_LIBRARY)
        subprocess.run(["gcc", "-shared", "-fPIC", f"-DFAILS={fails}", "-o", library, source], check=True)
        readers = nvml_devices(str(library))
        assert list(readers) == ([] if fails else ["gpu-0"])
    (read,) = nvml_devices(str(tmp_path / "0.so")).values()
    before = read()
    assert before is not None
    assert read() == before + 1.5
    assert nvml_devices("no such library") == {}
