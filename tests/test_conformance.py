"""Every room x every case x every device x every dtype against the spec in float64; see support.within_budget."""

import pytest
import support
import torch

ROOMS = support.rooms()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _params():
    for room, cases in ROOMS.items():
        for device in support.device_params(getattr(cases, "DEVICES", None)):
            for case in (c for c in cases.CASES if support.serves(cases, device.id, c)):
                for dtype in getattr(cases, "DTYPES", DTYPES):
                    marks = list(device.marks) + ([pytest.mark.slow] if case.slow else [])
                    name = f"{room}-{device.id}-{str(dtype).removeprefix('torch.')}-{case.name.replace(' ', '_')}"
                    yield pytest.param(cases, case, device.values[0], dtype, id=name, marks=marks)


@pytest.mark.parametrize("cases,case,device,dtype", list(_params()))
def test_case(cases, case, device, dtype, record_property):
    record_property("device", device.name)
    support.check_case(cases, case, dtype, device)
    if device.name == "xla" and dtype == torch.bfloat16:  # other values run through the graph that is there
        support.run_again(cases, case, dtype, device)


@pytest.mark.parametrize("room", list(ROOMS))
@pytest.mark.parametrize("bug", ["scaled by 3 %", "one element off", "NaN"])
def test_the_check_can_fail(room, bug):
    """The same check must refuse spoilt results, so that the budgets above mean something."""
    cases = ROOMS[room]

    def spoil(t):
        t = t.clone()
        if t.is_floating_point() and t.numel():
            if bug == "NaN":
                t.view(-1)[-1] = torch.nan
            elif bug == "scaled by 3 %":
                t *= 1.03
            else:
                t.view(-1)[t.abs().argmax()] *= -1
        return t

    with pytest.raises(AssertionError):
        support.check_case(cases, cases.CASES[-1], torch.bfloat16, support.DEVICES[0], spoil=spoil)
