"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_tour_prints_what_it_says():
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    first, second = (code for language, code in blocks[:3] if language == "python")
    shown = next(code for language, code in blocks if language == "")
    run = subprocess.run([sys.executable, "-c", first + second], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    loss, *printed = run.stdout.splitlines()
    assert float(loss.split()[0]) < 0.1
    assert printed == shown.splitlines()


def test_the_two_commands_stand_each_on_a_line_of_their_own():
    commands = re.findall(r"^python3 -m pip install -e .*$", README.read_text(), re.MULTILINE)
    assert commands == [
        "python3 -m pip install -e '.[torch]' && python3 -m benchmarks",
        "python3 -m pip install -e '.[test]' && python3 -m pytest",
    ]
