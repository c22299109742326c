"""GPU kernels against their bars and floors on one H200: medians of CUDA-graph replays, and errors against float64.

Every `kernels_<operation>.py` beside this file is one operation; its `measure()` yields times and errors.

Run: python -m benchmarks.kernels [operation ...] [--json]
"""

import argparse
import json
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch


def main() -> None:
    """Print one line a figure as it is measured, or JSON at the end."""
    found = sorted(path.stem.removeprefix("kernels_") for path in Path(__file__).parent.glob("kernels_*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="*", metavar="operation", help=f"all, or some of {', '.join(found)}")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.operations) - set(found):
        parser.error(f"no such operation: {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels needs a CUDA device; found none; run it on an H200")
    figures, failed = [], []
    for operation in arguments.operations or found:
        torch.manual_seed(0)
        try:
            for figure in import_module(f"benchmarks.kernels_{operation}").measure():
                figures.append({"operation": operation, **asdict(figure)})
                if not arguments.json:
                    print(figure.line(), flush=True)
        except Exception:  # the others' figures are worth having all the same
            failed.append(operation)
            traceback.print_exc()
    if arguments.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "figures": figures, "failed": failed}, indent=2))
    if failed:
        sys.exit(f"benchmarks.kernels: no whole measurement of {', '.join(failed)}")


if __name__ == "__main__":
    main()
