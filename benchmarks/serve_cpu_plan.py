"""How many sequence-steps a second scheduler and cache manager plan and commit, without a model.

`python -m benchmarks.serve_cpu_plan`: sequences with long contexts decode side by side while others come and go, as an
engine would drive them: the next step is planned while one is in flight, and the collector is set as in its process. A
sequence-step is one sequence's row in one step, planned, committed and published. The bar is 50,000 a second of the
processor's time, which neighbours on the same machine do not count towards; how long a step takes is by the clock on
the wall.
"""

import argparse
import platform
import random
import statistics
import time

from triax.config.serve import Prefixes, Scheduling
from triax.serve.cache.manager import Manager
from triax.serve.cache.tiers import Sizes
from triax.serve.plan import Plan, RowResult, StepResult
from triax.serve.process import settle
from triax.serve.request import Request
from triax.serve.scheduler import Scheduler

BAR = 50_000
FEWEST_ROWS = 20_000  # so that a run holds many comings and goings also with one sequence


def measured(batch: int, context: int, steps: int, seed: int) -> tuple[float, float, float]:
    """Return sequence-steps a second, and the median and 99th percentile of a step in ms.

    Args:
        batch: Sequences side by side.
        context: Tokens of each prompt; half of it is shared with others.
        steps: Steps to time.
        seed: Of prompts and lengths.
    """
    noise = random.Random(seed)
    pages = batch * (context // 64 + 24)
    manager = Manager(Sizes(pages, 3 * batch, pages, batch), 64, Prefixes())
    scheduler = Scheduler(manager, Scheduling(step_tokens=1 << 20, mixed_prefill_tokens=1 << 20, max_running=batch))
    stems = [[noise.randrange(100_000) for _ in range(context // 2)] for _ in range(8)]
    result = RowResult((7,))

    prompts = [
        (*noise.choice(stems), *(noise.randrange(100_000) for _ in range(context // 2)))
        for _ in range(2 * batch + steps * batch // 100)
    ]

    def come() -> None:
        scheduler.add(Request("", prompts.pop(), noise.randrange(100, 400)))

    open_plans: list[Plan] = []

    def step() -> int:
        while len(open_plans) < 2:
            plan = scheduler.plan()
            if plan.is_empty:
                break
            open_plans.append(plan)
        plan = open_plans.pop(0)
        results = tuple(result if row.samples else RowResult() for row in plan.rows)
        for sequence, _ in scheduler.commit(plan, StepResult(results)):
            if sequence.num_left <= 0:
                scheduler.finish(sequence.number)
                come()
        return len(plan.rows)

    for _ in range(batch):
        come()
    while scheduler.num_waiting > batch // 20:
        step()
    took, rows, start = [], 0, time.thread_time()
    for _ in range(steps):
        begin = time.perf_counter()
        rows += step()
        took.append(time.perf_counter() - begin)
    total = time.thread_time() - start
    took.sort()
    return rows / total, 1e3 * statistics.median(took), 1e3 * took[int(0.99 * len(took))]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="fewest steps of a run")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    settle()
    print(f"Python {platform.python_version()}, {platform.machine()}, one thread, {options.repeats} runs, seeds 0 …")
    print("| sequences | context | sequence-steps/s, median | lowest … highest | step, ms | 99th, ms | bar |")
    print("|---|---|---|---|---|---|---|")
    for batch, context in ((1, 8192), (64, 2048), (256, 2048), (256, 8192)):
        steps = max(options.steps, FEWEST_ROWS // batch)
        runs = [measured(batch, context, steps, seed) for seed in range(options.repeats)]
        rates = sorted(rate for rate, _, _ in runs)
        print(
            f"| {batch} | {context} | {statistics.median(rates):,.0f} | {rates[0]:,.0f} … {rates[-1]:,.0f} "
            f"| {statistics.median(run[1] for run in runs):.2f} | {statistics.median(run[2] for run in runs):.2f} "
            f"| {BAR:,} |"
        )


if __name__ == "__main__":
    main()
