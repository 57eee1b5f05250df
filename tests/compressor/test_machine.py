import subprocess
import sys
import time

import pytest

from compressor import machine

BURN_S = 0.3


def test_work_of_this_process_and_of_those_it_started_is_its_own() -> None:
    before_s = machine._own_work_s()
    end = time.process_time() + BURN_S
    while time.process_time() < end:
        pass
    subprocess.run(
        [sys.executable, "-c", f"import time\nwhile time.process_time() < {BURN_S}: pass"], check=True
    )  # it is gone, and was waited for
    assert machine._own_work_s() - before_s > 1.8 * BURN_S
    running = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before_s = machine._own_work_s()
        time.sleep(1.5)
        assert machine._own_work_s() > before_s
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize(("name", "kind"), [("arm64", "neon"), ("ARM64", "neon"), ("x86_64", "avx2")])
def test_a_system_that_lists_no_flags_has_the_kind_of_its_architecture(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(machine, "fingerprint", lambda: {"cpu_flags": []})
    monkeypatch.setattr("compressor.machine.platform.machine", lambda: name)
    assert machine.int8_cpu() == kind


def test_other_work_is_the_rest_as_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"all": 100.0, "own": 10.0, "clock": 0.0}
    monkeypatch.setattr(machine, "_all_work_s", lambda: seconds["all"])
    monkeypatch.setattr(machine, "_own_work_s", lambda: seconds["own"])
    monkeypatch.setattr(time, "monotonic", lambda: seconds["clock"])
    monkeypatch.setattr("compressor.machine.psutil.cpu_count", lambda: 4)
    other = machine.OtherWork()
    seconds |= {"all": 115.0, "own": 17.0, "clock": 10.0}
    assert other.percent() == pytest.approx(100 * 8 / 40)  # 15 s were worked, 7 of them here, of 4 x 10
    seconds |= {"own": 27.0}
    assert other.percent() == 0.0  # ticks are coarse
