"""Rates of one core: what they are, and that they are refused where other work disturbs them."""

from __future__ import annotations

import dataclasses
from unittest.mock import MagicMock

import pytest

from cdmpp.device import get_device
from cdmpp.errors import CdmppError
from cdmpp.profiler import core_rates as measuring
from cdmpp.profiler.core_rates import core_rates

HERE = get_device("this-cpu")


@pytest.mark.skipif((HERE.simd_bits or 0) < 256, reason="needs AVX2")
def test_rates_of_this_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_TOLERANCE", 10.0)  # other tests may run beside this one
    monkeypatch.setattr(measuring, "_ROUNDS", 2)
    found, skipped = core_rates(HERE)
    clock = found["clock_ghz"]
    assert not skipped and 0.5 < clock < 7
    # no x86 core starts more than four of these a cycle, none less than half an arithmetic instruction
    each = {name: rate / clock for name, rate in found.items() if name.endswith("_per_ns")}
    assert all(rate < 5 for rate in each.values())
    assert all(each[f"{name}_256_per_ns"] > 0.4 for name in ("fma", "load", "store", "shuffle"))
    assert each["divide_256_per_ns"] < each["fma_256_per_ns"]
    # three cycles or more, and longer the farther away
    assert 2.5 < found["l1_ns"] * clock < found["l2_ns"] * clock < found["memory_ns"] * clock
    assert found["l1_gb_s"] > found["memory_gb_s"] > 0.5


def test_what_is_not_the_same_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unsteady: dict[str, int] = {}

    def rate(kernel: measuring._Kernel) -> float:
        if kernel.name in unsteady:
            unsteady[kernel.name] += 1
        return 2.0 + unsteady.get(kernel.name, 0) % 2

    monkeypatch.setattr(measuring, "_rate", rate)
    kernels = [measuring._Kernel(name, float, 1.0) for name in ("clock_ghz", "fma_256_per_ns", "l1_ns")]
    assert measuring._measure(kernels) == ({"clock_ghz": 2, "fma_256_per_ns": 2, "l1_ns": 0.5}, [])
    unsteady["fma_256_per_ns"] = 0
    found, skipped = measuring._measure(kernels)
    assert set(found) == {"clock_ghz", "l1_ns"} and skipped == ["fma_256_per_ns differs by 50 % between rounds"]
    unsteady["clock_ghz"] = 0
    with pytest.raises(CdmppError, match=r"other work on this machine: clock_ghz differs by 50 % .* when it is idle"):
        measuring._measure(kernels)


def test_a_core_without_avx2_is_refused() -> None:
    with pytest.raises(CdmppError, match="on x86-64 with AVX2 alone"):
        core_rates(dataclasses.replace(HERE, simd_bits=128))


def test_the_clock_is_kept_with_the_device_where_it_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([3.0] * 6 + [2.0, 3.0] * 30)
    monkeypatch.setattr(measuring, "_assembler", lambda device: MagicMock())
    monkeypatch.setattr(measuring, "_rate", lambda kernel: next(given))
    one = dataclasses.replace(HERE, measured={"l1_ns": 1.0})
    assert measuring.with_clock(one).measured == {"l1_ns": 1.0, "clock_ghz": 3.0}
    assert measuring.with_clock(one) == one, "others were using the core"


def test_the_clock_of_the_cpu_at_hand_is_measured_where_nothing_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "with_clock", lambda own: dataclasses.replace(own, measured={"clock_ghz": 3.3}))
    unknown = dataclasses.replace(HERE, measured={}, boost_mhz=None)
    assert measuring.with_known_clock(unknown).working_mhz == pytest.approx(3300)
    for told in ({"measured": {"clock_ghz": 3.0}}, {"boost_mhz": 3000.0}, {"base": "epyc-7763"}):
        assert measuring.with_known_clock(dataclasses.replace(unknown, **told)).measured != {"clock_ghz": 3.3}
