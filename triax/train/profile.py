"""What the steps of a run spend their time on, recorded by torch's profiler."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

WARM_UP = 3
"""Steps before the recording: the first ones compile kernels, grow memory pools and check that weights move."""

PROFILES = "profile"


class Profile:
    """Records a number of steps as a trace that Perfetto and chrome://tracing open, and a table of operations.

    A trace holds every operation and, on a GPU, every kernel: a few megabytes a step. The recorded steps are slower
    than the others, so that their tokens per second say nothing.
    """

    def __init__(self, run_dir: Path, num_steps: int, say: Callable[[str], None]) -> None:
        """Be ready to record.

        Args:
            run_dir: The run's folder; the recording goes into its `profile/`.
            num_steps: Steps to record; 0 records none.
            say: Tells the person where the files are.
        """
        self.folder, self.num_steps, self.say = run_dir / PROFILES, num_steps, say
        self.seen = 0
        self.first = 0
        self.profiler: profile | None = None

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what was recorded if the run ends before the last step that was asked for."""
        if self.profiler is not None:
            self._write(self.first + self.seen - WARM_UP - 1)
        if self.num_steps and self.seen <= WARM_UP and kind is None:
            self.say(f"profile: nothing was recorded; the run took {self.seen} steps, of which {WARM_UP} are left out")

    def step(self, step: int) -> None:
        """Note that a step has ended: begin or end the recording where that is due."""
        if not self.num_steps:
            return
        self.seen += 1
        if self.seen == WARM_UP:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self.profiler, self.first = profile(activities=activities, record_shapes=True), step + 1
            self.profiler.start()
        elif self.seen == WARM_UP + self.num_steps:
            self._write(step)

    def _write(self, last: int) -> None:
        profiler, self.profiler = self.profiler, None
        assert profiler is not None
        profiler.stop()
        if last < self.first:
            return
        self.folder.mkdir(exist_ok=True)
        name = self.folder / f"steps-{self.first}-{last}"
        profiler.export_chrome_trace(f"{name}.json.gz")
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60)
        Path(f"{name}.txt").write_text(f"{table}\n")
        self.say(f"profile: steps {self.first} to {last} are in {name}.json.gz (open it at https://ui.perfetto.dev)")
