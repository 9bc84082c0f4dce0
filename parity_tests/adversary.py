"""The project's adversary: random training in both packages against a single process, until the time is up.

    python -m parity_tests.adversary --seconds 3600 --seed 0        random seeds from 0 on, both packages in turns
    python -m parity_tests.adversary --only jax --seed 17 --cases 1   one case again

A line for each case that is wrong; the exit status is 1 if there is any. ``adversary_jax.py`` draws parameters, losses,
optimizers and strategies; ``adversary_torch.py`` draws lives of wrappers. A case is its seed.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from torchref.launch import RankError, RankPool


def findings(
    seconds: float, seed: int, pool: RankPool, *, only: str = "", num_cases: int | None = None
) -> Iterator[tuple[str, str | None]]:
    """Runs cases.

    Args:
        seconds: When to start no other.
        seed: Of the first; the next is one more.
        pool: Ranks for torchref, at least 3.
        only: ``"jax"`` or ``"torch"``; both in turns if empty.
        num_cases: How many to run at most.

    Yields:
        The case in one line, and what is wrong with it, None if nothing is.
    """
    end = time.monotonic() + seconds
    for number in itertools.count(seed):
        if time.monotonic() > end or (num_cases is not None and number >= seed + num_cases):
            return
        if only != "torch":
            yield _jax_case(number)
        # Lives are quicker.
        for life in range(1 if only else 4) if only != "jax" else ():
            yield _torch_case(number if only else 4 * number + life, pool)


def _jax_case(seed: int) -> tuple[str, str | None]:
    from . import adversary_jax

    case = adversary_jax.draw(seed)
    try:
        return f"jax seed {seed}: {case}", adversary_jax.check(case)
    except Exception as error:
        return f"jax seed {seed}: {case}", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _torch_case(seed: int, pool: RankPool) -> tuple[str, str | None]:
    from . import adversary_torch

    num_ranks = adversary_torch.draw(seed)[2]
    try:
        found = pool.run(adversary_torch.check_on_rank, seed, num_ranks=num_ranks, timeout_s=60.0)
    except RankError as error:
        return adversary_torch.describe(seed), str(error).splitlines()[0]
    return adversary_torch.describe(seed), next((wrong for wrong in found if wrong), None)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.adversary", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="start no case after this time (default: 30)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first case (default: the time)")
    parser.add_argument("--cases", type=int, help="run at most this many")
    parser.add_argument("--only", choices=("jax", "torch"), default="", help="one package (default: both)")
    arguments = parser.parse_args()

    import jax

    import jaxddp

    jaxddp.simulate_devices(8)
    jax.config.update("jax_disable_most_optimizations", True)
    print(f"seed {arguments.seed}", flush=True)
    num_cases = num_wrong = 0
    with RankPool(3) as pool:
        for case, wrong in findings(
            arguments.seconds, arguments.seed, pool, only=arguments.only, num_cases=arguments.cases
        ):
            num_cases += 1
            if wrong is not None:
                num_wrong += 1
                print(f"{case}\n    {wrong}", flush=True)
    print(f"{num_cases} cases, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
