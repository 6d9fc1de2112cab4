"""Every strategy gives the target's own text on real workers, in every precision.

    python -m ops.bench.equality --prompts DIR [--target FOLDER] [--draft ngram]
        [--stages 1,2,4] [--temperatures 0,1] [--dtypes float32,bfloat16,int8,nf4,int4]
        [--count 24] [--tokens 32] [--jobs 4]

For every place, a precision and number of stages, a pipeline of processes decodes every prompt with
every strategy, ``--jobs`` of them at once. Ids must be those of plain decoding in the same place,
these the same for any number of stages, in float32 without temperature those of the library's own
``generate``, and texts the tokenizer's own decode of prompt and output without the prompt's. Prints
Markdown, and a line for what differs; exits 1 then. Progress goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import product

os.environ["OMP_NUM_THREADS"] = "1"

from flowspec.client import Client
from flowspec.cluster import Cluster, Places, Setup
from flowspec.errors import FlowSpecError
from flowspec.model.reference import Reference
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.same_tokenizer import load_tokenizer
from flowspec.results import Result
from flowspec.strategies import EXACT
from ops.bench.arguments import count, counts, prompt_sets, temperatures
from ops.bench.default_pays import spread
from ops.bench.report import machine_line
from ops.parser import Parser

PLAIN = "autoregressive"


class Check:
    """What is compared with what, and what differed.

    ``expected``: ids by precision, prompt and temperature, wherever they came from first.
    """

    def __init__(self, target: str, prompts: list[str], tokens: int) -> None:
        self._encode = Tokenizer(open_directory(target)).encode
        self._library = load_tokenizer(open_directory(target).path)
        self._prompts = prompts
        self._tokens = tokens
        self.expected: dict[tuple[str, int, float], tuple[int, ...]] = {}
        self.differing: list[str] = []

    def generate(self, target: str) -> None:
        """Have the library answer every prompt, in float32."""
        reference = Reference(open_directory(target))
        for at, prompt in enumerate(self._prompts):
            found = reference.generate(self._encode(prompt, raw=False), self._tokens)
            self.expected["float32", at, 0.0] = tuple(found)

    def look(
        self, client: Client, where: tuple[str, int], strategy: str, temperature: float
    ) -> list[Result]:
        """Have every prompt answered by ``strategy``, and compare."""
        jobs = [
            client.submit(
                prompt,
                strategy=strategy,
                max_new_tokens=self._tokens,
                temperature=temperature,
                seed=at,
            )
            for at, prompt in enumerate(self._prompts)
        ]
        dtype, stages = where
        results = [job.result() for job in jobs]
        for at, (prompt, result) in enumerate(zip(self._prompts, results, strict=True)):
            name = f"{dtype}, {stages} stages, {strategy}, prompt {at + 1}, t {temperature:g}"
            expected = self.expected.setdefault((dtype, at, temperature), result.token_ids)
            if result.token_ids != expected:
                same = zip(result.token_ids, expected, strict=False)
                place = next(
                    (at for at, (one, other) in enumerate(same) if one != other), "the end"
                )
                self.differing.append(f"{name}: other ids from {place} on")
            before = list(self._encode(prompt, raw=False))
            whole, start = (
                self._library.decode(ids, skip_special_tokens=True)
                for ids in (before + list(result.token_ids), before)
            )
            if start + result.text != whole:
                self.differing.append(f"{name}: another text than the tokenizer's")
        return results


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--prompts", type=prompt_sets, required=True, help="folder of .jsonl files")
    add("--target", default=default_pair()[0], metavar="FOLDER", help="(the packaged one)")
    add("--draft", default="ngram", help="drafter (ngram)")
    add("--stages", type=counts, default="1,2,4", help="by commas (1,2,4)")
    add("--temperatures", type=temperatures, default="0,1", help="by commas (0,1)")
    add("--dtypes", default="float32,bfloat16,int8,nf4,int4", help="by commas")
    add("--count", type=count, default=24, help="prompts (24)")
    add("--tokens", type=count, default=32, help="of every answer, at most (32)")
    add("--jobs", type=count, default=4, help="at once (4)")
    given = parser.parse_args()
    prompts = spread(given.prompts, given.count)
    seen: Counter[str] = Counter()
    print(f"Measured on {machine_line()}.\n")
    print("| precision | stages | answers | tokens | tokens a step | differing |")
    print("|---|---|---|---|---|---|")
    try:
        check = Check(given.target, prompts, given.tokens)
        if "float32" in given.dtypes and 0.0 in given.temperatures:
            check.generate(given.target)
        for dtype, stages in product(given.dtypes.split(","), given.stages):
            setup = Setup(
                given.target,
                given.draft,
                stages,
                (given.target,),
                places=Places(dtype),
                jobs=given.jobs,
            )
            before = len(check.differing)
            answers = 0
            tokens = 0
            steps: list[float] = []
            with Cluster(setup) as cluster, Client(cluster.url) as client:
                for temperature, strategy in product(given.temperatures, EXACT):
                    print(f"{dtype}, {stages}, {temperature:g}: {strategy}", file=sys.stderr)
                    for found in check.look(client, (dtype, stages), strategy, temperature):
                        answers += 1
                        tokens += len(found.token_ids)
                        seen[strategy] += 1
                        if strategy != PLAIN and found.stats.get("tokens_per_step"):
                            steps.append(found.stats["tokens_per_step"] or 0.0)
            cells = (dtype, stages, answers, tokens, f"{sum(steps) / max(1, len(steps)):.2f}")
            print(
                f"| {' | '.join(map(str, cells))} | {len(check.differing) - before} |", flush=True
            )
    except FlowSpecError as error:
        sys.exit(f"equality: {error}")
    print(f"\nAnswers by strategy: {', '.join(f'{name} {n}' for name, n in seen.items())}.")
    for line in check.differing:
        print(f"- {line}")
    if check.differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
