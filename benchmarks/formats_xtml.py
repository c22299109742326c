"""Speed of K3's chat parser, token by token as a server streams: an answer, a long argument, and its growth.

Run: python -m benchmarks.formats_xtml

Takes the released vocabulary from `$TRIAX_DATA/kimi.tiktoken` or from beside the checkout, and without it a small one
learned from the text. Beside each figure stands the bare decoder of the same tokens, which every parser contains. As in
`timeit`, Python's garbage collector rests meanwhile: it walks all the events that this script keeps and a server sends.
"""

import codecs
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.formats_tokenizer import sample, vocabulary
from triax.data.chat import Parser, k2, k2_parser, xtml_parser
from triax.data.chat.xtml import prompt as k3_prompt
from triax.data.kimi import KimiTokenizer

BAR = 200_000  # tokens a second
GROWTH_BAR = 1.5  # time a token of 64k against time a token of 8k
LONG, SHORT = 64_000, 8_000
RUNS = 7


def xtml(runs: int = RUNS) -> dict[str, float]:
    """Print tokens a second for each kind of output and how the time of one token grows with their number."""
    text, path = sample(1_000_000), vocabulary()
    released = path.is_file()
    tokenizer = KimiTokenizer.load(path) if released else KimiTokenizer.train([text], 4096)
    other = KimiTokenizer.load(path, family="k2") if released else KimiTokenizer.train([text], 4096, "k2")
    tokens = tokenizer.encode_ordinary(text)
    words = {size: tokenizer.decode(tokens[:size]) for size in (SHORT, LONG)}
    result: dict[str, float] = {"bar": BAR}
    for name, message in {
        "answer": {"content": words[LONG]},
        "string": {"tool_calls": [_call({"text": words[LONG]})]},
        "array": {"tool_calls": [_call({"lines": words[LONG].splitlines()})]},
    }.items():
        output = _output(tokenizer, message)
        result[name] = _rate(lambda: xtml_parser(tokenizer), output, runs)
        result[f"{name}_bare"] = _bare(tokenizer, output, runs)
        print(
            f"xtml, {name} of {len(output):,} tokens: {result[name] / 1e3:,.0f}k tokens/s streamed; bare decoder "
            f"{result[f'{name}_bare'] / 1e3:,.0f}k"
        )
        print(f"  bar {BAR / 1e3:,.0f}k: {'kept' if result[name] >= BAR else 'MISSED'}")
        if name != "answer":
            argument = {"text": words[SHORT]} if name == "string" else {"lines": words[SHORT].splitlines()}
            short = _rate(lambda: xtml_parser(tokenizer), _output(tokenizer, {"tool_calls": [_call(argument)]}), runs)
            result[f"{name}_growth"] = short / result[name]
            kept = "kept" if result[f"{name}_growth"] <= GROWTH_BAR else "MISSED"
            print(f"  time of a token against that of an eighth of the length: {short / result[name]:.2f}")
            print(f"  bar {GROWTH_BAR}: {kept}")
    message = {"role": "assistant", "content": words[LONG], "tool_calls": [_call({"text": words[LONG]})]}
    prompt = k2.prompt(other, [message], generate=False)
    output = prompt.ids[len(k2.prompt(other, []).ids) :]
    result["k2"] = _rate(lambda: k2_parser(other), output, runs)
    print(f"k2, answer and call of {len(output):,} tokens: {result['k2'] / 1e3:,.0f}k tokens/s streamed")
    return result


def _call(arguments: Mapping[str, object]) -> dict[str, object]:
    return {"function": {"name": "write_file", "arguments": json.dumps(arguments)}}


def _output(tokenizer: KimiTokenizer, message: Mapping[str, object]) -> list[int]:
    """Return what a model would write for this message."""
    whole = k3_prompt(tokenizer, [{"role": "assistant", "reasoning": "so", **message}], generate=False)
    return whole.ids[len(k3_prompt(tokenizer, []).ids) :]


def _rate(new: Callable[[], Parser], output: Sequence[int], runs: int) -> float:
    """Return tokens a second of CPU time, the median of the runs; each is checked to have read its message."""
    times = []
    for _ in range(runs):
        parser, events = new(), []
        gc.disable()
        start = time.process_time()
        for token in output:
            events.extend(parser.feed(token))
        events.extend(parser.finish())
        times.append(time.process_time() - start)
        gc.enable()
        if any(type(event).__name__ in ("Flag", "ParseError") for event in events):
            raise SystemExit("the output was not read; nothing was timed")
    return len(output) / statistics.median(times)


def _bare(tokenizer: KimiTokenizer, output: Sequence[int], runs: int) -> float:
    times = []
    for _ in range(runs):
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        start = time.process_time()
        for token in output:
            decode(tokenizer.token_bytes(token))
        times.append(time.process_time() - start)
    return len(output) / statistics.median(times)


if __name__ == "__main__":
    xtml()
