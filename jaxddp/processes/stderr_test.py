import subprocess
import sys


def test_lines_of_unbuffered_processes_that_share_standard_error_stay_whole():
    script = "from jaxddp.processes.stderr import print_line\nfor _ in range(2000): print_line('x' * 50)"
    with subprocess.Popen(
        ["sh", "-c", '"$0" -u -c "$1" & "$0" -u -c "$1"; wait', sys.executable, script],
        stderr=subprocess.PIPE,
        text=True,
    ) as shell:
        lines = shell.stderr.read().splitlines()
    assert lines == 4000 * ["x" * 50]
