import re

from jaxddp.conftest import run_python
from jaxddp.models import SIZES
from jaxddp.planning.chips import CHIPS

LISTED = {
    "train": {name for name, config in SIZES.items() if config.vocab >= 256},
    "inspect": {*CHIPS, "auto"},
    "plan": {*CHIPS, "custom", "xxl"},
    "launch": set(),
    "doctor": set(),
}
CODE = """
import sys
from jaxddp.__main__ import main
for name in sys.argv[1:]:
    try: main([name, "--help"])
    except SystemExit: print(chr(12), end="")
print([name for name in ("jax", "flax", "matplotlib", "jaxddp.models") if name in sys.modules])
"""


def test_help_is_quick_and_lists_every_name():
    *helps, imported = run_python(CODE, *LISTED).split(chr(12))
    assert imported == "[]\n" and len(helps) == len(LISTED)
    for said, names in zip(helps, LISTED.values(), strict=True):
        assert set(re.findall(r"[\w.]+", said)) >= names
