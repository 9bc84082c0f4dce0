"""Ranks of a job in which one is lost: twin of jaxddp's watchdog_test.py."""

import pytest

from jaxddp.processes.watchdog_test import LOOP, NUM_PROCESSES, START, STUCK_S, check, run

SCRIPT = f"""{START}
import torch, torchref
from torchref.launch import init_from_env
init_from_env("gloo", f"127.0.0.1:{{port}}", {NUM_PROCESSES}, process, stuck_s={STUCK_S})
torch.manual_seed(0)
model = torchref.BucketedDDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    optimizer.zero_grad()
    model(torch.ones(2, 2)).square().mean().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
{LOOP}"""


@pytest.mark.parametrize(
    ("fault", "faulty", "reason", "within_s"),
    [
        pytest.param("killed", 1, "process 1 is gone, its last step 3", 15, marks=pytest.mark.full),
        pytest.param("killed", 0, "process 0 is gone, its last step 3", 15, marks=pytest.mark.full),
        ("stopped", 1, f"process 1 has not answered for {STUCK_S:g} s, its last step 3", STUCK_S + 15),
        pytest.param("sleeps", 2, f"process 2 did not begin step 4 within {STUCK_S:g} s of the others", STUCK_S + 15,
                     marks=pytest.mark.full),
        pytest.param("raises", 1, "process 1 failed, its last step 3: LookupError: out of luck", 15,
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_the_others_end_and_name_it(tmp_path, fault, faulty, reason, within_s):
    check(tmp_path, fault, faulty, reason, within_s, SCRIPT)


@pytest.mark.full
def test_ranks_that_end_together_end_well(tmp_path):
    statuses, outputs, _ = run(tmp_path, "all end", program=SCRIPT)
    assert statuses == [0] * NUM_PROCESSES, outputs
    assert not any("jaxddp: process" in output for output in outputs)
