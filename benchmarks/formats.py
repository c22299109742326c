"""Speed of everything that reads or writes a released format, each beside what it is measured against.

Run: python -m benchmarks.formats [mx convert tokenizer xtml] [--json]
"""

import argparse
import json
from collections.abc import Callable, Mapping

from benchmarks.formats_convert import convert
from benchmarks.formats_mx import mx
from benchmarks.formats_tokenizer import tokenizer
from benchmarks.formats_xtml import xtml

SECTIONS: dict[str, Callable[[], Mapping[str, object]]] = {
    "mx": mx,
    "convert": convert,
    "tokenizer": tokenizer,
    "xtml": xtml,
}


def main() -> None:
    """Run the sections that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none is named")
    parser.add_argument("--json", action="store_true", help="end with one JSON object of all figures")
    words = parser.parse_args()
    if unknown := set(words.sections) - SECTIONS.keys():
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    result = {name: SECTIONS[name]() for name in words.sections or SECTIONS}
    if words.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
